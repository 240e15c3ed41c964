/* The entry points of operations, one by one: what a probe on NCCL sees.
 *
 * They check their arguments as NCCL does, and hand over to the queue.  Nothing here waits for the network. */
#include "internal.h"

static ncclResult_t submit(const char *function, ncclComm_t comm, const struct operation *op) {
    ncclResult_t result = check_comm(comm, function);
    if (result != ncclSuccess)
        return result;
    size_t size = element_bytes(op->type);
    bool reduces = op->kind == OP_ALL_REDUCE || op->kind == OP_REDUCE || op->kind == OP_REDUCE_SCATTER;
    bool reads = op->kind != OP_RECV && !(op->kind == OP_SCATTER && comm->rank != op->peer) &&
                 !(op->kind == OP_BROADCAST && comm->rank != op->peer);
    bool writes = op->kind != OP_SEND && !(op->kind == OP_REDUCE && comm->rank != op->peer) &&
                  !(op->kind == OP_GATHER && comm->rank != op->peer);
    if (size == 0)
        return fail(ncclInvalidArgument, "%s: %d is no data type", function, (int)op->type);
    if (op->peer < 0 || op->peer >= comm->nRanks)
        return fail(ncclInvalidArgument, "%s: rank %d is outside 0..%d", function, op->peer, comm->nRanks - 1);
    if (reduces && (unsigned)op->reduction >= ncclNumOps)
        return fail(ncclInvalidArgument, "%s: %d is no reduction", function, (int)op->reduction);
    if (reduces && !can_reduce(op->type))
        return fail(ncclInvalidArgument, "%s: 8-bit floats cannot be reduced here", function);
    if (op->count > SIZE_MAX / 16 / size / (size_t)comm->nRanks)
        return fail(ncclInvalidArgument, "%s: count %zu is too large", function, op->count);
    if (op->count > 0 && ((reads && op->send == NULL) || (writes && op->receive == NULL)))
        return fail(ncclInvalidArgument, "%s: a buffer is NULL", function);
    return enqueue(comm, op);
}

ncclResult_t ncclAllReduce(const void *send, void *receive, size_t count, ncclDataType_t type, ncclRedOp_t reduction,
                           ncclComm_t comm, cudaStream_t stream) {
    struct operation op = {OP_ALL_REDUCE, send, receive, count, type, reduction, 0, stream};
    return submit("ncclAllReduce", comm, &op);
}
STRONG_TWIN(ncclAllReduce);

ncclResult_t ncclReduceScatter(const void *send, void *receive, size_t receive_count, ncclDataType_t type,
                               ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream) {
    struct operation op = {OP_REDUCE_SCATTER, send, receive, receive_count, type, reduction, 0, stream};
    return submit("ncclReduceScatter", comm, &op);
}
STRONG_TWIN(ncclReduceScatter);

ncclResult_t ncclReduce(const void *send, void *receive, size_t count, ncclDataType_t type, ncclRedOp_t reduction,
                        int root, ncclComm_t comm, cudaStream_t stream) {
    struct operation op = {OP_REDUCE, send, receive, count, type, reduction, root, stream};
    return submit("ncclReduce", comm, &op);
}
STRONG_TWIN(ncclReduce);

ncclResult_t ncclBroadcast(const void *send, void *receive, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
    struct operation op = {OP_BROADCAST, send, receive, count, type, ncclSum, root, stream};
    return submit("ncclBroadcast", comm, &op);
}
STRONG_TWIN(ncclBroadcast);

/* Through ncclBroadcast's public name, and so through the procedure linkage table, as in NCCL: whoever counts both
 * entry points counts twice. */
ncclResult_t ncclBcast(void *buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                       cudaStream_t stream) {
    return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}
STRONG_TWIN(ncclBcast);

ncclResult_t ncclAllGather(const void *send, void *receive, size_t send_count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
    struct operation op = {OP_ALL_GATHER, send, receive, send_count, type, ncclSum, 0, stream};
    return submit("ncclAllGather", comm, &op);
}
STRONG_TWIN(ncclAllGather);

ncclResult_t ncclAlltoAll(const void *send, void *receive, size_t count, ncclDataType_t type, ncclComm_t comm,
                          cudaStream_t stream) {
    struct operation op = {OP_ALL_TO_ALL, send, receive, count, type, ncclSum, 0, stream};
    return submit("ncclAlltoAll", comm, &op);
}
STRONG_TWIN(ncclAlltoAll);

ncclResult_t ncclGather(const void *send, void *receive, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                        cudaStream_t stream) {
    struct operation op = {OP_GATHER, send, receive, count, type, ncclSum, root, stream};
    return submit("ncclGather", comm, &op);
}
STRONG_TWIN(ncclGather);

ncclResult_t ncclScatter(const void *send, void *receive, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                         cudaStream_t stream) {
    struct operation op = {OP_SCATTER, send, receive, count, type, ncclSum, root, stream};
    return submit("ncclScatter", comm, &op);
}
STRONG_TWIN(ncclScatter);

ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    struct operation op = {OP_SEND, send, NULL, count, type, ncclSum, peer, stream};
    return submit("ncclSend", comm, &op);
}
STRONG_TWIN(ncclSend);

ncclResult_t ncclRecv(void *receive, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    struct operation op = {OP_RECV, NULL, receive, count, type, ncclSum, peer, stream};
    return submit("ncclRecv", comm, &op);
}
STRONG_TWIN(ncclRecv);
