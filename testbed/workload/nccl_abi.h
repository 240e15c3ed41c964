/* The part of NCCL's public C interface that the workload offers, written down from NCCL's documentation.
 *
 * Names, argument order, numbers and the 128-byte id passed by value are NCCL's, so that a probe cannot tell this
 * library's entry points from the real ones.  Every `ncclX` is weak and has a strong twin `pncclX` at the same
 * address, as in NCCL (its profiling interface). */
#ifndef RAILSCOPE_NCCL_ABI_H
#define RAILSCOPE_NCCL_ABI_H

#include <stddef.h>
#include <stdint.h>

enum {
    NCCL_VERSION_REPORTED = 23203, /* 2.32.3, the version whose interface this follows */
    NCCL_UNIQUE_ID_BYTES = 128,
    NCCL_SPLIT_NOCOLOR = -1,
};

typedef struct ncclComm *ncclComm_t;
typedef struct workload_opaque_stream *cudaStream_t; /* any pointer: a stream is what runs in order */
typedef struct {
    char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;
typedef struct ncclConfig ncclConfig_t; /* accepted and not read: every communicator blocks */

typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7,
} ncclResult_t;

typedef enum {
    ncclInt8 = 0,
    ncclUint8 = 1,
    ncclInt32 = 2,
    ncclUint32 = 3,
    ncclInt64 = 4,
    ncclUint64 = 5,
    ncclFloat16 = 6,
    ncclFloat32 = 7,
    ncclFloat64 = 8,
    ncclBfloat16 = 9,
    ncclFloat8e4m3 = 10,
    ncclFloat8e5m2 = 11,
    ncclNumTypes = 12,
} ncclDataType_t;

typedef enum { ncclSum = 0, ncclProd = 1, ncclMax = 2, ncclMin = 3, ncclAvg = 4, ncclNumOps = 5 } ncclRedOp_t;

/* Declares a function and its strong twin. */
#define NCCL_FUNCTION(result, name, ...)                                                                               \
    __attribute__((weak, visibility("default"))) result name(__VA_ARGS__);                                             \
    __attribute__((visibility("default"))) result p##name(__VA_ARGS__)

NCCL_FUNCTION(ncclResult_t, ncclGetVersion, int *version);
NCCL_FUNCTION(ncclResult_t, ncclGetUniqueId, ncclUniqueId *id);
NCCL_FUNCTION(const char *, ncclGetErrorString, ncclResult_t result);
NCCL_FUNCTION(const char *, ncclGetLastError, ncclComm_t comm);

NCCL_FUNCTION(ncclResult_t, ncclCommInitRank, ncclComm_t *comm, int nranks, ncclUniqueId id, int rank);
NCCL_FUNCTION(ncclResult_t, ncclCommInitRankConfig, ncclComm_t *comm, int nranks, ncclUniqueId id, int rank,
              ncclConfig_t *config);
NCCL_FUNCTION(ncclResult_t, ncclCommInitRankScalable, ncclComm_t *comm, int nranks, int rank, int id_count,
              ncclUniqueId *ids, ncclConfig_t *config);
NCCL_FUNCTION(ncclResult_t, ncclCommInitAll, ncclComm_t *comms, int device_count, const int *devices);
NCCL_FUNCTION(ncclResult_t, ncclCommSplit, ncclComm_t comm, int color, int key, ncclComm_t *child,
              ncclConfig_t *config);
NCCL_FUNCTION(ncclResult_t, ncclCommFinalize, ncclComm_t comm);
NCCL_FUNCTION(ncclResult_t, ncclCommDestroy, ncclComm_t comm);
NCCL_FUNCTION(ncclResult_t, ncclCommAbort, ncclComm_t comm);
NCCL_FUNCTION(ncclResult_t, ncclCommCount, ncclComm_t comm, int *count);
NCCL_FUNCTION(ncclResult_t, ncclCommUserRank, ncclComm_t comm, int *rank);
NCCL_FUNCTION(ncclResult_t, ncclCommCuDevice, ncclComm_t comm, int *device);
NCCL_FUNCTION(ncclResult_t, ncclCommGetAsyncError, ncclComm_t comm, ncclResult_t *result);

NCCL_FUNCTION(ncclResult_t, ncclGroupStart, void);
NCCL_FUNCTION(ncclResult_t, ncclGroupEnd, void);

NCCL_FUNCTION(ncclResult_t, ncclAllReduce, const void *send, void *receive, size_t count, ncclDataType_t type,
              ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream);
NCCL_FUNCTION(ncclResult_t, ncclReduceScatter, const void *send, void *receive, size_t receive_count,
              ncclDataType_t type, ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream);
NCCL_FUNCTION(ncclResult_t, ncclReduce, const void *send, void *receive, size_t count, ncclDataType_t type,
              ncclRedOp_t reduction, int root, ncclComm_t comm, cudaStream_t stream);
NCCL_FUNCTION(ncclResult_t, ncclBroadcast, const void *send, void *receive, size_t count, ncclDataType_t type,
              int root, ncclComm_t comm, cudaStream_t stream);
NCCL_FUNCTION(ncclResult_t, ncclBcast, void *buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
              cudaStream_t stream);
NCCL_FUNCTION(ncclResult_t, ncclAllGather, const void *send, void *receive, size_t send_count, ncclDataType_t type,
              ncclComm_t comm, cudaStream_t stream);
NCCL_FUNCTION(ncclResult_t, ncclAlltoAll, const void *send, void *receive, size_t count, ncclDataType_t type,
              ncclComm_t comm, cudaStream_t stream);
NCCL_FUNCTION(ncclResult_t, ncclGather, const void *send, void *receive, size_t count, ncclDataType_t type, int root,
              ncclComm_t comm, cudaStream_t stream);
NCCL_FUNCTION(ncclResult_t, ncclScatter, const void *send, void *receive, size_t count, ncclDataType_t type, int root,
              ncclComm_t comm, cudaStream_t stream);
NCCL_FUNCTION(ncclResult_t, ncclSend, const void *send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
              cudaStream_t stream);
NCCL_FUNCTION(ncclResult_t, ncclRecv, void *receive, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
              cudaStream_t stream);

/* Bytes of one element; 0 for a number that is no data type. */
static inline size_t element_bytes(ncclDataType_t type) {
    static const unsigned char bytes[ncclNumTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return (unsigned)type < ncclNumTypes ? bytes[type] : 0;
}

#endif
