/* The driver: one process, one rank.
 *
 *   driver.c           options, meeting the other ranks, the loop, the end
 *   driver_patterns.c  what training and inference jobs call
 *   driver_gpt.c       what a GPT on pipeline stages, tensor ranks and replicas calls
 *   driver_job.c       what both share: buffers, communicators, results that wait to be checked
 *   driver_gpt_shape.c how much that is, and in which order
 *   driver_moments.c   what happens between calls: pauses, checkpoints, warm-up, a call left out
 *   driver_data.c      data whose right results are known without a second computation
 *   driver_report.c    what was called, for whoever compares */
#ifndef RAILSCOPE_DRIVER_H
#define RAILSCOPE_DRIVER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "driver_moments.h"
#include "workload.h"

enum report_op {
    COUNT_ALL_REDUCE,
    COUNT_ALL_GATHER,
    COUNT_REDUCE_SCATTER,
    COUNT_BROADCAST,
    COUNT_REDUCE,
    COUNT_ALL_TO_ALL,
    COUNT_GATHER,
    COUNT_SCATTER,
    COUNT_SEND,
    COUNT_RECV,
    COUNT_OPS,
};

/* A communicator and what was called on it.  Lives until the report, also when the communicator is gone. */
struct party {
    struct party *next;
    ncclComm_t comm;
    uint64_t hash;
    int rank, nranks;
    struct {
        atomic_uint_fast64_t calls, payload_bytes;
    } counts[COUNT_OPS][ncclNumTypes];
};

struct options {
    const char *pattern, *report, *id_file, *start_file;
    double seconds;     /* negative: not given */
    int64_t iterations; /* negative: not given */
    uint64_t seed;
    size_t bytes; /* 0: the pattern's own */
    bool verify, init_before_start;
    int rank, nranks;
    int64_t calls;                   /* inference: of an iteration; 0: the pattern's own */
    const char *shape;               /* gpt: its sizes, as gpt_shape_read has them */
    bool replicas_apart;             /* gpt: ranks are counted tensor, pipeline, data */
    int64_t batch;                   /* iterations between two agreements about the end; 0: as many as fit in 50 ms */
    struct moments moments;
    bool no_destroy, linger;
};

/* ---- driver_report.c ---- */

void report_options(const struct options *options); /* first of all */
struct party *party_make(ncclComm_t comm);
void party_called(struct party *party, enum report_op op, size_t count, ncclDataType_t type);
void report_error(const char *format, ...) __attribute__((format(printf, 1, 2)));
bool report_has_errors(void);
void report_began(void);
void report_ended(void);
void report_write(const struct options *options, bool interrupted);

/* Counts the call, makes it, and ends the process if it fails: a rank without its peers has nothing left to do. */
#define CALL(party, op, count, type, call)                                                                             \
    do {                                                                                                               \
        party_called(party, op, count, type);                                                                          \
        must(call, #call);                                                                                             \
    } while (0)
void must(ncclResult_t result, const char *call);

/* ---- driver_data.c ---- */

struct data;
struct data *data_make(ncclDataType_t type, ncclRedOp_t reduction, size_t elements, int nranks, uint64_t seed);
void data_free(struct data *data);
const void *data_of(const struct data *data, int rank, uint64_t iteration); /* what a rank holds */
const void *data_combined(const struct data *data, uint64_t iteration);     /* reduced over all ranks */
uint64_t mix(uint64_t a, uint64_t b);

/* ---- driver_job.c ---- */

struct job {
    const struct options *options;
    struct party *world, *second, *third;
    cudaStream_t stream, other_stream;
    struct data *data;
    char **buffers;
    int buffer_count;
    uint64_t iteration; /* of the pattern, from 0 */
};

/* Results are checked when they are settled, so that their buffers must stay until then. */
enum { PENDING = 256 }; /* results that can wait */
void expect(const struct job *job, const void *received, const void *expected, size_t bytes, const char *what);
void settle(const struct job *job);
void buffers_make(struct job *job, int count, size_t bytes);
void finish_buffers(struct job *job);
struct party *split(const struct party *parent, int color, int key); /* NULL: NCCL_SPLIT_NOCOLOR */
void destroy(struct party *party);
void all_reduce(struct job *job, struct party *party, const struct data *data, char *target, size_t count,
                ncclDataType_t type, ncclRedOp_t reduction, uint64_t iteration, cudaStream_t stream);

/* ---- driver_gpt.c ---- */

const char *gpt_problem(const struct options *options); /* reads the shape; NULL: this job can have it */
void gpt_prepare(struct job *job);
void gpt_iterate(struct job *job, uint64_t iteration);
void gpt_finish(struct job *job);

/* ---- driver_patterns.c ---- */

struct pattern {
    const char *name;
    void (*prepare)(struct job *job);
    void (*iterate)(struct job *job, uint64_t iteration);
    void (*finish)(struct job *job);
    bool has_all_reduce; /* outside of groups: a rank can leave one out */
};

const struct pattern *pattern_named(const char *name); /* NULL: there is none */

#endif
