/* The chunk order of NCCL's ring collectives: what the i-th chunk of a rank is.
 *
 * Each function is a plain translation of the ring's definition into "chunk number i": where it starts,
 * whether it comes from the user, the previous rank or both, and where it goes.  (Public source:
 * src/device/all_reduce.h, all_gather.h, reduce_scatter.h, broadcast.h, reduce.h: runRing.)
 */
#include "double.h"

/* Slices and steps of the Simple protocol, by collective (public source: src/include/collectives.h). */
static const struct {
    int slices_per_chunk, steps_per_slice;
} cuts[COLLECTIVES] = {
    [ALLREDUCE] = {2, 2}, [ALLGATHER] = {2, 2}, [REDUCESCATTER] = {2, 2},
    [BROADCAST] = {1, 1}, [REDUCE] = {1, 1},
};

int ring_slices_per_chunk(enum collective collective) {
    return cuts[collective].slices_per_chunk;
}

int ring_steps_per_slice(enum collective collective) {
    return cuts[collective].steps_per_slice;
}

static const void *input_at(const struct collective_work *work, size_t element) {
    return work->input + element * work->element_size;
}

static void *output_at(const struct collective_work *work, size_t element) {
    return work->output + element * work->element_size;
}

/* n-1 chunks travel and gather sums, the n-th is complete here, n-1 more carry the results around. */
static bool allreduce_chunk(const struct collective_work *work, size_t index, struct chunk *chunk) {
    size_t n = (size_t)work->rank_count, per_loop = 2 * n - 1, loop = index / per_loop, j = index % per_loop;
    size_t loop_elements = n * work->chunk_count, start = loop * loop_elements;
    if (start >= work->part_count)
        return false;
    size_t remaining = work->part_count - start, chunk_elements = work->chunk_count;
    if (remaining < loop_elements) {
        size_t unit = 16 / work->element_size;
        chunk_elements = ((remaining + n - 1) / n + unit - 1) / unit * unit;
    }
    /* Every turn works on the chunk before the last turn's; the last one of all is the neighbour's. */
    size_t turn = j < n ? j + 1 : j - n + 1;
    size_t which = ((size_t)work->ring_index + n - turn) % n;
    size_t offset = which * chunk_elements;
    chunk->count = offset < remaining ? remaining - offset : 0;
    if (chunk->count > chunk_elements)
        chunk->count = chunk_elements;
    size_t element = work->part_offset + start + offset;
    chunk->receive = j > 0;
    chunk->send = j < per_loop - 1;
    chunk->input = j < n ? input_at(work, element) : NULL;
    chunk->output = j >= n - 1 ? output_at(work, element) : NULL;
    chunk->finish = j == n - 1;
    return true;
}

/* Where a gathering or scattering collective is in its loop: the part's elements, and whose block. */
static bool block_chunk(const struct collective_work *work, size_t index, struct chunk *chunk, size_t *turn,
                        size_t *element) {
    size_t n = (size_t)work->rank_count, start = index / n * work->chunk_count;
    if (start >= work->part_count)
        return false;
    *turn = index % n;
    *element = work->part_offset + start;
    chunk->count = work->part_count - start < work->chunk_count ? work->part_count - start : work->chunk_count;
    chunk->receive = *turn > 0;
    chunk->send = *turn < n - 1;
    return true;
}

static bool allgather_chunk(const struct collective_work *work, size_t index, struct chunk *chunk) {
    size_t n = (size_t)work->rank_count, turn, element;
    if (!block_chunk(work, index, chunk, &turn, &element))
        return false;
    size_t whose = (size_t)work->ranks[turn == 0 ? 0 : n - turn];
    chunk->input = turn == 0 ? input_at(work, element) : NULL;
    chunk->output = output_at(work, element + whose * work->count);
    if (chunk->output == chunk->input)
        chunk->output = NULL; /* in place: it is there already */
    return true;
}

static bool reducescatter_chunk(const struct collective_work *work, size_t index, struct chunk *chunk) {
    size_t n = (size_t)work->rank_count, turn, element;
    if (!block_chunk(work, index, chunk, &turn, &element))
        return false;
    size_t whose = (size_t)work->ranks[n - 1 - turn];
    chunk->input = input_at(work, element + whose * work->count);
    chunk->output = turn == n - 1 ? output_at(work, element) : NULL;
    chunk->finish = turn == n - 1;
    return true;
}

/* Broadcast and Reduce are chains: one chunk after another, each passing once. */
static bool chain_chunk(const struct collective_work *work, size_t index, struct chunk *chunk, size_t *element) {
    size_t start = index * work->chunk_count;
    if (start >= work->part_count)
        return false;
    *element = work->part_offset + start;
    chunk->count = work->part_count - start < work->chunk_count ? work->part_count - start : work->chunk_count;
    return true;
}

static bool broadcast_chunk(const struct collective_work *work, size_t index, struct chunk *chunk) {
    size_t element;
    if (!chain_chunk(work, index, chunk, &element))
        return false;
    bool first = work->ranks[0] == work->root, last = work->ranks[1] == work->root;
    chunk->receive = !first;
    chunk->send = first || !last;
    chunk->input = first ? input_at(work, element) : NULL;
    chunk->output = first && work->input == work->output ? NULL : output_at(work, element);
    return true;
}

static bool reduce_chunk(const struct collective_work *work, size_t index, struct chunk *chunk) {
    size_t element;
    if (!chain_chunk(work, index, chunk, &element))
        return false;
    bool first = work->ranks[work->rank_count - 1] == work->root, last = work->ranks[0] == work->root;
    chunk->receive = !first;
    chunk->send = !last;
    chunk->input = input_at(work, element);
    chunk->output = last ? output_at(work, element) : NULL;
    chunk->finish = last;
    return true;
}

bool ring_chunk(const struct collective_work *work, size_t index, struct chunk *chunk) {
    *chunk = (struct chunk){0};
    switch (work->collective) {
    case ALLREDUCE:
        return allreduce_chunk(work, index, chunk);
    case ALLGATHER:
        return allgather_chunk(work, index, chunk);
    case REDUCESCATTER:
        return reducescatter_chunk(work, index, chunk);
    case BROADCAST:
        return broadcast_chunk(work, index, chunk);
    case REDUCE:
        return reduce_chunk(work, index, chunk);
    case COLLECTIVES:
        break;
    }
    return false;
}
