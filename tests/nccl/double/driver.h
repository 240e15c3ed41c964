/* What the two halves of the driver program share: driver.c runs jobs, operations.c one operation. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "nccl_abi.h"

enum operation { ALLREDUCE, ALLGATHER, REDUCESCATTER, BROADCAST, REDUCE, ALLTOALL, SENDRECV, OPERATIONS };

/* Names as NCCL has them; SENDRECV counts as Send and Recv. */
enum counted { C_ALLREDUCE, C_ALLGATHER, C_REDUCESCATTER, C_BROADCAST, C_REDUCE, C_ALLTOALL, C_SEND, C_RECV, COUNTED };
extern const char *const counted_names[COUNTED];

struct tally {
    uint64_t calls, payload_bytes; /* payload = the call's count times the size of its type */
};

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

/* Functions of the CUDA test double, as CUDA has them. */
extern int (*stream_create)(cudaStream_t *stream);
extern int (*stream_synchronize)(cudaStream_t stream);

_Noreturn void die(const char *format, ...) __attribute__((format(printf, 1, 2)));
void check(ncclResult_t result, const char *what);

size_t type_bytes(int type);
/* Bytes that the send or receive buffer must hold. */
size_t buffer_bytes(const struct request *request, int ranks);
void fill(const struct job *job, const struct request *request);
void call(struct job *job, const struct request *request);
/* Compare the result with what it must be; says on stderr where it differs first. */
bool verify(const struct job *job, const struct request *request);
