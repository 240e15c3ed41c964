/* What the parts of the driver program share.
 *
 *   driver.c      options, communicators, the report
 *   patterns.c    which operations a job calls, in which order
 *   families.c    communicators made from others
 *   gpt.c         a GPT on pipeline stages, tensor ranks and replicas
 *   inference.c   graphs of kernels that are not NCCL's
 *   failures.c    patterns in which a peer is missing
 *   completion.c  how a rank learns that an operation is over
 *   operations.c  one operation: its input, the call, its result
 *   driver_moments.c  (of testbed/workload) what happens between calls
 *   driver_gpt_shape.c  (of testbed/workload) what a GPT sends, in which order
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "driver_moments.h"
#include "nccl_abi.h"

enum operation { ALLREDUCE, ALLGATHER, REDUCESCATTER, BROADCAST, REDUCE, ALLTOALL, SENDRECV, OPERATIONS };

/* Names as NCCL has them; SENDRECV counts as Send and Recv. */
enum counted { C_ALLREDUCE, C_ALLGATHER, C_REDUCESCATTER, C_BROADCAST, C_REDUCE, C_ALLTOALL, C_SEND, C_RECV, COUNTED };
extern const char *const counted_names[COUNTED];

struct tally {
    uint64_t calls, payload_bytes; /* payload = the call's count times the size of its type */
};

/* Functions of the CUDA test double, as CUDA has them. */
typedef struct event *cudaEvent_t;
typedef struct graph *cudaGraph_t;
enum { CUDA_SUCCESS = 0, CUDA_NOT_READY = 600 };
extern struct cuda {
    int (*stream_create)(cudaStream_t *stream);
    int (*stream_synchronize)(cudaStream_t stream);
    int (*stream_query)(cudaStream_t stream);
    int (*stream_wait_event)(cudaStream_t stream, cudaEvent_t event, unsigned flags);
    int (*event_create)(cudaEvent_t *event, unsigned flags);
    int (*event_record)(cudaEvent_t event, cudaStream_t stream);
    int (*event_query)(cudaEvent_t event);
    int (*event_synchronize)(cudaEvent_t event);
    int (*begin_capture)(cudaStream_t stream, int mode);
    int (*end_capture)(cudaStream_t stream, cudaGraph_t *graph);
    int (*instantiate)(cudaGraph_t *executable, cudaGraph_t graph, unsigned long long flags);
    int (*launch)(cudaGraph_t executable, cudaStream_t stream);
    int (*launch_host_function)(cudaStream_t stream, void (*function)(void *), void *argument);
    int (*destroy_executable)(cudaGraph_t executable);
    int (*destroy_graph)(cudaGraph_t graph);
} cuda;

struct job {
    ncclComm_t comm;
    cudaStream_t stream;
    int rank, ranks;
    char *send, *receive; /* each large enough for the whole of an operation */
    struct tally *tallies;
};

struct request {
    enum operation operation;
    int type, op, root;
    size_t count; /* as the operation's API counts */
};

enum { COMMS_MAX = 8 };

extern struct options {
    int rank, ranks, iterations, communicators, event_poll_us, blocking, destroy;
    int evaluate_every, evaluate_calls; /* so many calls once in so many iterations; 0: none */
    struct moments moments;
    size_t bytes;
    const char *id, *report, *init, *ready, *start, *progress, *hold, *pattern, *type, *op, *events, *shape;
} options;
extern struct job jobs[COMMS_MAX]; /* first those of --communicators, then what a pattern opens */
extern int open_jobs;
extern struct tally replayed[COUNTED]; /* by replays of a captured graph */
extern bool verified;

_Noreturn void die(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Dies of an error.  A call that does not block (--blocking 0) is waited for. */
void check(ncclResult_t result, const char *what);
void check_cuda(int result, const char *what);
/* The place of a name among names; dies, naming what it is, when it is none of them. */
int index_of(const char *name, const char *const *names, int count, const char *what);
void pause_ns(long nanoseconds);
/* Written under another name first: a reader sees all of it or nothing. */
void write_file(const char *path, const void *bytes, size_t size);
/* Give the other ranks a unique id; wait for one. */
void share_id(int which, const ncclUniqueId *id);
ncclUniqueId shared_id(int which);
/* A new entry of jobs, with a stream and without a communicator yet. */
struct job *open_job(void);
/* Finalize and destroy a job's communicator. */
void close_job(struct job *job);

/* ---- operations.c ---- */

size_t type_bytes(int type);
/* Bytes that the send or receive buffer must hold. */
size_t buffer_bytes(const struct request *request, int ranks);
void fill(const struct job *job, const struct request *request);
void call(struct job *job, const struct request *request);
/* Compare the result with what it must be; says on stderr where it differs first. */
/* Change the last element that was received, so that verify() must notice. */
void damage(const struct job *job, const struct request *request);
bool verify(const struct job *job, const struct request *request);

/* ---- completion.c ---- */

/* What a rank did to learn of completion; all zero without --events. */
extern struct event_counts {
    uint64_t recorded, queries, not_ready, event_synchronizes, stream_synchronizes, stream_waits;
} event_counts;
/* Load the CUDA functions: from the double itself, or with --events from libcudart.so.12. */
void open_cuda(void);
/* Called before and after each operation on a stream; the operation may still run afterwards. */
void before_operation(int communicator);
void after_operation(int communicator);
/* Wait until everything on the job's stream is over. */
void finish(struct job *job);
/* Wait for the latest operation of every communicator in the way of --events; the watchdog's way is not to. */
void finish_operations(void);
/* The same, but wait in any case. */
void finish_all(void);

/* ---- patterns.c, families.c, gpt.c, inference.c, failures.c ---- */

void run_pattern(void);
struct request request_of(enum operation operation, int type, int op);
void give_buffers(struct job *job, const struct request *request);
/* What NCCL's functions about errors returned; entries without a function are unused. */
enum { RESULTS_MAX = 8 };
extern struct result {
    const char *function;
    ncclResult_t result;
} results[RESULTS_MAX];
/* A child that is made without blocking has no address before it is ready. */
void await_child(struct job *job);
void split(int type);
void split_late(int type);
void families(int type);
void gpt(void);
void inference(void);
void abandoned(int type);
void revoked(int type);
void bereaved(int type, bool revoke);
void receive_first(int type);
enum disagreement { ANOTHER_OPERATION, ANOTHER_COUNT, ANOTHER_ORDER };
void disagree(int type, enum disagreement how);
