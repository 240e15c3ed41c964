/* One rank of a test job: the real NCCL, calls of known number and size, a report of what was done.
 *
 * The unique id travels through a file.  With --start-file the rank waits, fully initialised, until that
 * file exists, so that an observer can attach before the first collective; --hold-file does the same
 * before the communicators are destroyed.  The report is one JSON object.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "driver.h"

enum { COMMS_MAX = 8, WAIT_NS = 2000000 };

static struct {
    int rank, ranks, iterations, communicators, pace_us;
    size_t bytes;
    const char *id, *report, *ready, *start, *hold, *pattern, *type, *op;
} options = {
    .rank = -1,
    .iterations = 1,
    .communicators = 1,
    .bytes = 1 << 20,
    .pattern = "allreduce",
    .type = "f32",
    .op = "sum",
};

int (*stream_create)(cudaStream_t *stream);
int (*stream_synchronize)(cudaStream_t stream);
static struct tally tallies[COUNTED];
static struct job jobs[COMMS_MAX];
static bool verified = true;

void die(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "nccl-driver rank %d: ", options.rank);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(1);
}

void check(ncclResult_t result, const char *what) {
    if (result != NCCL_OK)
        die("%s: %s (%s)", what, ncclGetErrorString(result), ncclGetLastError(NULL));
}

/* ---- files ---- */

static void pause_ns(long nanoseconds) {
    nanosleep(&(struct timespec){nanoseconds / 1000000000, nanoseconds % 1000000000}, NULL);
}

static void await_file(const char *path) {
    while (access(path, R_OK) != 0)
        pause_ns(WAIT_NS);
}

/* Written under another name first: a reader sees all of it or nothing. */
static void write_file(const char *path, const void *bytes, size_t size) {
    char partial[4096];
    snprintf(partial, sizeof partial, "%s.partial.%d", path, getpid());
    FILE *file = fopen(partial, "w");
    if (file == NULL || fwrite(bytes, 1, size, file) != size || fclose(file) != 0 || rename(partial, path) != 0)
        die("cannot write %s: %m", path);
}

static ncclUniqueId shared_id(int which) {
    ncclUniqueId id;
    char path[4096];
    snprintf(path, sizeof path, "%s.%d", options.id, which);
    if (options.rank == 0) {
        check(ncclGetUniqueId(&id), "ncclGetUniqueId");
        write_file(path, &id, sizeof id);
        return id;
    }
    await_file(path);
    FILE *file = fopen(path, "r");
    if (file == NULL || fread(&id, sizeof id, 1, file) != 1)
        die("cannot read %s: %m", path);
    fclose(file);
    return id;
}

/* ---- jobs ---- */

static int index_of(const char *name, const char *const *names, int count, const char *what) {
    for (int i = 0; i < count; i++)
        if (strcmp(names[i], name) == 0)
            return i;
    die("unknown %s %s", what, name);
}

static void open_communicators(void) {
    for (int i = 0; i < options.communicators; i++) {
        struct job *job = &jobs[i];
        check(ncclCommInitRank(&job->comm, options.ranks, shared_id(i), options.rank), "ncclCommInitRank");
        if (stream_create(&job->stream) != 0)
            die("cannot create a stream");
        job->rank = options.rank;
        job->ranks = options.ranks;
        job->tallies = tallies;
    }
}

static void give_buffers(struct job *job, const struct request *request) {
    free(job->send);
    free(job->receive);
    size_t size = buffer_bytes(request, options.ranks) + 4096;
    if (posix_memalign((void **)&job->send, 4096, size) != 0 || posix_memalign((void **)&job->receive, 4096, size) != 0)
        die("out of memory");
}

static void finish(struct job *job) {
    if (stream_synchronize(job->stream) != 0)
        die("cannot synchronise");
}

/* The same operation over and over; the first and the last are verified. */
static void repeat(const struct request *request) {
    for (int i = 0; i < options.communicators; i++)
        give_buffers(&jobs[i], request);
    for (int iteration = 0; iteration < options.iterations; iteration++) {
        bool checked = iteration == 0 || iteration == options.iterations - 1;
        for (int i = 0; checked && i < options.communicators; i++)
            fill(&jobs[i], request);
        for (int i = 0; i < options.communicators; i++)
            call(&jobs[i], request);
        for (int i = 0; i < options.communicators; i++)
            finish(&jobs[i]);
        for (int i = 0; checked && i < options.communicators; i++)
            verified &= verify(&jobs[i], request);
        if (options.pace_us > 0)
            pause_ns(options.pace_us * 1000l);
    }
}

