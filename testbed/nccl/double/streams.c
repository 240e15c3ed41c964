/* Streams and events: a stream is a queue with a thread of its own, an event is a pair of counters.
 *
 * Work runs in the order of its stream.  As long as a stream holds nothing, copies, fills and events take
 * effect in the caller, and the thread is not even started: most of NCCL's streams never need one.
 * Kernels and host functions always run on the stream's thread, because they may wait for the caller.
 */
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "double.h"

enum { YIELDS_BEFORE_SLEEP = 100 };

struct event {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t recorded, completed; /* numbers of the latest record asked for, and of the latest one reached */
    int64_t completed_at_ns;
    int references; /* the owner's and one per task: NCCL destroys events that are still awaited */
    struct capture capture;
};

struct stream {
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    struct task *first, **end;
    uint64_t enqueued, completed;
    bool started, leaving;
    pthread_t thread;
    unsigned flags;
    uint64_t id;
    struct capture capture;
};

static struct stream default_stream = {
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .work = PTHREAD_COND_INITIALIZER,
    .done = PTHREAD_COND_INITIALIZER,
    .end = &default_stream.first,
};

/* NULL, cudaStreamLegacy (1) and cudaStreamPerThread (2) are handles without an object. */
static struct stream *resolve(struct stream *stream) {
    return (uintptr_t)stream <= 2 ? &default_stream : stream;
}

/* ---- events ---- */

struct event *event_keep(struct event *event) {
    pthread_mutex_lock(&event->lock);
    event->references++;
    pthread_mutex_unlock(&event->lock);
    return event;
}

void event_drop(struct event *event) {
    pthread_mutex_lock(&event->lock);
    bool last = --event->references == 0;
    pthread_mutex_unlock(&event->lock);
    if (last) {
        capture_leave_event(&event->capture);
        pthread_mutex_destroy(&event->lock);
        pthread_cond_destroy(&event->changed);
        free(event);
    }
}

static void event_reached(struct event *event, uint64_t record) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    pthread_mutex_lock(&event->lock);
    if (event->completed < record)
        event->completed = record;
    event->completed_at_ns = now.tv_sec * 1000000000ll + now.tv_nsec;
    pthread_cond_broadcast(&event->changed);
    pthread_mutex_unlock(&event->lock);
}

static void event_await(struct event *event, uint64_t record) {
    pthread_mutex_lock(&event->lock);
    while (event->completed < record)
        pthread_cond_wait(&event->changed, &event->lock);
    pthread_mutex_unlock(&event->lock);
}

/* The number of the latest record, and whether it is still ahead. */
static bool event_pending(struct event *event, uint64_t *record) {
    pthread_mutex_lock(&event->lock);
    *record = event->recorded;
    bool pending = event->completed < event->recorded;
    pthread_mutex_unlock(&event->lock);
    return pending;
}

/* ---- the queue ---- */

/* A GPU that does not come to a kernel: while the file "$CUDA_DOUBLE_HANG.<pid>" exists, none begins. */
static void hang_on_request(void) {
    const char *prefix = getenv("CUDA_DOUBLE_HANG");
    if (prefix == NULL)
        return;
    char path[4096];
    snprintf(path, sizeof path, "%s.%d", prefix, (int)getpid());
    while (access(path, F_OK) == 0)
        usleep(10000);
}

static void perform(struct task *task) {
    switch (task->kind) {
    case TASK_COPY:
        memmove(task->to, task->from, task->size_bytes);
        break;
    case TASK_FILL:
        memset(task->to, task->value, task->size_bytes);
        break;
    case TASK_CALL:
        task->function(task->to);
        break;
    case TASK_KERNEL:
        hang_on_request();
        kernel_run(task->kernel);
        kernel_free(task->kernel);
        break;
    case TASK_RECORD:
        event_reached(task->event, task->record);
        event_drop(task->event);
        break;
    case TASK_WAIT:
        event_await(task->event, task->record);
        event_drop(task->event);
        break;
    }
}

/* Wait for a change of the stream, whose lock is held: a few times only give way, as the change mostly
 * comes within microseconds, then sleep. */
static void wait_a_while(struct stream *stream, pthread_cond_t *change, int times_waited) {
    if (times_waited >= YIELDS_BEFORE_SLEEP) {
        pthread_cond_wait(change, &stream->lock);
        return;
    }
    pthread_mutex_unlock(&stream->lock);
    sched_yield();
    pthread_mutex_lock(&stream->lock);
}

