/* One operation of NCCL: its input, the call, and what must come out.
 *
 * Inputs are small whole numbers, so that every sum and product is exact in every type, bfloat16
 * included; only averages are compared with a tolerance.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "driver.h"

const char *const counted_names[COUNTED] = {"AllReduce", "AllGather", "ReduceScatter", "Broadcast",
                                            "Reduce",    "AllToAll",  "Send",          "Recv"};

size_t type_bytes(int type) {
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return sizes[type];
}

size_t buffer_bytes(const struct request *request, int ranks) {
    return request->count * type_bytes(request->type) * (size_t)ranks;
}

static double load(const char *at, int type) {
    uint32_t wide;
    float single;
    switch (type) {
    case NCCL_I8:
        return *(const int8_t *)at;
    case NCCL_U8:
        return *(const uint8_t *)at;
    case NCCL_I32:
        return *(const int32_t *)at;
    case NCCL_U32:
        return *(const uint32_t *)at;
    case NCCL_I64:
        return (double)*(const int64_t *)at;
    case NCCL_U64:
        return (double)*(const uint64_t *)at;
    case NCCL_F16:
        return (double)*(const _Float16 *)at;
    case NCCL_F32:
        return *(const float *)at;
    case NCCL_F64:
        return *(const double *)at;
    default: /* bfloat16 is the upper half of a float */
        wide = (uint32_t) * (const uint16_t *)at << 16;
        memcpy(&single, &wide, sizeof single);
        return single;
    }
}

static void store(char *at, int type, double value) {
    uint32_t wide;
    float single = (float)value;
    switch (type) {
    case NCCL_I8:
        *(int8_t *)at = (int8_t)value;
        break;
    case NCCL_U8:
        *(uint8_t *)at = (uint8_t)value;
        break;
    case NCCL_I32:
        *(int32_t *)at = (int32_t)value;
        break;
    case NCCL_U32:
        *(uint32_t *)at = (uint32_t)value;
        break;
    case NCCL_I64:
        *(int64_t *)at = (int64_t)value;
        break;
    case NCCL_U64:
        *(uint64_t *)at = (uint64_t)value;
        break;
    case NCCL_F16:
        *(_Float16 *)at = (_Float16)value;
        break;
    case NCCL_F32:
        *(float *)at = single;
        break;
    case NCCL_F64:
        *(double *)at = value;
        break;
    default:
        memcpy(&wide, &single, sizeof wide);
        *(uint16_t *)at = (uint16_t)(wide >> 16);
    }
}

/* Element i of a rank's send buffer: 1 to 7, or negative as well where the type has a sign. */
static double input_of(int rank, size_t i, const struct request *request) {
    double value = (double)((i * 5 + i / 7 + (size_t)rank * 3) % 7 + 1);
    if (request->op == NCCL_PROD)
        return (double)((i + (size_t)rank) % 2 + 1);
    bool has_sign = request->type != NCCL_U8 && request->type != NCCL_U32 && request->type != NCCL_U64;
    return has_sign && (i + (size_t)rank) % 3 == 0 ? -value : value;
}

static size_t send_elements(const struct request *request, int ranks) {
    enum operation operation = request->operation;
    bool per_rank = operation == REDUCESCATTER || operation == ALLTOALL || operation == SENDRECV;
    return request->count * (per_rank ? (size_t)ranks : 1);
}

void fill(const struct job *job, const struct request *request) {
    size_t width = type_bytes(request->type), elements = send_elements(request, job->ranks);
    for (size_t i = 0; i < elements; i++)
        store(job->send + i * width, request->type, input_of(job->rank, i, request));
    memset(job->receive, 0x5a, buffer_bytes(request, job->ranks));
}

static void count_call(struct job *job, enum counted what, const struct request *request) {
    job->tallies[what].calls++;
    job->tallies[what].payload_bytes += request->count * type_bytes(request->type);
}

static void send_and_receive(struct job *job, const struct request *r) {
    check(ncclGroupStart(), "ncclGroupStart");
    for (int peer = 0; peer < job->ranks; peer++) {
        size_t offset = (size_t)peer * r->count * type_bytes(r->type);
        check(ncclSend(job->send + offset, r->count, r->type, peer, job->comm, job->stream), "ncclSend");
        check(ncclRecv(job->receive + offset, r->count, r->type, peer, job->comm, job->stream), "ncclRecv");
        count_call(job, C_SEND, r);
        count_call(job, C_RECV, r);
    }
    check(ncclGroupEnd(), "ncclGroupEnd");
}

