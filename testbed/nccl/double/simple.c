/* NCCL's Simple protocol on the CPU.
 *
 * A connection is a ring of eight slots with two counters.  The sender owns a slot while
 * step + slice <= head + 8; it writes the slot, leaves the slice's size in the proxy's fifo, and moves
 * tail.  The receiver may read while tail >= step + slice, and then moves head.  Where the neighbour is
 * on another host, libnccl's proxy thread stands at the other end of the counters, as with a real GPU.
 * A chunk is cut into slices so that neighbours can overlap; empty slices move the counters, too.
 * (Public source: src/device/prims_simple.h, genericOp.)
 */
#include "double.h"

enum { FIFO_MODE_OFFSET = 1 };

static char *slot(const struct end *end) {
    const struct ncclConnInfo *connection = end->connection;
    size_t index = end->step % NCCL_STEPS, offset = index * (size_t)connection->stepSize;
    struct ncclConnFifo *fifo = connection->connFifo;
    if (fifo != NULL && __atomic_load_n(&fifo[index].mode, __ATOMIC_RELAXED) == FIFO_MODE_OFFSET)
        offset = (size_t)__atomic_load_n(&fifo[index].offset, __ATOMIC_RELAXED);
    return connection->buffs[PROTOCOL_SIMPLE] + offset;
}

static bool neighbours_ready(const struct passage *passage, uint64_t steps) {
    for (int i = 0; passage->chunk.receive && i < passage->from_count; i++) {
        const struct end *from = &passage->from[i];
        if (__atomic_load_n(from->connection->tail, __ATOMIC_ACQUIRE) < from->step + steps)
            return false;
    }
    for (int i = 0; passage->chunk.send && i < passage->to_count; i++) {
        const struct end *to = &passage->to[i];
        if (__atomic_load_n(to->connection->head, __ATOMIC_ACQUIRE) + NCCL_STEPS < to->step + steps)
            return false;
    }
    return true;
}

static bool pass_slice(struct passage *passage, size_t slice_elements) {
    const struct chunk *chunk = &passage->chunk;
    uint64_t steps = (uint64_t)passage->steps_per_slice;
    if (!neighbours_ready(passage, steps))
        return false;
    size_t left = chunk->count - passage->position, count = left < slice_elements ? left : slice_elements;
    char *received[FAN_MAX] = {NULL}, *sent[FAN_MAX] = {NULL};
    int from = chunk->receive ? passage->from_count : 0, to = chunk->send ? passage->to_count : 0;
    for (int i = 0; i < from; i++)
        received[i] = slot(&passage->from[i]);
    for (int i = 0; i < to; i++)
        sent[i] = slot(&passage->to[i]);
    if (count > 0)
        passage_combine(passage, received, sent, count);
    for (int i = 0; i < from; i++) {
        passage->from[i].step += steps;
        __atomic_store_n(passage->from[i].connection->head, passage->from[i].step, __ATOMIC_RELEASE);
    }
    for (int i = 0; i < to; i++) {
        struct end *end = &passage->to[i];
        struct ncclConnFifo *fifo = end->connection->connFifo;
        int64_t size_bytes = (int64_t)(count * element_bytes(passage->how.element));
        if (fifo != NULL)
            __atomic_store_n(&fifo[end->step % NCCL_STEPS].size, size_bytes, __ATOMIC_RELEASE);
        end->step += steps;
        __atomic_store_n(end->connection->tail, end->step, __ATOMIC_RELEASE);
    }
    passage->position += count;
    return true;
}

bool simple_chunk(struct passage *passage, bool *moved) {
    size_t slices = (size_t)passage->slices_per_chunk;
    size_t even = (passage->chunk.count + 16 * slices - 1) / (16 * slices) * 16;
    size_t least = passage->step_elements * (size_t)passage->steps_per_slice / 32;
    for (; passage->slice < passage->slices_per_chunk; passage->slice++) {
        if (!pass_slice(passage, even > least ? even : least))
            return false;
        *moved = true;
    }
    return true;
}