static struct request request_of(enum operation operation, int type, int op) {
    struct request request = {operation, type, op, options.ranks - 1, options.bytes / type_bytes(type)};
    return request;
}

/* Every operation with every type, and every reduction where one applies. */
static void everything(void) {
    static const int types[] = {NCCL_F32, NCCL_F16, NCCL_BF16, NCCL_I32, NCCL_F64, NCCL_U8, NCCL_I64};
    for (size_t t = 0; t < sizeof types / sizeof *types; t++)
        for (int operation = 0; operation < OPERATIONS; operation++) {
            bool reduces = operation == ALLREDUCE || operation == REDUCESCATTER || operation == REDUCE;
            for (int op = NCCL_SUM; op <= (reduces ? NCCL_AVG : NCCL_SUM); op++) {
                struct request request = request_of((enum operation)operation, types[t], op);
                repeat(&request);
            }
        }
}

/* All operations in turn, as a training step would have them. */
static void mixed(int type) {
    for (int operation = 0; operation < OPERATIONS; operation++) {
        struct request request = request_of((enum operation)operation, type, NCCL_SUM);
        repeat(&request);
    }
}

/* Several collectives of different sizes in one group: they become one launch. */
static void grouped(int type) {
    struct request request = request_of(ALLREDUCE, type, NCCL_SUM);
    enum { PARTS = 4 };
    struct job parts[PARTS];
    struct request requests[PARTS];
    for (int iteration = 0; iteration < options.iterations; iteration++) {
        for (int i = 0; i < PARTS; i++) {
            requests[i] = request;
            requests[i].count = request.count >> i;
            parts[i] = jobs[0];
            parts[i].send = parts[i].receive = NULL;
            give_buffers(&parts[i], &requests[i]);
            fill(&parts[i], &requests[i]);
        }
        check(ncclGroupStart(), "ncclGroupStart");
        for (int i = 0; i < PARTS; i++)
            call(&parts[i], &requests[i]);
        check(ncclGroupEnd(), "ncclGroupEnd");
        finish(&jobs[0]);
        for (int i = 0; i < PARTS; i++) {
            verified &= verify(&parts[i], &requests[i]);
            free(parts[i].send);
            free(parts[i].receive);
        }
    }
}

/* Even and odd ranks apart, each half with a communicator split off. */
static void split(int type) {
    struct job half = jobs[0];
    half.send = half.receive = NULL;
    check(ncclCommSplit(jobs[0].comm, options.rank % 2, options.rank, &half.comm, NULL), "ncclCommSplit");
    check(ncclCommCount(half.comm, &half.ranks), "ncclCommCount");
    check(ncclCommUserRank(half.comm, &half.rank), "ncclCommUserRank");
    struct request request = request_of(ALLREDUCE, type, NCCL_SUM);
    for (int iteration = 0; iteration < options.iterations; iteration++) {
        give_buffers(&half, &request);
        fill(&half, &request);
        call(&half, &request);
        finish(&half);
        verified &= verify(&half, &request);
    }
    free(half.send);
    free(half.receive);
    check(ncclCommDestroy(half.comm), "ncclCommDestroy");
}

/* Rank 0 never comes: the others wait in their kernel until the communicator is aborted. */
static void abandoned(int type) {
    struct request request = request_of(ALLREDUCE, type, NCCL_SUM);
    give_buffers(&jobs[0], &request);
    fill(&jobs[0], &request);
    if (options.rank != 0)
        call(&jobs[0], &request);
    pause_ns(300000000);
    check(ncclCommAbort(jobs[0].comm), "ncclCommAbort");
    finish(&jobs[0]);
    jobs[0].comm = NULL;
}

