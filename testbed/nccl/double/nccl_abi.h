/* The part of NCCL's public C interface that the driver program uses.
 *
 * Declared here by hand because the tests fetch nothing but the library.  Source: NCCL's API
 * documentation; the numbers are part of its ABI.
 */
#pragma once

#include <stddef.h>

typedef struct ncclComm *ncclComm_t;
typedef struct stream *cudaStream_t;
typedef struct {
    char internal[128];
} ncclUniqueId;

enum { NCCL_OK = 0, NCCL_IN_PROGRESS = 7 };
typedef int ncclResult_t;
enum { NCCL_NO_COLOR = -1 };

/* The beginning of ncclConfig_t; NCCL takes what `size` does not cover as not set. */
#define NCCL_CONFIG_MAGIC 0xcafebeefu
enum { NCCL_NOT_SET = -2147483647 - 1 };
typedef struct {
    size_t size;
    unsigned magic, version;
    int blocking, cga_cluster_size, min_ctas, max_ctas;
    const char *net_name;
    int split_share;
} ncclConfig_t;

enum { NCCL_I8, NCCL_U8, NCCL_I32, NCCL_U32, NCCL_I64, NCCL_U64, NCCL_F16, NCCL_F32, NCCL_F64, NCCL_BF16 };
enum { NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN, NCCL_AVG };

ncclResult_t ncclGetVersion(int *version);
ncclResult_t ncclGetUniqueId(ncclUniqueId *id);
const char *ncclGetErrorString(ncclResult_t result);
const char *ncclGetLastError(ncclComm_t comm);
ncclResult_t ncclCommInitRank(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank);
ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config);
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *child, ncclConfig_t *config);
ncclResult_t ncclCommShrink(ncclComm_t comm, int *excluded, int count, ncclComm_t *child, ncclConfig_t *config,
                            int flags);
ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId *id) __attribute__((weak));
ncclResult_t ncclCommGrow(ncclComm_t comm, int ranks, const ncclUniqueId *id, int rank, ncclComm_t *child,
                          ncclConfig_t *config) __attribute__((weak)); /* both from 2.29 on */
ncclResult_t ncclCommFinalize(ncclComm_t comm);
ncclResult_t ncclCommDestroy(ncclComm_t comm);
ncclResult_t ncclCommAbort(ncclComm_t comm);
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error);
ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags);
ncclResult_t ncclCommCount(ncclComm_t comm, int *ranks);
ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank);
ncclResult_t ncclGroupStart(void);
ncclResult_t ncclGroupEnd(void);

ncclResult_t ncclAllReduce(const void *send, void *receive, size_t count, int type, int op, ncclComm_t comm,
                           cudaStream_t stream);
ncclResult_t ncclAllGather(const void *send, void *receive, size_t count, int type, ncclComm_t comm,
                           cudaStream_t stream);
ncclResult_t ncclReduceScatter(const void *send, void *receive, size_t count, int type, int op, ncclComm_t comm,
                               cudaStream_t stream);
ncclResult_t ncclBroadcast(const void *send, void *receive, size_t count, int type, int root, ncclComm_t comm,
                           cudaStream_t stream);
ncclResult_t ncclReduce(const void *send, void *receive, size_t count, int type, int op, int root, ncclComm_t comm,
                        cudaStream_t stream);
ncclResult_t ncclAlltoAll(const void *send, void *receive, size_t count, int type, ncclComm_t comm,
                          cudaStream_t stream);
ncclResult_t ncclSend(const void *send, size_t count, int type, int peer, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclRecv(void *receive, size_t count, int type, int peer, ncclComm_t comm, cudaStream_t stream);
