/* How a rank learns that an operation is over.
 *
 * Without --events it synchronises the stream after each operation.  With --events it behaves like a
 * framework: it calls libcudart.so.12, lets NCCL's stream wait for an event of its own stream, and records
 * an event behind each operation.  Then, as --events says:
 *
 *   query        it asks the event over and over until it has happened
 *   synchronize  it blocks in cudaEventSynchronize
 *   stream       it blocks in cudaStreamSynchronize
 *   watchdog     it goes on, up to WINDOW operations ahead; a thread asks the events, as PyTorch's does
 */
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "driver.h"

enum { WINDOW = 64, DISABLE_TIMING = 2 };
enum way { QUERY, SYNCHRONIZE, STREAM, WATCHDOG, WAYS, PLAIN };

extern void *cuda_double_function(const char *name);

struct cuda cuda;
struct event_counts event_counts;
static enum way way = PLAIN;
static cudaStream_t compute; /* where a framework's own kernels would run */
static cudaEvent_t input_ready;
static cudaEvent_t events[COMMS_MAX][WINDOW];
static uint64_t made[COMMS_MAX], over[COMMS_MAX]; /* operations recorded, and known to be over */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static bool happened(cudaEvent_t event) {
    int result = cuda.event_query(event);
    __atomic_add_fetch(&event_counts.queries, 1, __ATOMIC_RELAXED);
    if (result == CUDA_NOT_READY)
        __atomic_add_fetch(&event_counts.not_ready, 1, __ATOMIC_RELAXED);
    else
        check_cuda(result, "cudaEventQuery");
    return result == CUDA_SUCCESS;
}

static void *watch(void *unused) {
    (void)unused;
    pthread_setname_np(pthread_self(), "watchdog");
    for (;;) {
        bool idle = true;
        for (int i = 0; i < options.communicators; i++) {
            pthread_mutex_lock(&lock);
            uint64_t first = over[i], last = made[i];
            pthread_mutex_unlock(&lock);
            while (first < last && happened(events[i][first % WINDOW])) {
                first++;
                idle = false;
            }
            pthread_mutex_lock(&lock);
            over[i] = first;
            pthread_cond_broadcast(&changed);
            pthread_mutex_unlock(&lock);
        }
        if (idle)
            pause_ns(options.event_poll_us * 1000l);
    }
    return NULL;
}

static void *function_of(void *library, const char *name) {
    void *function = library != NULL ? dlsym(library, name) : cuda_double_function(name);
    if (function == NULL)
        die("no CUDA function %s", name);
    return function;
}

void open_cuda(void) {
    static const char *const ways[WAYS] = {"query", "synchronize", "stream", "watchdog"};
    void *library = NULL;
    if (options.events != NULL) {
        way = (enum way)index_of(options.events, ways, WAYS, "way of --events");
        library = dlopen("libcudart.so.12", RTLD_NOW | RTLD_LOCAL);
        if (library == NULL)
            die("%s", dlerror());
    }
    const struct {
        void *to;
        const char *name;
    } wanted[] = {
        {&cuda.stream_create, "cudaStreamCreate"},
        {&cuda.stream_synchronize, "cudaStreamSynchronize"},
        {&cuda.stream_query, "cudaStreamQuery"},
        {&cuda.stream_wait_event, "cudaStreamWaitEvent"},
        {&cuda.event_create, "cudaEventCreateWithFlags"},
        {&cuda.event_record, "cudaEventRecord"},
        {&cuda.event_query, "cudaEventQuery"},
        {&cuda.event_synchronize, "cudaEventSynchronize"},
        {&cuda.begin_capture, "cudaStreamBeginCapture"},
        {&cuda.end_capture, "cudaStreamEndCapture"},
        {&cuda.instantiate, "cudaGraphInstantiate"},
        {&cuda.launch, "cudaGraphLaunch"},
        {&cuda.launch_host_function, "cudaLaunchHostFunc"},
        {&cuda.destroy_executable, "cudaGraphExecDestroy"},
        {&cuda.destroy_graph, "cudaGraphDestroy"},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        void *function = function_of(library, wanted[i].name);
        memcpy(wanted[i].to, &function, sizeof function);
    }
    if (way == PLAIN)
        return;
    check_cuda(cuda.stream_create(&compute), "cudaStreamCreate");
    check_cuda(cuda.event_create(&input_ready, DISABLE_TIMING), "cudaEventCreateWithFlags");
    for (int i = 0; i < COMMS_MAX * WINDOW; i++)
        check_cuda(cuda.event_create(&events[i / WINDOW][i % WINDOW], DISABLE_TIMING), "cudaEventCreateWithFlags");
    pthread_t thread;
    if (way == WATCHDOG && (pthread_create(&thread, NULL, watch, NULL) != 0 || pthread_detach(thread) != 0))
        die("cannot start the watchdog");
}

void before_operation(int communicator) {
    if (way == PLAIN)
        return;
    check_cuda(cuda.event_record(input_ready, compute), "cudaEventRecord");
    check_cuda(cuda.stream_wait_event(jobs[communicator].stream, input_ready, 0), "cudaStreamWaitEvent");
    event_counts.recorded++;
    event_counts.stream_waits++;
}

/* Wait until at most this many of the communicator's operations are not known to be over. */
static void await_window(int communicator, uint64_t ahead) {
    pthread_mutex_lock(&lock);
    while (made[communicator] - over[communicator] > ahead)
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

void after_operation(int communicator) {
    if (way == PLAIN)
        return;
    if (way == WATCHDOG)
        await_window(communicator, WINDOW - 1);
    cudaEvent_t event = events[communicator][made[communicator] % WINDOW];
    check_cuda(cuda.event_record(event, jobs[communicator].stream), "cudaEventRecord");
    event_counts.recorded++;
    pthread_mutex_lock(&lock);
    made[communicator]++;
    pthread_mutex_unlock(&lock);
}

void finish(struct job *job) {
    check_cuda(cuda.stream_synchronize(job->stream), "cudaStreamSynchronize");
}

/* Wait for the communicator's operation in the way of --events. */
static void settle(int communicator) {
    if (made[communicator] == over[communicator])
        return;
    cudaEvent_t event = events[communicator][(made[communicator] - 1) % WINDOW];
    switch (way) {
    case QUERY:
        while (!happened(event))
            pause_ns(options.event_poll_us * 1000l);
        break;
    case SYNCHRONIZE:
        check_cuda(cuda.event_synchronize(event), "cudaEventSynchronize");
        event_counts.event_synchronizes++;
        break;
    default:
        finish(&jobs[communicator]);
        event_counts.stream_synchronizes++;
    }
    over[communicator] = made[communicator];
}

void finish_operations(void) {
    for (int i = 0; i < options.communicators; i++) {
        if (way == PLAIN)
            finish(&jobs[i]);
        else if (way != WATCHDOG)
            settle(i);
    }
}

void finish_all(void) {
    finish_operations();
    for (int i = 0; way == WATCHDOG && i < options.communicators; i++)
        await_window(i, 0);
}