static void *stream_thread(void *argument) {
    struct stream *stream = argument;
    pthread_setname_np(pthread_self(), "cuda-stream");
    pthread_mutex_lock(&stream->lock);
    for (;;) {
        for (int i = 0; stream->first == NULL && !stream->leaving; i++)
            wait_a_while(stream, &stream->work, i);
        struct task *task = stream->first;
        if (task == NULL)
            break;
        stream->first = task->next;
        if (stream->first == NULL)
            stream->end = &stream->first;
        pthread_mutex_unlock(&stream->lock);
        perform(task);
        free(task);
        pthread_mutex_lock(&stream->lock);
        stream->completed++;
        pthread_cond_broadcast(&stream->done);
    }
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}

struct capture *stream_capture(struct stream *stream) {
    return &resolve(stream)->capture;
}

struct capture *event_capture(struct event *event) {
    return &event->capture;
}

void stream_submit(struct stream *stream, struct task task) {
    stream = resolve(stream);
    if (capture_task(&stream->capture, &task))
        return;
    pthread_mutex_lock(&stream->lock);
    bool idle = stream->enqueued == stream->completed;
    bool waits = task.kind == TASK_CALL || task.kind == TASK_KERNEL || task.kind == TASK_WAIT;
    if (idle && !waits) {
        perform(&task);
        pthread_mutex_unlock(&stream->lock);
        return;
    }
    struct task *entry = malloc(sizeof *entry);
    if (entry == NULL)
        double_fail("out of memory");
    *entry = task;
    entry->next = NULL;
    *stream->end = entry;
    stream->end = &entry->next;
    stream->enqueued++;
    if (!stream->started) {
        stream->started = true;
        if (pthread_create(&stream->thread, NULL, stream_thread, stream) != 0)
            double_fail("cannot start a stream's thread");
    }
    pthread_cond_signal(&stream->work);
    pthread_mutex_unlock(&stream->lock);
}

void stream_call(struct stream *stream, void (*function)(void *), void *argument) {
    stream_submit(stream, (struct task){.kind = TASK_CALL, .function = function, .to = argument});
}

void stream_launch(struct stream *stream, struct kernel *kernel) {
    stream_submit(stream, (struct task){.kind = TASK_KERNEL, .kernel = kernel});
}

/* ---- CUDA's functions on streams ---- */

static int do_stream_create(struct stream **out, unsigned flags) {
    static uint64_t streams;
    struct stream *stream = calloc(1, sizeof *stream);
    if (stream == NULL)
        double_fail("out of memory");
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->work, NULL);
    pthread_cond_init(&stream->done, NULL);
    stream->end = &stream->first;
    stream->flags = flags;
    stream->id = __atomic_add_fetch(&streams, 1, __ATOMIC_RELAXED);
    *out = stream;
    return CUDA_SUCCESS;
}

static int do_stream_create_plain(struct stream **out) {
    return do_stream_create(out, 0);
}

static int do_stream_create_with_priority(struct stream **out, unsigned flags, int priority) {
    (void)priority;
    return do_stream_create(out, flags);
}

static int do_stream_destroy(struct stream *stream) {
    if (resolve(stream) == &default_stream)
        return CUDA_INVALID_VALUE;
    capture_leave_stream(&stream->capture);
    pthread_mutex_lock(&stream->lock);
    stream->leaving = true;
    pthread_cond_signal(&stream->work);
    pthread_mutex_unlock(&stream->lock);
    if (stream->started)
        pthread_join(stream->thread, NULL);
    pthread_mutex_destroy(&stream->lock);
    pthread_cond_destroy(&stream->work);
    pthread_cond_destroy(&stream->done);
    free(stream);
    return CUDA_SUCCESS;
}

static int do_stream_synchronize(struct stream *stream) {
    stream = resolve(stream);
    if (capture_active(&stream->capture))
        return CUDA_CAPTURE_UNSUPPORTED;
    pthread_mutex_lock(&stream->lock);
    uint64_t target = stream->enqueued;
    for (int i = 0; stream->completed < target; i++)
        wait_a_while(stream, &stream->done, i);
    pthread_mutex_unlock(&stream->lock);
    return CUDA_SUCCESS;
}

static int do_stream_query(struct stream *stream) {
    stream = resolve(stream);
    if (capture_active(&stream->capture))
        return CUDA_CAPTURE_UNSUPPORTED;
    pthread_mutex_lock(&stream->lock);
    bool idle = stream->completed == stream->enqueued;
    pthread_mutex_unlock(&stream->lock);
    return idle ? CUDA_SUCCESS : CUDA_NOT_READY;
}