void call(struct job *job, const struct request *r) {
    char *send = job->send, *receive = job->receive;
    ncclComm_t comm = job->comm;
    cudaStream_t stream = job->stream;
    switch (r->operation) {
    case ALLREDUCE:
        check(ncclAllReduce(send, receive, r->count, r->type, r->op, comm, stream), "ncclAllReduce");
        return count_call(job, C_ALLREDUCE, r);
    case ALLGATHER:
        check(ncclAllGather(send, receive, r->count, r->type, comm, stream), "ncclAllGather");
        return count_call(job, C_ALLGATHER, r);
    case REDUCESCATTER:
        check(ncclReduceScatter(send, receive, r->count, r->type, r->op, comm, stream), "ncclReduceScatter");
        return count_call(job, C_REDUCESCATTER, r);
    case BROADCAST:
        check(ncclBroadcast(send, receive, r->count, r->type, r->root, comm, stream), "ncclBroadcast");
        return count_call(job, C_BROADCAST, r);
    case REDUCE:
        check(ncclReduce(send, receive, r->count, r->type, r->op, r->root, comm, stream), "ncclReduce");
        return count_call(job, C_REDUCE, r);
    case ALLTOALL:
        check(ncclAlltoAll(send, receive, r->count, r->type, comm, stream), "ncclAlltoAll");
        return count_call(job, C_ALLTOALL, r);
    case SENDRECV:
        return send_and_receive(job, r);
    case OPERATIONS:
        break;
    }
}

/* What the ranks' elements i reduce to. */
static double reduced(const struct request *request, int ranks, size_t i) {
    double result = input_of(0, i, request);
    for (int rank = 1; rank < ranks; rank++) {
        double value = input_of(rank, i, request);
        switch (request->op) {
        case NCCL_PROD:
            result *= value;
            break;
        case NCCL_MAX:
            result = fmax(result, value);
            break;
        case NCCL_MIN:
            result = fmin(result, value);
            break;
        default:
            result += value;
        }
    }
    if (request->op != NCCL_AVG)
        return result;
    bool whole = request->type < NCCL_F16;
    return whole ? trunc(result / ranks) : result / ranks;
}

/* Element i of the receive buffer. */
static double expected(const struct job *job, const struct request *request, size_t i) {
    size_t count = request->count, rank = (size_t)job->rank;
    switch (request->operation) {
    case ALLREDUCE:
    case REDUCE:
        return reduced(request, job->ranks, i);
    case REDUCESCATTER:
        return reduced(request, job->ranks, rank * count + i);
    case ALLGATHER:
        return input_of((int)(i / count), i % count, request);
    case BROADCAST:
        return input_of(request->root, i, request);
    default:
        return input_of((int)(i / count), rank * count + i % count, request);
    }
}

static size_t receive_elements(const struct job *job, const struct request *request) {
    switch (request->operation) {
    case REDUCE:
        return job->rank == request->root ? request->count : 0;
    case ALLREDUCE:
    case REDUCESCATTER:
    case BROADCAST:
        return request->count;
    default:
        return request->count * (size_t)job->ranks;
    }
}

void damage(const struct job *job, const struct request *request) {
    size_t elements = receive_elements(job, request);
    if (elements > 0)
        job->receive[elements * type_bytes(request->type) - 1] ^= 0x40;
}

bool verify(const struct job *job, const struct request *request) {
    size_t width = type_bytes(request->type), elements = receive_elements(job, request);
    double tolerance = 0;
    if (request->op == NCCL_AVG)
        tolerance = request->type == NCCL_F16 || request->type == NCCL_BF16 ? 0.1 : 1e-5;
    for (size_t i = 0; i < elements; i++) {
        double value = load(job->receive + i * width, request->type), want = expected(job, request, i);
        if (!(fabs(value - want) <= tolerance)) {
            fprintf(stderr, "rank %d: operation %d, type %d, op %d, count %zu: element %zu is %g, not %g\n", job->rank,
                    request->operation, request->type, request->op, request->count, i, value, want);
            return false;
        }
    }
    return true;
}
