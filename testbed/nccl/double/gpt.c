/* A GPT on pipeline stages, tensor ranks and replicas, in communicators that are split off the first one. */
#include <stdlib.h>
#include <string.h>

#include "driver.h"
#include "driver_gpt_shape.h"

static struct gpt_shape shape;
static struct job *groups[GPT_GROUPS]; /* NULL: this rank has nobody to talk to there */

static void open_groups(void) {
    for (int i = 0; i < GPT_GROUPS; i++) {
        struct gpt_group group = gpt_group_of(&shape, i);
        if (!group.exists)
            continue;
        struct job *job = open_job();
        int color = group.color < 0 ? NCCL_NO_COLOR : group.color;
        check(ncclCommSplit(jobs[0].comm, color, group.key, &job->comm, NULL), "ncclCommSplit");
        if (group.color < 0)
            continue;
        check(ncclCommCount(job->comm, &job->ranks), "ncclCommCount");
        check(ncclCommUserRank(job->comm, &job->rank), "ncclCommUserRank");
        groups[i] = job;
    }
}

static void all_reduce(struct job *job, size_t count) {
    struct request request = {ALLREDUCE, NCCL_BF16, NCCL_SUM, 0, count};
    if (job == NULL)
        return;
    if (job->send == NULL)
        give_buffers(job, &request);
    fill(job, &request);
    call(job, &request);
    finish(job);
    verified &= verify(job, &request);
}

static void reduce_activations(void *context, int calls, uint64_t number) {
    (void)context;
    (void)number;
    for (int i = 0; i < calls; i++)
        all_reduce(groups[GPT_TENSORS], shape.activation);
}

/* What a message is made of: every byte the same, and no two messages' in a row. */
static int content(const struct gpt_transfer *one) {
    return (int)(one->number % 120) + 1;
}

static void transfer(void *context, const struct gpt_transfer *transfers, int count) {
    struct job *job = groups[GPT_STAGES];
    size_t bytes = shape.activation * type_bytes(NCCL_BF16);
    (void)context;
    if (count == 0)
        return;
    if (job->send == NULL) {
        struct request both = {SENDRECV, NCCL_BF16, NCCL_SUM, 0, shape.activation}; /* room for two messages */
        give_buffers(job, &both);
    }
    check(ncclGroupStart(), "ncclGroupStart");
    for (int i = 0; i < count; i++) {
        const struct gpt_transfer *one = &transfers[i];
        size_t offset = one->gradients ? bytes : 0;
        enum counted counted = one->send ? C_SEND : C_RECV;
        job->tallies[counted].calls++;
        job->tallies[counted].payload_bytes += bytes;
        if (one->send) {
            memset(job->send + offset, content(one), bytes);
            check(ncclSend(job->send + offset, shape.activation, NCCL_BF16, one->peer, job->comm, job->stream),
                  "ncclSend");
        } else {
            memset(job->receive + offset, 0, bytes);
            check(ncclRecv(job->receive + offset, shape.activation, NCCL_BF16, one->peer, job->comm, job->stream),
                  "ncclRecv");
        }
    }
    check(ncclGroupEnd(), "ncclGroupEnd");
    finish(job);
    for (int i = 0; i < count; i++)
        for (size_t at = 0; !transfers[i].send && at < bytes; at++)
            verified &= job->receive[(transfers[i].gradients ? bytes : 0) + at] == content(&transfers[i]);
}

void gpt(void) {
    static const struct gpt_actions actions = {reduce_activations, transfer};
    const char *problem = gpt_shape_read(&shape, options.shape, options.ranks);
    if (problem != NULL)
        die("%s", problem);
    gpt_shape_place(&shape, options.rank, false);
    open_groups();
    for (int iteration = 0; iteration < options.iterations; iteration++) {
        gpt_passes(&shape, (uint64_t)iteration, &actions, NULL);
        all_reduce(groups[GPT_REPLICAS], shape.gradients);
        all_reduce(groups[GPT_ENDS], shape.embedding);
    }
}