static int do_stream_get_id(struct stream *stream, unsigned long long *id) {
    *id = resolve(stream)->id;
    return CUDA_SUCCESS;
}

static int do_stream_get_flags(struct stream *stream, unsigned *flags) {
    *flags = resolve(stream)->flags;
    return CUDA_SUCCESS;
}

int event_wait(struct stream *stream, struct event *event) {
    uint64_t record;
    if (!event_pending(event, &record))
        return CUDA_SUCCESS;
    stream_submit(stream, (struct task){.kind = TASK_WAIT, .event = event_keep(event), .record = record});
    return CUDA_SUCCESS;
}

static int do_memcpy_async(void *to, const void *from, size_t size_bytes, int kind, struct stream *stream) {
    (void)kind;
    stream_submit(stream, (struct task){.kind = TASK_COPY, .to = to, .from = from, .size_bytes = size_bytes});
    return CUDA_SUCCESS;
}

static int do_memset_async(void *to, int value, size_t size_bytes, struct stream *stream) {
    stream_submit(stream, (struct task){.kind = TASK_FILL, .to = to, .value = value, .size_bytes = size_bytes});
    return CUDA_SUCCESS;
}

static int do_launch_host_func(struct stream *stream, void (*function)(void *), void *argument) {
    stream_call(stream, function, argument);
    return CUDA_SUCCESS;
}

/* ---- CUDA's functions on events ---- */

static int do_event_create(struct event **out) {
    struct event *event = calloc(1, sizeof *event);
    if (event == NULL)
        double_fail("out of memory");
    pthread_mutex_init(&event->lock, NULL);
    pthread_cond_init(&event->changed, NULL);
    event->references = 1;
    *out = event;
    return CUDA_SUCCESS;
}

static int do_event_create_with_flags(struct event **out, unsigned flags) {
    (void)flags;
    return do_event_create(out);
}

static int do_event_destroy(struct event *event) {
    event_drop(event);
    return CUDA_SUCCESS;
}

int event_record(struct event *event, struct stream *stream) {
    pthread_mutex_lock(&event->lock);
    uint64_t record = ++event->recorded;
    event->references++;
    pthread_mutex_unlock(&event->lock);
    stream_submit(stream, (struct task){.kind = TASK_RECORD, .event = event, .record = record});
    return CUDA_SUCCESS;
}

static int do_event_query(struct event *event) {
    uint64_t record;
    if (event->capture.graph != NULL)
        return CUDA_CAPTURED_EVENT;
    return event_pending(event, &record) ? CUDA_NOT_READY : CUDA_SUCCESS;
}

static int do_event_synchronize(struct event *event) {
    uint64_t record;
    if (event->capture.graph != NULL)
        return CUDA_CAPTURED_EVENT;
    if (event_pending(event, &record))
        event_await(event, record);
    return CUDA_SUCCESS;
}

static int do_event_elapsed_time(float *milliseconds, struct event *start, struct event *end) {
    *milliseconds = (float)(end->completed_at_ns - start->completed_at_ns) / 1e6f;
    return CUDA_SUCCESS;
}

#define PLAYED(name, function) {#name, (void *)(function)}

const struct replacement stream_replacements[] = {
    PLAYED(cudaStreamCreate, do_stream_create_plain),
    PLAYED(cudaStreamCreateWithFlags, do_stream_create),
    PLAYED(cudaStreamCreateWithPriority, do_stream_create_with_priority),
    PLAYED(cudaStreamDestroy, do_stream_destroy),
    PLAYED(cudaStreamSynchronize, do_stream_synchronize),
    PLAYED(cudaStreamQuery, do_stream_query),
    PLAYED(cudaStreamGetId, do_stream_get_id),
    PLAYED(cudaStreamGetFlags, do_stream_get_flags),
    PLAYED(cudaMemcpyAsync, do_memcpy_async),
    PLAYED(cudaMemsetAsync, do_memset_async),
    PLAYED(cudaLaunchHostFunc, do_launch_host_func),
    PLAYED(cudaEventCreate, do_event_create),
    PLAYED(cudaEventCreateWithFlags, do_event_create_with_flags),
    PLAYED(cudaEventDestroy, do_event_destroy),
    PLAYED(cudaEventQuery, do_event_query),
    PLAYED(cudaEventSynchronize, do_event_synchronize),
    PLAYED(cudaEventElapsedTime, do_event_elapsed_time),
    {NULL, NULL},
};
