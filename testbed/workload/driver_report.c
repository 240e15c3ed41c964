/* What this rank called, as JSON: the truth that an observer's numbers are held against.
 *
 * Calls are counted where they are made, before they are made.  The report can be written by another thread while the
 * rank is stuck in a call, so counts are atomic and the lists have a lock. */
#define _GNU_SOURCE
#include "driver.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { ERRORS_KEPT = 10, RAILS_SHOWN = 8 };

static const char *const op_names[COUNT_OPS] = {
    [COUNT_ALL_REDUCE] = "AllReduce", [COUNT_ALL_GATHER] = "AllGather", [COUNT_REDUCE_SCATTER] = "ReduceScatter",
    [COUNT_BROADCAST] = "Broadcast",  [COUNT_REDUCE] = "Reduce",        [COUNT_ALL_TO_ALL] = "AllToAll",
    [COUNT_GATHER] = "Gather",        [COUNT_SCATTER] = "Scatter",      [COUNT_SEND] = "Send",
    [COUNT_RECV] = "Recv",
};
static const char *const type_names[ncclNumTypes] = {
    [ncclInt8] = "int8",         [ncclUint8] = "uint8",       [ncclInt32] = "int32",
    [ncclUint32] = "uint32",     [ncclInt64] = "int64",       [ncclUint64] = "uint64",
    [ncclFloat16] = "float16",   [ncclFloat32] = "float32",   [ncclFloat64] = "float64",
    [ncclBfloat16] = "bfloat16", [ncclFloat8e4m3] = "float8e4m3", [ncclFloat8e5m2] = "float8e5m2",
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t writing = PTHREAD_MUTEX_INITIALIZER;
static struct party *parties, **parties_end = &parties;
static char errors[ERRORS_KEPT][256];
static int error_count;
static const struct options *current; /* for the report of a rank that fails */
static double began_seconds, ended_seconds;

static double now_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

struct party *party_make(ncclComm_t comm) {
    struct party *party = calloc(1, sizeof *party);
    if (party == NULL)
        abort();
    party->comm = comm;
    party->hash = workload_comm_hash(comm);
    must(ncclCommUserRank(comm, &party->rank), "ncclCommUserRank");
    must(ncclCommCount(comm, &party->nranks), "ncclCommCount");
    pthread_mutex_lock(&lock);
    *parties_end = party;
    parties_end = &party->next;
    pthread_mutex_unlock(&lock);
    return party;
}

void party_called(struct party *party, enum report_op op, size_t count, ncclDataType_t type) {
    atomic_fetch_add_explicit(&party->counts[op][type].calls, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&party->counts[op][type].payload_bytes, count * element_bytes(type),
                              memory_order_relaxed);
}

void report_error(const char *format, ...) {
    char text[sizeof errors[0]];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr, "railscope-workload: %s\n", text);
    pthread_mutex_lock(&lock);
    if (error_count < ERRORS_KEPT)
        memcpy(errors[error_count], text, sizeof text);
    error_count++;
    pthread_mutex_unlock(&lock);
}

bool report_has_errors(void) { return error_count > 0; }

void must(ncclResult_t result, const char *call) {
    if (result == ncclSuccess)
        return;
    report_error("%.*s: %s: %s", (int)strcspn(call, "("), call, ncclGetErrorString(result), ncclGetLastError(NULL));
    report_ended();
    if (current != NULL)
        report_write(current, false);
    if (current != NULL && current->linger)
        wait_for_ever();
    _exit(1);
}

void report_options(const struct options *options) { current = options; }

void report_began(void) { began_seconds = now_seconds(); }
void report_ended(void) { ended_seconds = now_seconds(); }

static void write_text(FILE *file, const char *text) {
    fputc('"', file);
    for (; *text != '\0'; text++) {
        if (*text == '"' || *text == '\\')
            fputc('\\', file);
        fputc((unsigned char)*text < 0x20 ? ' ' : *text, file);
    }
    fputc('"', file);
}

