/* NCCL's LL (low latency) protocol on the CPU.
 *
 * Data travels in lines of 16 bytes: two words of data, each followed by a flag.  A line has arrived when
 * both flags show its step plus one, so that no counter has to be read; half of what is sent is flags.
 * A chunk takes one slot, and the sender owns it while step + 1 <= head + 8.  NCCL clears the flags
 * before they wrap around, after two thousand million steps: no test goes that far.
 * (Public source: src/device/prims_ll.h, LLGenericOp.)
 */
#include "double.h"

enum { LINE_DATA_BYTES = 8, LINES_AT_ONCE = 512 };

struct line {
    uint64_t halves[2]; /* each: data in the low, flag in the high 32 bits */
};

static struct line *line_at(const struct passage *passage, const struct end *end, size_t line) {
    size_t slot = end->step % NCCL_STEPS;
    return (struct line *)(void *)end->connection->buffs[PROTOCOL_LL] + slot * passage->step_lines + line;
}

/* Unpack lines that have arrived, at most `most`; returns how many. */
static size_t take_lines(const struct passage *passage, const struct end *end, size_t first, size_t most, char *data) {
    const struct line *lines = line_at(passage, end, first);
    uint64_t flag = (uint32_t)(end->step + 1);
    for (size_t i = 0; i < most; i++) {
        uint64_t low = __atomic_load_n(&lines[i].halves[0], __ATOMIC_ACQUIRE);
        uint64_t high = __atomic_load_n(&lines[i].halves[1], __ATOMIC_ACQUIRE);
        if (low >> 32 != flag || high >> 32 != flag)
            return i;
        uint64_t word = (uint32_t)low | high << 32;
        memcpy(data + i * LINE_DATA_BYTES, &word, LINE_DATA_BYTES);
    }
    return most;
}

static void put_lines(const struct passage *passage, const struct end *end, size_t first, size_t count,
                      const char *data) {
    struct line *lines = line_at(passage, end, first);
    uint64_t flag = (uint64_t)(uint32_t)(end->step + 1) << 32;
    for (size_t i = 0; i < count; i++) {
        uint64_t word;
        memcpy(&word, data + i * LINE_DATA_BYTES, LINE_DATA_BYTES);
        __atomic_store_n(&lines[i].halves[0], (uint32_t)word | flag, __ATOMIC_RELEASE);
        __atomic_store_n(&lines[i].halves[1], word >> 32 | flag, __ATOMIC_RELEASE);
    }
}

static bool slots_free(const struct passage *passage) {
    for (int i = 0; passage->chunk.send && i < passage->to_count; i++) {
        const struct end *to = &passage->to[i];
        if (__atomic_load_n(to->connection->head, __ATOMIC_ACQUIRE) + NCCL_STEPS < to->step + 1)
            return false;
    }
    return true;
}

/* Pass the lines that every neighbour before has brought; false when there are none. */
static bool pass_lines(struct passage *passage, size_t lines, size_t elements_per_line) {
    static _Thread_local char received_data[FAN_MAX][LINES_AT_ONCE * LINE_DATA_BYTES];
    static _Thread_local char sent_data[LINES_AT_ONCE * LINE_DATA_BYTES];
    const struct chunk *chunk = &passage->chunk;
    size_t first = passage->position / elements_per_line, count = lines - first;
    char *received[FAN_MAX], *sent[FAN_MAX] = {sent_data, sent_data, sent_data};
    if (count > LINES_AT_ONCE)
        count = LINES_AT_ONCE;
    for (int i = 0; chunk->receive && i < passage->from_count; i++) {
        received[i] = received_data[i];
        count = take_lines(passage, &passage->from[i], first, count, received[i]);
    }
    if (count == 0)
        return false;
    size_t elements = count * elements_per_line, left = chunk->count - passage->position;
    if (elements > left)
        elements = left;
    passage_combine(passage, received, sent, elements);
    for (int i = 0; chunk->send && i < passage->to_count; i++)
        put_lines(passage, &passage->to[i], first, count, sent_data);
    passage->position += elements;
    return true;
}

bool ll_chunk(struct passage *passage, bool *moved) {
    const struct chunk *chunk = &passage->chunk;
    size_t elements_per_line = LINE_DATA_BYTES / element_bytes(passage->how.element);
    size_t lines = (chunk->count + elements_per_line - 1) / elements_per_line;
    if (passage->slice == 0) { /* the slots are not ours yet */
        if (!slots_free(passage))
            return false;
        for (int i = 0; chunk->send && i < passage->to_count; i++) {
            struct ncclConnFifo *fifo = passage->to[i].connection->connFifo;
            int64_t size_bytes = (int64_t)(lines * sizeof(struct line));
            if (fifo != NULL)
                __atomic_store_n(&fifo[passage->to[i].step % NCCL_STEPS].size, size_bytes, __ATOMIC_RELEASE);
        }
        passage->slice = 1;
    }
    while (passage->position < chunk->count) {
        if (!pass_lines(passage, lines, elements_per_line))
            return false;
        *moved = true;
    }
    for (int i = 0; chunk->receive && i < passage->from_count; i++) {
        struct end *from = &passage->from[i];
        __atomic_store_n(from->connection->head, ++from->step, __ATOMIC_RELEASE);
    }
    for (int i = 0; chunk->send && i < passage->to_count; i++)
        passage->to[i].step++;
    *moved = true;
    return true;
}
