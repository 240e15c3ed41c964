/* The shape of a GPT on pipeline stages, tensor ranks and replicas, and in which order one rank of it communicates:
 * for this directory's driver and for that of the real NCCL. */
#ifndef RAILSCOPE_DRIVER_GPT_SHAPE_H
#define RAILSCOPE_DRIVER_GPT_SHAPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct gpt_shape {
    int pipeline, tensor, data, layers, hidden, sequence, vocabulary, batch, micro_batches;
    int stage, replica, tensor_rank, own_layers; /* of this rank */
    size_t activation, gradients, embedding;     /* elements of one message */
};

/* Reads nine numbers: stages, tensor ranks, replicas, layers, hidden size, tokens of a sequence, vocabulary, sequences
 * of a micro-batch, micro-batches of a replica.  Returns NULL, or why no job of so many ranks can be so. */
const char *gpt_shape_read(struct gpt_shape *shape, const char *text, int ranks);

/* Where a rank is, and what it has there.  Ranks are counted tensor, data, pipeline, or tensor, pipeline, data. */
void gpt_shape_place(struct gpt_shape *shape, int rank, bool replicas_apart);

bool gpt_is_first(const struct gpt_shape *shape);
bool gpt_is_last(const struct gpt_shape *shape);

/* AllReduces of activations of one backward pass, the most that come in one go. */
int gpt_backward_calls(const struct gpt_shape *shape);

/* Colours and keys of the communicators that are split off the world; a negative colour: this rank is in none. */
struct gpt_group {
    bool exists; /* for any rank */
    int color, key;
};
enum { GPT_TENSORS, GPT_STAGES, GPT_REPLICAS, GPT_ENDS, GPT_GROUPS };
struct gpt_group gpt_group_of(const struct gpt_shape *shape, int which);

/* A message to or from a neighbouring stage; `number` is the same at both ends, and no other message's. */
struct gpt_transfer {
    int peer;
    bool send, gradients;
    uint64_t number;
};

struct gpt_actions {
    void (*reduce_activations)(void *context, int calls, uint64_t number);
    void (*transfer)(void *context, const struct gpt_transfer *transfers, int count); /* at once; count may be 0 */
};

/* The forward and backward passes of all micro-batches of an iteration: one forward, one backward. */
void gpt_passes(const struct gpt_shape *shape, uint64_t iteration, const struct gpt_actions *actions, void *context);

#endif
