/* Layers and parameters are counted here for themselves, so that whoever predicts them has something to be wrong
 * against. */
#include "driver_gpt_shape.h"

#include <stdlib.h>

enum { VOCABULARY_MULTIPLE = 128, ALLREDUCES_EACH_WAY = 2, LARGEST_SIZE = 1 << 20, MOST_LAYERS = 60 };

const char *gpt_shape_read(struct gpt_shape *shape, const char *text, int ranks) {
    int *const sizes[] = {&shape->pipeline, &shape->tensor,     &shape->data,  &shape->layers,       &shape->hidden,
                          &shape->sequence, &shape->vocabulary, &shape->batch, &shape->micro_batches};
    size_t count = sizeof sizes / sizeof *sizes;
    for (size_t i = 0; i < count; i++) {
        char *end = NULL;
        long number = text == NULL ? 0 : strtol(text, &end, 10);
        if (number < 1 || number > LARGEST_SIZE || *end != (i + 1 < count ? ',' : '\0'))
            return "the pattern gpt needs a shape of nine numbers, such as 2,2,2,4,64,32,500,2,4";
        *sizes[i] = (int)number;
        text = end + 1;
    }
    if ((int64_t)shape->pipeline * shape->tensor * shape->data != ranks)
        return "the shape's stages x tensor ranks x replicas must be the number of ranks";
    if (shape->layers < shape->pipeline || shape->layers > MOST_LAYERS || shape->hidden % shape->tensor != 0)
        return "the shape needs a layer for every stage, at most 60, and a hidden size that the tensor ranks divide";
    return NULL;
}

bool gpt_is_first(const struct gpt_shape *shape) { return shape->stage == 0; }
bool gpt_is_last(const struct gpt_shape *shape) { return shape->stage == shape->pipeline - 1; }

/* Full stages come first, and every stage that is left has a layer. */
static int layers_of_stage(const struct gpt_shape *shape) {
    int left = shape->layers, full = (shape->layers + shape->pipeline - 1) / shape->pipeline, own = 0;
    for (int stage = 0; stage <= shape->stage; stage++) {
        int later = shape->pipeline - 1 - stage;
        own = full < left - later ? full : left - later;
        left -= own;
    }
    return own;
}

void gpt_shape_place(struct gpt_shape *shape, int rank, bool replicas_apart) {
    int left = rank / shape->tensor;
    shape->tensor_rank = rank % shape->tensor;
    shape->replica = replicas_apart ? left / shape->pipeline : left % shape->data;
    shape->stage = replicas_apart ? left % shape->pipeline : left / shape->data;
    shape->own_layers = layers_of_stage(shape);
    size_t h = (size_t)shape->hidden, t = (size_t)shape->tensor, multiple = VOCABULARY_MULTIPLE * t;
    size_t words = ((size_t)shape->vocabulary + multiple - 1) / multiple * multiple / t;
    shape->activation = (size_t)shape->batch * (size_t)shape->sequence * h;
    shape->embedding = words * h;
    shape->gradients = (size_t)shape->own_layers * ((12 * h * h + 7 * h) / t + 6 * h);
    if (gpt_is_first(shape))
        shape->gradients += shape->embedding + (size_t)shape->sequence * h;
    else if (gpt_is_last(shape))
        shape->gradients += shape->embedding;
    if (gpt_is_last(shape))
        shape->gradients += 2 * h; /* the final layer norm */
}

int gpt_backward_calls(const struct gpt_shape *shape) {
    return 2 * ALLREDUCES_EACH_WAY * shape->own_layers; /* the forward part again, then its gradients */
}

struct gpt_group gpt_group_of(const struct gpt_shape *shape, int which) {
    int t = shape->tensor, d = shape->data, at_ends = gpt_is_first(shape) || gpt_is_last(shape);
    int across = shape->replica * t + shape->tensor_rank;
    switch (which) {
    case GPT_TENSORS: return (struct gpt_group){t > 1, shape->stage * d + shape->replica, shape->tensor_rank};
    case GPT_STAGES: return (struct gpt_group){shape->pipeline > 1, across, shape->stage};
    case GPT_REPLICAS: return (struct gpt_group){d > 1, shape->stage * t + shape->tensor_rank, shape->replica};
    default: return (struct gpt_group){shape->pipeline > 1, at_ends ? across : -1, shape->stage};
    }
}

struct passes {
    const struct gpt_shape *shape;
    const struct gpt_actions *actions;
    void *context;
    int64_t first; /* number of the iteration's first micro-batch */
};

static void forward(const struct passes *passes, int64_t micro_batch) {
    int calls = ALLREDUCES_EACH_WAY * passes->shape->own_layers + (gpt_is_first(passes->shape) ? 1 : 0);
    passes->actions->reduce_activations(passes->context, calls, (uint64_t)(passes->first + micro_batch));
}

static void backward(const struct passes *passes, int64_t micro_batch) {
    passes->actions->reduce_activations(passes->context, gpt_backward_calls(passes->shape),
                                        (uint64_t)(passes->first + micro_batch));
}

/* Which micro-batch goes where; negative: none. */
struct exchange {
    int64_t on, from_before, back, from_behind;
};

static void transfer(const struct passes *passes, struct exchange exchange) {
    const struct gpt_shape *shape = passes->shape;
    bool first = gpt_is_first(shape), last = gpt_is_last(shape);
    struct {
        int64_t micro_batch;
        int peer;
        bool send, gradients;
    } const parts[] = {
        {last ? -1 : exchange.on, shape->stage + 1, true, false},
        {first ? -1 : exchange.from_before, shape->stage - 1, false, false},
        {first ? -1 : exchange.back, shape->stage - 1, true, true},
        {last ? -1 : exchange.from_behind, shape->stage + 1, false, true},
    };
    struct gpt_transfer transfers[sizeof parts / sizeof *parts];
    int count = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (parts[i].micro_batch >= 0)
            transfers[count++] = (struct gpt_transfer){
                parts[i].peer, parts[i].send, parts[i].gradients,
                2 * (uint64_t)(passes->first + parts[i].micro_batch) + (parts[i].gradients ? 1 : 0)};
    passes->actions->transfer(passes->context, transfers, count);
}

void gpt_passes(const struct gpt_shape *shape, uint64_t iteration, const struct gpt_actions *actions, void *context) {
    int64_t m = shape->micro_batches, ahead = shape->pipeline - 1 - shape->stage; /* forward passes before the first back */
    struct passes passes = {shape, actions, context, (int64_t)iteration * m};
    if (ahead > m)
        ahead = m;
    for (int64_t i = 0; i < ahead; i++) {
        transfer(&passes, (struct exchange){-1, i, -1, -1});
        forward(&passes, i);
        transfer(&passes, (struct exchange){i, -1, -1, -1});
    }
    if (ahead < m)
        transfer(&passes, (struct exchange){-1, ahead, -1, -1});
    for (int64_t i = 0; i < m - ahead; i++) {
        int64_t next = i + ahead + 1;
        forward(&passes, i + ahead);
        transfer(&passes, (struct exchange){i + ahead, -1, -1, i});
        backward(&passes, i);
        transfer(&passes, (struct exchange){-1, next < m ? next : -1, i, -1});
    }
    for (int64_t i = m - ahead; i < m; i++) {
        transfer(&passes, (struct exchange){-1, -1, -1, i});
        backward(&passes, i);
        transfer(&passes, (struct exchange){-1, -1, i, -1});
    }
}
