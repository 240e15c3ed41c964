/* What Megatron-LM calls to train a GPT on pipeline stages, tensor ranks and replicas.
 *
 *   tensor ranks   an AllReduce of a micro-batch's activations (2bsh bytes of bfloat16) behind attention and behind
 *                  the feed-forward part of each layer: forward, again where it is recomputed, and backward; one more
 *                  behind the first stage's embedding, whose vocabulary they share
 *   stages         activations on, gradients back, 2bsh a micro-batch: one forward, one backward
 *   replicas       one AllReduce of all gradients of a rank at the end
 *   both ends      one AllReduce of the gradients of the word embedding, which the last stage holds a copy of */
#define _GNU_SOURCE
#include <stdlib.h>

#include "driver.h"
#include "driver_gpt_shape.h"

enum { BFLOAT16_BYTES = 2 };

static struct gpt_shape shape;
static struct party *groups[GPT_GROUPS]; /* NULL: this rank has nobody to talk to there */
static struct data *replica_data, *end_data;
static char *gradient_sum, *embedding_sum;

const char *gpt_problem(const struct options *options) {
    return gpt_shape_read(&shape, options->shape, options->nranks);
}

static char *memory(size_t elements) {
    char *made = calloc(elements, BFLOAT16_BYTES);
    if (made == NULL)
        abort();
    return made;
}

void gpt_prepare(struct job *job) {
    uint64_t seed = job->options->seed;
    gpt_shape_place(&shape, job->options->rank, job->options->replicas_apart);
    for (int i = 0; i < GPT_GROUPS; i++) {
        struct gpt_group group = gpt_group_of(&shape, i);
        groups[i] = group.exists ? split(job->world, group.color < 0 ? NCCL_SPLIT_NOCOLOR : group.color, group.key)
                                 : NULL;
    }
    /* What a pass fills, and both directions of the pipeline. */
    buffers_make(job, gpt_backward_calls(&shape) + 2, shape.activation * BFLOAT16_BYTES);
    job->data = data_make(ncclBfloat16, ncclSum, shape.activation, shape.tensor, seed);
    replica_data = data_make(ncclBfloat16, ncclSum, shape.gradients, shape.data, seed);
    end_data = data_make(ncclBfloat16, ncclSum, shape.embedding, 2, seed);
    gradient_sum = memory(shape.gradients);
    embedding_sum = memory(shape.embedding);
}

static void reduce_activations(void *context, int calls, uint64_t number) {
    struct job *job = context;
    for (int i = 0; groups[GPT_TENSORS] != NULL && i < calls; i++)
        all_reduce(job, groups[GPT_TENSORS], job->data, job->buffers[i], shape.activation, ncclBfloat16, ncclSum,
                   number + (uint64_t)i, job->stream);
    settle(job);
}

static void transfer(void *context, const struct gpt_transfer *transfers, int count) {
    struct job *job = context;
    struct party *stages = groups[GPT_STAGES];
    if (count == 0)
        return;
    must(ncclGroupStart(), "ncclGroupStart");
    for (int i = 0; i < count; i++) {
        const struct gpt_transfer *one = &transfers[i];
        char *target = job->buffers[job->buffer_count - 1 - (one->gradients ? 1 : 0)];
        if (one->send) {
            CALL(stages, COUNT_SEND, shape.activation, ncclBfloat16,
                 ncclSend(data_of(job->data, shape.stage, one->number), shape.activation, ncclBfloat16, one->peer,
                          stages->comm, job->stream));
            continue;
        }
        CALL(stages, COUNT_RECV, shape.activation, ncclBfloat16,
             ncclRecv(target, shape.activation, ncclBfloat16, one->peer, stages->comm, job->stream));
        expect(job, target, data_of(job->data, one->peer, one->number), shape.activation * BFLOAT16_BYTES, "Recv");
    }
    must(ncclGroupEnd(), "ncclGroupEnd");
    settle(job);
}

void gpt_iterate(struct job *job, uint64_t iteration) {
    static const struct gpt_actions actions = {reduce_activations, transfer};
    gpt_passes(&shape, iteration, &actions, job);
    if (groups[GPT_REPLICAS] != NULL)
        all_reduce(job, groups[GPT_REPLICAS], replica_data, gradient_sum, shape.gradients, ncclBfloat16, ncclSum,
                   iteration, job->stream);
    if (groups[GPT_ENDS] != NULL)
        all_reduce(job, groups[GPT_ENDS], end_data, embedding_sum, shape.embedding, ncclBfloat16, ncclSum, iteration,
                   job->stream);
    settle(job);
}

void gpt_finish(struct job *job) {
    for (int i = 0; i < GPT_GROUPS; i++)
        if (groups[i] != NULL)
            destroy(groups[i]);
    data_free(replica_data);
    data_free(end_data);
    free(gradient_sum);
    free(embedding_sum);
    finish_buffers(job);
}