static void run_pattern(void) {
    static const char *const types[] = {"i8", "u8", "i32", "u32", "i64", "u64", "f16", "f32", "f64", "bf16"};
    static const char *const ops[] = {"sum", "prod", "max", "min", "avg"};
    static const char *const patterns[] = {"allreduce", "allgather", "reducescatter", "broadcast",
                                           "reduce",    "alltoall",  "sendrecv",      "everything",
                                           "mixed",     "grouped",   "split",         "abandoned"};
    int type = index_of(options.type, types, 10, "type"), op = index_of(options.op, ops, 5, "op");
    int pattern = index_of(options.pattern, patterns, 12, "pattern");
    struct request request;
    switch (pattern) {
    case 7:
        return everything();
    case 8:
        return mixed(type);
    case 9:
        return grouped(type);
    case 10:
        return split(type);
    case 11:
        return abandoned(type);
    default:
        request = request_of((enum operation)pattern, type, op);
        return repeat(&request);
    }
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void report(double took) {
    char text[4096];
    int version = 0, length = 0;
    ncclGetVersion(&version);
    length += snprintf(text, sizeof text,
                       "{\"pid\": %d, \"rank\": %d, \"ranks\": %d, \"nccl_version\": %d, \"communicators\": %d, "
                       "\"verified\": %s, \"seconds\": %.6f, \"operations\": {",
                       getpid(), options.rank, options.ranks, version, options.communicators,
                       verified ? "true" : "false", took);
    bool first = true;
    for (int i = 0; i < COUNTED; i++) {
        if (tallies[i].calls == 0)
            continue;
        length += snprintf(text + length, sizeof text - (size_t)length,
                           "%s\"%s\": {\"calls\": %llu, \"payload_bytes\": %llu}", first ? "" : ", ", counted_names[i],
                           (unsigned long long)tallies[i].calls, (unsigned long long)tallies[i].payload_bytes);
        first = false;
    }
    length += snprintf(text + length, sizeof text - (size_t)length, "}}\n");
    write_file(options.report, text, (size_t)length);
}

static const struct {
    const char *name;
    const char **text;
    int *number;
} known_options[] = {
    {"--rank", NULL, &options.rank},
    {"--ranks", NULL, &options.ranks},
    {"--iterations", NULL, &options.iterations},
    {"--communicators", NULL, &options.communicators},
    {"--pace-us", NULL, &options.pace_us},
    {"--id", &options.id, NULL},
    {"--report", &options.report, NULL},
    {"--ready-file", &options.ready, NULL},
    {"--start-file", &options.start, NULL},
    {"--hold-file", &options.hold, NULL},
    {"--pattern", &options.pattern, NULL},
    {"--type", &options.type, NULL},
    {"--op", &options.op, NULL},
};

static void read_option(const char *name, const char *value) {
    if (strcmp(name, "--bytes") == 0) {
        options.bytes = strtoull(value, NULL, 10);
        return;
    }
    for (size_t i = 0; i < sizeof known_options / sizeof *known_options; i++) {
        if (strcmp(known_options[i].name, name) != 0)
            continue;
        if (known_options[i].text != NULL)
            *known_options[i].text = value;
        else
            *known_options[i].number = atoi(value);
        return;
    }
    die("unknown option %s", name);
}

static void read_options(int argc, char **argv) {
    for (int i = 1; i < argc; i += 2) {
        if (i + 1 == argc)
            die("%s needs a value", argv[i]);
        read_option(argv[i], argv[i + 1]);
    }
    if (options.rank < 0 || options.ranks < 2 || options.rank >= options.ranks || !options.id || !options.report ||
        options.communicators < 1 || options.communicators > COMMS_MAX || options.iterations < 1)
        die("needs --rank, --ranks (2 or more), --id FILE and --report FILE");
}

int main(int argc, char **argv) {
    extern void *cuda_double_function(const char *name);
    read_options(argc, argv);
    stream_create = (int (*)(cudaStream_t *))cuda_double_function("cudaStreamCreate");
    stream_synchronize = (int (*)(cudaStream_t))cuda_double_function("cudaStreamSynchronize");
    open_communicators();
    if (options.ready != NULL)
        write_file(options.ready, "ready\n", 6);
    if (options.start != NULL)
        await_file(options.start);
    double began = seconds();
    run_pattern();
    double took = seconds() - began;
    report(took);
    if (options.hold != NULL)
        await_file(options.hold);
    for (int i = 0; i < options.communicators; i++) {
        if (jobs[i].comm == NULL)
            continue;
        check(ncclCommFinalize(jobs[i].comm), "ncclCommFinalize");
        check(ncclCommDestroy(jobs[i].comm), "ncclCommDestroy");
    }
    return verified ? 0 : 1;
}
