/* A chunk's way through this rank, whatever the protocol. */
#include "double.h"

static uint64_t round_up(uint64_t value, uint64_t unit) {
    return (value + unit - 1) / unit * unit;
}

void passage_begin(struct passage *passage) {
    bool simple = passage->protocol == PROTOCOL_SIMPLE;
    uint64_t unit = simple ? (uint64_t)(passage->slices_per_chunk * passage->steps_per_slice) : 1;
    for (int i = 0; i < passage->from_count; i++) {
        struct end *from = &passage->from[i];
        from->step = round_up(from->connection->step, unit);
        if (simple) /* return the credits of the steps skipped by rounding up */
            __atomic_store_n(from->connection->head, from->step, __ATOMIC_RELEASE);
    }
    for (int i = 0; i < passage->to_count; i++)
        passage->to[i].step = round_up(passage->to[i].connection->step, unit);
    passage->in_chunk = false;
}

void passage_end(struct passage *passage) {
    for (int i = 0; i < passage->from_count; i++)
        passage->from[i].connection->step = passage->from[i].step;
    for (int i = 0; i < passage->to_count; i++)
        passage->to[i].connection->step = passage->to[i].step;
}

bool passage_chunk(struct passage *passage, const struct chunk *chunk, bool *moved) {
    if (!passage->in_chunk) {
        passage->chunk = *chunk;
        passage->in_chunk = true;
        passage->slice = 0;
        passage->position = 0;
    }
    bool done = passage->protocol == PROTOCOL_SIMPLE ? simple_chunk(passage, moved) : ll_chunk(passage, moved);
    passage->in_chunk = !done;
    return done;
}

void passage_combine(const struct passage *passage, char *const *received, char *const *sent, size_t count) {
    const struct chunk *chunk = &passage->chunk;
    const struct arithmetic *how = &passage->how;
    size_t width = element_bytes(how->element), offset = passage->position * width;
    const char *input = chunk->input ? (const char *)chunk->input + offset : NULL;
    char *first = chunk->output ? (char *)chunk->output + offset : sent[0];
    int from = chunk->receive ? passage->from_count : 0, to = chunk->send ? passage->to_count : 0, next = 0;
    if (input != NULL && from > 0 && how->reduction != REDUCE_PREMULSUM)
        reduce_pair(how, first, received[next++], input, count);
    else if (input != NULL)
        reduce_input(how, first, input, count);
    else
        memcpy(first, received[next++], count * width);
    for (; next < from; next++)
        reduce_pair(how, first, received[next], first, count);
    if (chunk->finish)
        reduce_finish(how, first, count);
    for (int i = 0; i < to; i++)
        if (sent[i] != first)
            memcpy(sent[i], first, count * width);
}