static uint64_t write_party(FILE *file, const struct party *party, uint64_t totals[COUNT_OPS][2]) {
    const char *separator = "";
    uint64_t all = 0;
    fprintf(file, "{\"hash\": \"%016llx\", \"rank\": %d, \"nranks\": %d, \"operations\": [",
            (unsigned long long)party->hash, party->rank, party->nranks);
    for (int op = 0; op < COUNT_OPS; op++)
        for (int type = 0; type < ncclNumTypes; type++) {
            uint64_t calls = atomic_load(&party->counts[op][type].calls);
            uint64_t payload = atomic_load(&party->counts[op][type].payload_bytes);
            if (calls == 0)
                continue;
            fprintf(file, "%s{\"op\": \"%s\", \"dtype\": \"%s\", \"calls\": %llu, \"payload_bytes\": %llu}", separator,
                    op_names[op], type_names[type], (unsigned long long)calls, (unsigned long long)payload);
            separator = ", ";
            totals[op][0] += calls;
            totals[op][1] += payload;
            all += calls;
        }
    fprintf(file, "]}");
    return all;
}

static void write_rails(FILE *file) {
    struct workload_rail rails[RAILS_SHOWN];
    int count = workload_rails(rails, RAILS_SHOWN);
    for (int rail = 0; rail < count; rail++)
        fprintf(file, "%s{\"rail\": \"%s\", \"transmit_bytes\": %llu, \"receive_bytes\": %llu}", rail > 0 ? ", " : "",
                rails[rail].name, (unsigned long long)rails[rail].transmit_bytes,
                (unsigned long long)rails[rail].receive_bytes);
}

static void write_json(FILE *file, const struct options *options, bool interrupted) {
    const char *host = getenv("NCCL_HOSTID"), *separator = "";
    char name[256] = "unknown";
    uint64_t totals[COUNT_OPS][2] = {{0}}, calls = 0;
    gethostname(name, sizeof name - 1);
    double seconds = began_seconds == 0 ? 0 : (ended_seconds > 0 ? ended_seconds : now_seconds()) - began_seconds;
    fprintf(file, "{\"pid\": %d, \"rank\": %d, \"nranks\": %d, \"pattern\": \"%s\", \"host\": ", (int)getpid(),
            options->rank, options->nranks, options->pattern);
    write_text(file, host != NULL && *host != '\0' ? host : name);
    fprintf(file, ",\n \"communicators\": [");
    for (const struct party *party = parties; party != NULL; party = party->next) {
        fprintf(file, "%s\n  ", party != parties ? "," : "");
        calls += write_party(file, party, totals);
    }
    fprintf(file, "],\n \"totals\": [");
    for (int op = 0; op < COUNT_OPS; op++)
        if (totals[op][0] > 0) {
            fprintf(file, "%s{\"op\": \"%s\", \"calls\": %llu, \"payload_bytes\": %llu}", separator, op_names[op],
                    (unsigned long long)totals[op][0], (unsigned long long)totals[op][1]);
            separator = ", ";
        }
    fprintf(file, "],\n \"rails\": [");
    write_rails(file);
    fprintf(file, "],\n \"calls\": %llu, \"seconds\": %.6f, \"calls_per_second\": %.1f,\n", (unsigned long long)calls,
            seconds, seconds > 0 ? (double)calls / seconds : 0.0);
    fprintf(file, " \"verified\": %s, \"interrupted\": %s, \"errors\": [",
            options->verify && error_count == 0 && !interrupted ? "true" : "false", interrupted ? "true" : "false");
    for (int i = 0; i < error_count && i < ERRORS_KEPT; i++) {
        fprintf(file, "%s", i > 0 ? ", " : "");
        write_text(file, errors[i]);
    }
    fprintf(file, "]}\n");
}

/* Complete or not there: written beside its place and moved. */
void report_write(const struct options *options, bool interrupted) {
    char path[4096];
    if (options->report == NULL)
        return;
    snprintf(path, sizeof path, "%s.%d", options->report, (int)getpid());
    /* The thread that is asked to end the process may write at the moment at which another finds an error. */
    pthread_mutex_lock(&writing);
    FILE *file = fopen(path, "w");
    if (file == NULL) {
        fprintf(stderr, "railscope-workload: cannot write %s\n", path);
        pthread_mutex_unlock(&writing);
        return;
    }
    pthread_mutex_lock(&lock);
    write_json(file, options, interrupted);
    pthread_mutex_unlock(&lock);
    if (fclose(file) != 0 || rename(path, options->report) != 0)
        fprintf(stderr, "railscope-workload: cannot write %s\n", options->report);
    pthread_mutex_unlock(&writing);
}
