/* One rank of a test job: the real NCCL, calls of known number and size, a report of what was done.
 *
 * The unique id travels through a file.  With --init-file the rank waits for that file before it makes a communicator.
 * With --start-file the rank waits, fully initialised, until that
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

enum { WAIT_NS = 2000000, POLL_NS = 50000 };

struct options options = {
    .rank = -1,
    .iterations = 1,
    .communicators = 1,
    .event_poll_us = 100,
    .destroy = 1,
    .moments = {.skip_rank = -1, .skip_iteration = -1},
    .blocking = 1,
    .bytes = 1 << 20,
    .pattern = "allreduce",
    .type = "f32",
    .op = "sum",
};

struct job jobs[COMMS_MAX];
int open_jobs;
struct tally replayed[COUNTED];
bool verified = true;
static struct tally tallies[COUNTED];
static int in_progress; /* calls that returned before they were done */

void die(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "nccl-driver rank %d: ", options.rank);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(1);
}

/* Wait until no communicator has a call under way, as who does not block must before the next one. */
static void await_communicators(const char *what) {
    for (int i = 0; i < open_jobs; i++) {
        ncclResult_t state = jobs[i].comm != NULL ? NCCL_IN_PROGRESS : NCCL_OK;
        while (state == NCCL_IN_PROGRESS) {
            if (ncclCommGetAsyncError(jobs[i].comm, &state) != NCCL_OK)
                die("%s: ncclCommGetAsyncError fails", what);
            if (state == NCCL_IN_PROGRESS)
                pause_ns(POLL_NS);
        }
        if (state != NCCL_OK)
            die("%s: %s (%s)", what, ncclGetErrorString(state), ncclGetLastError(NULL));
    }
}

void check(ncclResult_t result, const char *what) {
    /* A split returns success while its parent is still busy. */
    if (!options.blocking && (result == NCCL_OK || result == NCCL_IN_PROGRESS)) {
        in_progress += result == NCCL_IN_PROGRESS;
        return await_communicators(what);
    }
    if (result != NCCL_OK)
        die("%s: %s (%s)", what, ncclGetErrorString(result), ncclGetLastError(NULL));
}

void check_cuda(int result, const char *what) {
    if (result != CUDA_SUCCESS)
        die("%s returns %d", what, result);
}

/* ---- files ---- */

void pause_ns(long nanoseconds) {
    nanosleep(&(struct timespec){nanoseconds / 1000000000, nanoseconds % 1000000000}, NULL);
}

static void await_file(const char *path) {
    while (access(path, R_OK) != 0)
        pause_ns(WAIT_NS);
}

void write_file(const char *path, const void *bytes, size_t size) {
    char partial[4096];
    snprintf(partial, sizeof partial, "%s.partial.%d", path, getpid());
    FILE *file = fopen(partial, "w");
    if (file == NULL || fwrite(bytes, 1, size, file) != size || fclose(file) != 0 || rename(partial, path) != 0)
        die("cannot write %s: %m", path);
}

void share_id(int which, const ncclUniqueId *id) {
    char path[4096];
    snprintf(path, sizeof path, "%s.%d", options.id, which);
    write_file(path, id, sizeof *id);
}

ncclUniqueId shared_id(int which) {
    ncclUniqueId id;
    char path[4096];
    snprintf(path, sizeof path, "%s.%d", options.id, which);
    await_file(path);
    FILE *file = fopen(path, "r");
    if (file == NULL || fread(&id, sizeof id, 1, file) != 1)
        die("cannot read %s: %m", path);
    fclose(file);
    return id;
}

/* ---- jobs ---- */

int index_of(const char *name, const char *const *names, int count, const char *what) {
    for (int i = 0; i < count; i++)
        if (strcmp(names[i], name) == 0)
            return i;
    die("unknown %s %s", what, name);
}

struct job *open_job(void) {
    if (open_jobs == COMMS_MAX)
        die("too many communicators");
    struct job *job = &jobs[open_jobs++];
    check_cuda(cuda.stream_create(&job->stream), "cudaStreamCreate");
    job->rank = options.rank;
    job->ranks = options.ranks;
    job->tallies = tallies;
    return job;
}

void close_job(struct job *job) {
    ncclComm_t comm = job->comm;
    check(ncclCommFinalize(comm), "ncclCommFinalize");
    job->comm = NULL;
    check(ncclCommDestroy(comm), "ncclCommDestroy");
}

