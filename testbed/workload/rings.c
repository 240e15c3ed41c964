/* Which bytes go to whom: NCCL's ring algorithms, one step after the other.
 *
 * n ranks, b = count x size of an element.  What each rank sends:
 *   AllReduce      ring: n-1 steps reduce and scatter, n-1 steps gather, b/n each       2(n-1)/n b
 *   AllGather, ReduceScatter   ring: n-1 steps                                          (n-1) b
 *   Broadcast, Reduce          chain that ends before (starts after) the root, sliced    b, the chain's end 0
 *   AlltoAll, Gather, Scatter, Send, Recv   straight to the peer                         b a peer
 * Ranks follow each other in number, so a ring enters and leaves a host once. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

enum { CHAIN_SLICE_BYTES = 1 << 20 };

struct span {
    size_t start, count;
};

/* Part `index` (any number of turns round) of `count` elements cut into one part a rank. */
static struct span part_of(const struct ncclComm *comm, size_t count, int index) {
    size_t n = (size_t)comm->nRanks, i = (size_t)((index % comm->nRanks + comm->nRanks) % comm->nRanks);
    size_t quotient = count / n, rest = count % n;
    return (struct span){quotient * i + (i < rest ? i : rest), quotient + (i < rest ? 1 : 0)};
}

static int next_rank(const struct ncclComm *comm) { return (comm->rank + 1) % comm->nRanks; }
static int previous_rank(const struct ncclComm *comm) { return (comm->rank + comm->nRanks - 1) % comm->nRanks; }

static bool is_striped(const struct operation *op) {
    return op->count * element_bytes(op->type) > STRIPE_ABOVE_BYTES;
}

static void copy_elements(void *target, const void *source, size_t bytes) {
    if (target != source && bytes > 0)
        memmove(target, source, bytes);
}

static ncclResult_t scratch_reserve(ncclComm_t comm, size_t bytes) {
    if (bytes <= comm->scratch_bytes)
        return ncclSuccess;
    free(comm->scratch);
    comm->scratch = malloc(bytes);
    comm->scratch_bytes = comm->scratch != NULL ? bytes : 0;
    return comm->scratch != NULL ? ncclSuccess : fail(ncclSystemError, "out of memory for %zu bytes", bytes);
}

/* One step of a ring: send to the next rank, receive from the one before.  `left` not NULL: combine with it. */
static ncclResult_t ring_step(ncclComm_t comm, const struct operation *op, const char *send, size_t send_bytes,
                              const char *left, char *target, size_t receive_bytes) {
    struct message messages[2] = {
        {.peer = next_rank(comm), .striped = is_striped(op), .bytes = send_bytes, .send = send},
        {.peer = previous_rank(comm),
         .receive = true,
         .striped = is_striped(op),
         .bytes = receive_bytes,
         .send = left,
         .target = target,
         .reduce = left != NULL},
    };
    return exchange(comm, op->kind, op, messages, 2);
}

static ncclResult_t all_reduce(ncclComm_t comm, const struct operation *op) {
    size_t size = element_bytes(op->type);
    const char *send = op->send;
    char *receive = op->receive;
    int n = comm->nRanks;
    ncclResult_t result = ncclSuccess;
    for (int step = 0; step < n - 1 && result == ncclSuccess; step++) {
        struct span out = part_of(comm, op->count, comm->rank - step);
        struct span in = part_of(comm, op->count, comm->rank - step - 1);
        result = ring_step(comm, op, (step == 0 ? send : receive) + out.start * size, out.count * size,
                           send + in.start * size, receive + in.start * size, in.count * size);
    }
    if (op->reduction == ncclAvg) {
        struct span mine = part_of(comm, op->count, comm->rank + 1);
        divide_elements(receive + mine.start * size, mine.count, op->type, n);
    }
    for (int step = 0; step < n - 1 && result == ncclSuccess; step++) {
        struct span out = part_of(comm, op->count, comm->rank + 1 - step);
        struct span in = part_of(comm, op->count, comm->rank - step);
        result = ring_step(comm, op, receive + out.start * size, out.count * size, NULL, receive + in.start * size,
                           in.count * size);
    }
    return result;
}

static ncclResult_t reduce_scatter(ncclComm_t comm, const struct operation *op) {
    size_t size = element_bytes(op->type), bytes = op->count * size;
    const char *send = op->send;
    int n = comm->nRanks;
    ncclResult_t result = scratch_reserve(comm, 2 * bytes); /* one part comes in while the one before goes out */
    for (int step = 0; step < n - 1 && result == ncclSuccess; step++) {
        const char *out = comm->scratch + (size_t)(step % 2) * bytes;
        char *in = comm->scratch + (size_t)((step + 1) % 2) * bytes;
        if (step == 0)
            out = send + (size_t)previous_rank(comm) * bytes;
        size_t in_part = (size_t)((comm->rank - step - 2 + 2 * n) % n);
        if (step == n - 2)
            in = op->receive;
        result = ring_step(comm, op, out, bytes, send + in_part * bytes, in, bytes);
    }
    if (op->reduction == ncclAvg && result == ncclSuccess)
        divide_elements(op->receive, op->count, op->type, n);
    return result;
}

static ncclResult_t all_gather(ncclComm_t comm, const struct operation *op) {
    size_t bytes = op->count * element_bytes(op->type);
    char *receive = op->receive;
    int n = comm->nRanks;
    ncclResult_t result = ncclSuccess;
    copy_elements(receive + (size_t)comm->rank * bytes, op->send, bytes);
    for (int step = 0; step < n - 1 && result == ncclSuccess; step++) {
        size_t out = (size_t)((comm->rank - step + n) % n), in = (size_t)((comm->rank - step - 1 + n) % n);
        result = ring_step(comm, op, receive + out * bytes, bytes, NULL, receive + in * bytes, bytes);
    }
    return result;
}

/* A chain in slices: while one slice comes in, the one before goes out.  `left` not NULL combines what comes in. */
static ncclResult_t chain(ncclComm_t comm, const struct operation *op, bool has_previous, bool has_next,
                          const char *left, char *passing) {
    size_t total = op->count * element_bytes(op->type), slices = (total + CHAIN_SLICE_BYTES - 1) / CHAIN_SLICE_BYTES;
    ncclResult_t result = ncclSuccess;
    for (size_t slice = 0; slice < slices + 1 && result == ncclSuccess; slice++) {
        size_t in = slice * CHAIN_SLICE_BYTES, out = in - CHAIN_SLICE_BYTES;
        bool receives = has_previous && slice < slices, sends = has_next && slice > 0;
        size_t in_left = receives ? total - in : 0, out_left = sends ? total - out : 0;
        result = ring_step(comm, op, sends ? passing + out : NULL,
                           out_left < CHAIN_SLICE_BYTES ? out_left : CHAIN_SLICE_BYTES,
                           left != NULL && receives ? left + in : NULL, receives ? passing + in : NULL,
                           in_left < CHAIN_SLICE_BYTES ? in_left : CHAIN_SLICE_BYTES);
    }
    return result;
}

static ncclResult_t broadcast(ncclComm_t comm, const struct operation *op) {
    int n = comm->nRanks, place = (comm->rank - op->peer + n) % n;
    if (place == 0)
        copy_elements(op->receive, op->send, op->count * element_bytes(op->type));
    return chain(comm, op, place > 0, place < n - 1, NULL, op->receive);
}

static ncclResult_t reduce(ncclComm_t comm, const struct operation *op) {
    int n = comm->nRanks, place = (comm->rank - op->peer + n) % n; /* 1, 2, … n-1, then the root */
    size_t bytes = op->count * element_bytes(op->type);
    ncclResult_t result;
    if (place == 1) /* nothing comes in, so nothing is written */
        return chain(comm, op, false, true, NULL, (char *)op->send);
    if (place == 0) {
        result = chain(comm, op, true, false, op->send, op->receive);
        if (op->reduction == ncclAvg && result == ncclSuccess)
            divide_elements(op->receive, op->count, op->type, n);
        return result;
    }
    result = scratch_reserve(comm, bytes);
    return result == ncclSuccess ? chain(comm, op, true, true, op->send, comm->scratch) : result;
}