static void open_communicators(void) {
    int version = 0;
    ncclGetVersion(&version);
    for (int i = 0; i < options.communicators; i++) {
        struct job *job = open_job();
        ncclUniqueId id;
        if (options.rank == 0) {
            check(ncclGetUniqueId(&id), "ncclGetUniqueId");
            share_id(i, &id);
        } else {
            id = shared_id(i);
        }
        moments_before_init(&options.moments, options.rank, options.ranks);
        if (options.blocking) {
            check(ncclCommInitRank(&job->comm, options.ranks, id, options.rank), "ncclCommInitRank");
            continue;
        }
        ncclConfig_t config = {sizeof config, NCCL_CONFIG_MAGIC, (unsigned)version, options.blocking,
                               NCCL_NOT_SET,  NCCL_NOT_SET,      NCCL_NOT_SET,      NULL,
                               NCCL_NOT_SET};
        ncclResult_t result = ncclCommInitRankConfig(&job->comm, options.ranks, id, options.rank, &config);
        check(result, "ncclCommInitRankConfig");
    }
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void write_tallies(FILE *file, const char *name, const struct tally *counts) {
    const char *comma = "";
    fprintf(file, "\"%s\": {", name);
    for (int i = 0; i < COUNTED; i++) {
        if (counts[i].calls == 0)
            continue;
        fprintf(file, "%s\"%s\": {\"calls\": %llu, \"payload_bytes\": %llu}", comma, counted_names[i],
                (unsigned long long)counts[i].calls, (unsigned long long)counts[i].payload_bytes);
        comma = ", ";
    }
    fprintf(file, "}, ");
}

static void write_results(FILE *file) {
    fprintf(file, "\"results\": [");
    for (int i = 0; i < RESULTS_MAX && results[i].function != NULL; i++)
        fprintf(file, "%s[\"%s\", %d]", i > 0 ? ", " : "", results[i].function, results[i].result);
    fprintf(file, "], ");
}

static void write_events(FILE *file) {
    const struct event_counts *e = &event_counts;
    fprintf(file,
            "\"events\": {\"recorded\": %llu, \"queries\": %llu, \"not_ready\": %llu, \"event_synchronizes\": %llu, "
            "\"stream_synchronizes\": %llu, \"stream_waits\": %llu}, ",
            (unsigned long long)e->recorded, (unsigned long long)e->queries, (unsigned long long)e->not_ready,
            (unsigned long long)e->event_synchronizes, (unsigned long long)e->stream_synchronizes,
            (unsigned long long)e->stream_waits);
}

static void report(double took) {
    char *text = NULL;
    size_t length = 0;
    int version = 0;
    ncclGetVersion(&version);
    FILE *file = open_memstream(&text, &length);
    if (file == NULL)
        die("out of memory");
    fprintf(file, "{");
    write_tallies(file, "operations", tallies);
    write_tallies(file, "replayed", replayed);
    write_results(file);
    write_events(file);
    fprintf(file,
            "\"pid\": %d, \"rank\": %d, \"ranks\": %d, \"nccl_version\": %d, \"communicators\": %d, "
            "\"verified\": %s, \"seconds\": %.6f, \"in_progress\": %d}\n",
            getpid(), options.rank, options.ranks, version, options.communicators, verified ? "true" : "false", took,
            in_progress);
    if (fclose(file) != 0)
        die("out of memory");
    write_file(options.report, text, length);
    free(text);
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
    {"--destroy", NULL, &options.destroy},
    {"--blocking", NULL, &options.blocking},
    {"--id", &options.id, NULL},
    {"--report", &options.report, NULL},
    {"--init-file", &options.init, NULL},
    {"--ready-file", &options.ready, NULL},
    {"--start-file", &options.start, NULL},
    {"--hold-file", &options.hold, NULL},
    {"--progress-file", &options.progress, NULL},
    {"--events", &options.events, NULL},
    {"--shape", &options.shape, NULL},
    {"--event-poll-us", NULL, &options.event_poll_us},
    {"--evaluate-every", NULL, &options.evaluate_every},
    {"--evaluate-calls", NULL, &options.evaluate_calls},
    {"--pattern", &options.pattern, NULL},
    {"--type", &options.type, NULL},
    {"--op", &options.op, NULL},
};

static const struct {
    const char *name;
    int64_t *number;
} known_moments[] = {
    {"--pace-us", &options.moments.pace_us},
    {"--pause-every", &options.moments.pause_every},
    {"--pause-ms", &options.moments.pause_ms},
    {"--checkpoint-every", &options.moments.checkpoint_every},
    {"--checkpoint-ms", &options.moments.checkpoint_ms},
    {"--late-ms", &options.moments.late_ms},
    {"--warm-up-ms", &options.moments.warm_up_ms},
    {"--skip-rank", &options.moments.skip_rank},
    {"--skip-iteration", &options.moments.skip_iteration},
    {"--instead", &options.moments.instead},
    {"--checkpoint-by", &options.moments.checkpoint_by},
    {"--slow-rank", &options.moments.slow_rank},
    {"--slow-every", &options.moments.slow_every},
    {"--slow-ms", &options.moments.slow_ms},
    {"--slow-in-turn", &options.moments.slow_in_turn},
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
    for (size_t i = 0; i < sizeof known_moments / sizeof *known_moments; i++) {
        if (strcmp(known_moments[i].name, name) != 0)
            continue;
        *known_moments[i].number = strtoll(value, NULL, 10);
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
    read_options(argc, argv);
    open_cuda();
    if (options.init != NULL)
        await_file(options.init);
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
    for (int i = open_jobs - 1; options.destroy && i >= 0; i--)
        if (jobs[i].comm != NULL)
            close_job(&jobs[i]);
    return verified ? 0 : 1;
}