/* Straight from rank to rank: AlltoAll, Gather and Scatter are the same loop with different sides left out. */
static ncclResult_t straight(ncclComm_t comm, const struct operation *op, bool sends, bool sends_apart,
                             bool receives) {
    size_t bytes = op->count * element_bytes(op->type);
    struct message *messages = malloc(2 * (size_t)comm->nRanks * sizeof *messages);
    int count = 0;
    if (messages == NULL)
        return fail(ncclSystemError, "out of memory");
    for (int peer = 0; peer < comm->nRanks; peer++) {
        const char *send = (const char *)op->send + (sends_apart ? (size_t)peer * bytes : 0);
        char *target = (char *)op->receive + (op->kind == OP_SCATTER ? 0 : (size_t)peer * bytes);
        bool send_here = sends && (op->kind != OP_GATHER || peer == op->peer);
        bool receive_here = receives && (op->kind != OP_SCATTER || peer == op->peer);
        if (peer == comm->rank) {
            if (send_here && receive_here)
                copy_elements(target, send, bytes);
            continue;
        }
        if (send_here)
            messages[count++] = (struct message){
                .peer = peer, .striped = bytes > STRIPE_ABOVE_BYTES, .bytes = bytes, .send = send};
        if (receive_here)
            messages[count++] = (struct message){
                .peer = peer, .receive = true, .striped = bytes > STRIPE_ABOVE_BYTES, .bytes = bytes, .target = target};
    }
    ncclResult_t result = exchange(comm, op->kind, op, messages, count);
    free(messages);
    return result;
}

/* A group's sends to the own rank meet its receives from there, in order. */
static ncclResult_t point_to_point_self(const struct operation *batch, int count, int rank) {
    int receive = 0;
    for (int send = 0; send < count; send++) {
        if (batch[send].kind != OP_SEND || batch[send].peer != rank)
            continue;
        while (receive < count && !(batch[receive].kind == OP_RECV && batch[receive].peer == rank))
            receive++;
        size_t bytes = batch[send].count * element_bytes(batch[send].type);
        if (receive == count || batch[receive].count * element_bytes(batch[receive].type) != bytes)
            return fail(ncclInvalidUsage, "a rank's send to itself has no receive of the same size in its group");
        copy_elements(batch[receive++].receive, batch[send].send, bytes);
    }
    return ncclSuccess;
}

static ncclResult_t point_to_point(ncclComm_t comm, const struct task *task) {
    ncclResult_t result = point_to_point_self(task->batch, task->batch_count, comm->rank);
    struct message *messages = malloc((size_t)task->batch_count * sizeof *messages);
    int count = 0;
    if (messages == NULL)
        return fail(ncclSystemError, "out of memory");
    for (int i = 0; i < task->batch_count; i++) {
        const struct operation *op = &task->batch[i];
        if (op->peer != comm->rank)
            messages[count++] = (struct message){.peer = op->peer,
                                                 .receive = op->kind == OP_RECV,
                                                 .striped = is_striped(op),
                                                 .bytes = op->count * element_bytes(op->type),
                                                 .send = op->send,
                                                 .target = op->receive};
    }
    if (result == ncclSuccess)
        result = exchange(comm, OP_POINT_TO_POINT, NULL, messages, count);
    free(messages);
    return result;
}

/* With one rank every operation is a copy, the average included. */
static void run_alone(const struct operation *op) {
    copy_elements(op->receive, op->send, op->count * element_bytes(op->type));
}

ncclResult_t run_task(ncclComm_t comm, const struct task *task) {
    const struct operation *op = &task->operation;
    if (op->kind == OP_POINT_TO_POINT)
        return point_to_point(comm, task);
    if (comm->nRanks == 1) {
        run_alone(op);
        return ncclSuccess;
    }
    bool root = comm->rank == op->peer;
    switch (op->kind) {
    case OP_ALL_REDUCE: return all_reduce(comm, op);
    case OP_REDUCE_SCATTER: return reduce_scatter(comm, op);
    case OP_ALL_GATHER: return all_gather(comm, op);
    case OP_BROADCAST: return broadcast(comm, op);
    case OP_REDUCE: return reduce(comm, op);
    case OP_ALL_TO_ALL: return straight(comm, op, true, true, true);
    case OP_GATHER: return straight(comm, op, true, false, root);
    case OP_SCATTER: return straight(comm, op, root, true, true);
    case OP_POINT_TO_POINT:
    case OP_SEND:
    case OP_RECV: break;
    }
    return fail(ncclInternalError, "no algorithm for operation %d", (int)op->kind);
}
