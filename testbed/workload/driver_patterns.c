/* What jobs call: the shapes of data-parallel and tensor-parallel training, mixtures of experts and inference, and a
 * mixture of everything for tests. */
#define _GNU_SOURCE
#include "driver.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

static void compute(long milliseconds) {
    nanosleep(&(struct timespec){.tv_nsec = milliseconds * 1000000}, NULL);
}

/* ---- ddp: gradients in buckets, while the backward pass goes on ---- */

enum { DDP_FIRST_BYTES = 1 << 20, DDP_BUCKET_BYTES = 25 << 20, DDP_BUCKETS = 3 }; /* PyTorch's defaults */

static void ddp_prepare(struct job *job) {
    buffers_make(job, DDP_BUCKETS, DDP_BUCKET_BYTES);
    job->data = data_make(ncclFloat32, ncclSum, DDP_BUCKET_BYTES / 4, job->world->nranks, job->options->seed);
}

static void ddp_iterate(struct job *job, uint64_t iteration) {
    for (int bucket = 0; bucket < DDP_BUCKETS; bucket++) {
        size_t bytes = bucket == 0 ? DDP_FIRST_BYTES : DDP_BUCKET_BYTES;
        compute(3);
        all_reduce(job, job->world, job->data, job->buffers[bucket], bytes / 4, ncclFloat32, ncclSum,
                   iteration * DDP_BUCKETS + (uint64_t)bucket, job->stream);
    }
    settle(job);
    compute(3);
}

/* ---- tensor-parallel: equal activations, layer after layer ---- */

enum { TENSOR_BYTES = 4 << 20, TENSOR_LAYERS = 8 };

static void tensor_prepare(struct job *job) {
    buffers_make(job, TENSOR_LAYERS + 2, TENSOR_BYTES);
    job->data = data_make(ncclBfloat16, ncclSum, TENSOR_BYTES / 2, job->world->nranks, job->options->seed);
}

static void tensor_iterate(struct job *job, uint64_t iteration) {
    struct party *world = job->world;
    size_t part = TENSOR_BYTES / 2 / (size_t)world->nranks, part_bytes = part * 2;
    for (int layer = 0; layer < TENSOR_LAYERS; layer++)
        all_reduce(job, world, job->data, job->buffers[layer], TENSOR_BYTES / 2, ncclBfloat16, ncclSum,
                   iteration * TENSOR_LAYERS + (uint64_t)layer, job->stream);
    char *gathered = job->buffers[TENSOR_LAYERS], *scattered = job->buffers[TENSOR_LAYERS + 1];
    CALL(world, COUNT_ALL_GATHER, part, ncclBfloat16,
         ncclAllGather(data_of(job->data, world->rank, iteration), gathered, part, ncclBfloat16, world->comm,
                       job->stream));
    for (int rank = 0; rank < world->nranks; rank++)
        expect(job, gathered + (size_t)rank * part_bytes, data_of(job->data, rank, iteration), part_bytes, "AllGather");
    CALL(world, COUNT_REDUCE_SCATTER, part, ncclBfloat16,
         ncclReduceScatter(data_of(job->data, world->rank, iteration), scattered, part, ncclBfloat16, ncclSum,
                           world->comm, job->stream));
    expect(job, scattered, (const char *)data_combined(job->data, iteration) + (size_t)world->rank * part_bytes,
           part_bytes, "ReduceScatter");
    settle(job);
}

/* ---- moe: tokens to experts and back, in other proportions every time ---- */

enum { MOE_TOKENS = 256, MOE_TOKEN_ELEMENTS = 1024, MOE_EQUAL_ELEMENTS = 32 << 10 };

static void moe_prepare(struct job *job) {
    int n = job->world->nranks;
    job->second = split(job->world, 0, job->world->rank);
    buffers_make(job, 2 * n + 1, (size_t)MOE_TOKENS * MOE_TOKEN_ELEMENTS * 2 * (size_t)n);
    job->data = data_make(ncclBfloat16, ncclSum, (size_t)MOE_TOKENS * MOE_TOKEN_ELEMENTS * (size_t)n, n,
                          job->options->seed);
}

/* Elements from one rank to another: every rank can say so of every pair. */
static size_t moe_split(const struct job *job, uint64_t round, int from, int to) {
    uint64_t random = mix(job->options->seed ^ round, (uint64_t)from << 32 | (uint64_t)to);
    return random % (MOE_TOKENS + 1) * MOE_TOKEN_ELEMENTS;
}

static void moe_round(struct job *job, uint64_t round, char **targets) {
    struct party *experts = job->second;
    must(ncclGroupStart(), "ncclGroupStart");
    for (int peer = 0; peer < experts->nranks; peer++) {
        size_t out = moe_split(job, round, experts->rank, peer), in = moe_split(job, round, peer, experts->rank);
        CALL(experts, COUNT_SEND, out, ncclBfloat16,
             ncclSend(data_of(job->data, experts->rank, round), out, ncclBfloat16, peer, experts->comm, job->stream));
        CALL(experts, COUNT_RECV, in, ncclBfloat16,
             ncclRecv(targets[peer], in, ncclBfloat16, peer, experts->comm, job->stream));
        expect(job, targets[peer], data_of(job->data, peer, round), in * 2, "Recv");
    }
    must(ncclGroupEnd(), "ncclGroupEnd");
}

static void moe_iterate(struct job *job, uint64_t iteration) {
    struct party *experts = job->second;
    int n = experts->nranks;
    char *equal = job->buffers[2 * n];
    moe_round(job, 2 * iteration, job->buffers);         /* dispatch */
    moe_round(job, 2 * iteration + 1, job->buffers + n); /* combine */
    CALL(experts, COUNT_ALL_TO_ALL, MOE_EQUAL_ELEMENTS, ncclBfloat16,
         ncclAlltoAll(data_of(job->data, experts->rank, iteration), equal, MOE_EQUAL_ELEMENTS, ncclBfloat16,
                      experts->comm, job->stream));
    for (int peer = 0; peer < n; peer++)
        expect(job, equal + (size_t)peer * MOE_EQUAL_ELEMENTS * 2,
               (const char *)data_of(job->data, peer, iteration) + (size_t)experts->rank * MOE_EQUAL_ELEMENTS * 2,
               MOE_EQUAL_ELEMENTS * 2, "AlltoAll");
    settle(job);
}

static void moe_finish(struct job *job) {
    destroy(job->second);
    finish_buffers(job);
}

/* ---- inference: small, and as many as can be ---- */

enum { INFERENCE_CALLS = 64, INFERENCE_LARGEST_BYTES = 64 << 10, INFERENCE_MEMORY_BYTES = 256 << 20 };

static size_t inference_largest(const struct job *job) {
    return job->options->bytes > 0 ? job->options->bytes : INFERENCE_LARGEST_BYTES;
}

static void inference_prepare(struct job *job) {
    size_t largest = inference_largest(job), fitting = INFERENCE_MEMORY_BYTES / largest;
    size_t calls = job->options->calls > 0 ? (size_t)job->options->calls : INFERENCE_CALLS;
    calls = calls < fitting ? calls : fitting > 1 ? fitting : 1;
    buffers_make(job, calls < PENDING ? (int)calls : PENDING, largest);
    job->data = data_make(ncclBfloat16, ncclSum, largest / 2, job->world->nranks, job->options->seed);
}

static void inference_iterate(struct job *job, uint64_t iteration) {
    for (int call = 0; call < job->buffer_count; call++) {
        uint64_t number = iteration * (uint64_t)job->buffer_count + (uint64_t)call;
        size_t bytes = job->options->bytes;
        if (bytes == 0)
            bytes = (size_t)1024 << mix(job->options->seed, number) % 7; /* 1 to 64 KiB */
        all_reduce(job, job->world, job->data, job->buffers[call], bytes / 2, ncclBfloat16, ncclSum, number,
                   job->stream);
    }
    settle(job);
}

/* ---- mixed: every operation, most data types, communicators that come and go ---- */

enum { MIXED_COUNT = 40000, MIXED_BUFFERS = 24 };

static const ncclDataType_t mixed_types[] = {ncclFloat32, ncclBfloat16, ncclInt8,   ncclFloat16, ncclInt64,
                                             ncclUint8,   ncclFloat64,  ncclUint32, ncclInt32,   ncclUint64};

static void mixed_split(struct job *job) {
    struct party *world = job->world;
    job->second = split(world, world->rank % 2, world->rank);
    job->third = split(world, 7, -world->rank); /* the same ranks, counted from the other end */
}

static void mixed_prepare(struct job *job) {
    buffers_make(job, MIXED_BUFFERS, (size_t)MIXED_COUNT * 8 * (size_t)job->world->nranks);
    mixed_split(job);
}

static void expect_blocks(const struct job *job, const struct party *party, const struct data *data, const char *target,
                          size_t bytes, size_t offset, uint64_t k, const char *what) {
    for (int rank = 0; rank < party->nranks; rank++)
        expect(job, target + (size_t)rank * bytes, (const char *)data_of(data, rank, k) + offset, bytes, what);
}

static void mixed_rooted(struct job *job, const struct data *data, size_t count, ncclDataType_t type,
                         ncclRedOp_t reduction, uint64_t k, char **targets) {
    struct party *world = job->world;
    const void *mine = data_of(data, world->rank, k);
    size_t bytes = count * element_bytes(type);
    int root = (int)(k % (uint64_t)world->nranks);
    CALL(world, COUNT_BROADCAST, count, type,
         ncclBroadcast(mine, targets[0], count, type, root, world->comm, job->stream));
    expect(job, targets[0], data_of(data, root, k), bytes, "Broadcast");
    if (world->rank == root)
        memcpy(targets[1], mine, bytes);
    CALL(world, COUNT_BROADCAST, count, type, ncclBcast(targets[1], count, type, root, world->comm, job->stream));
    expect(job, targets[1], data_of(data, root, k), bytes, "Bcast");
    CALL(world, COUNT_REDUCE, count, type,
         ncclReduce(mine, targets[2], count, type, reduction, root, world->comm, job->stream));
    if (world->rank == root)
        expect(job, targets[2], data_combined(data, k), bytes, "Reduce");
    CALL(world, COUNT_GATHER, count, type, ncclGather(mine, targets[3], count, type, root, world->comm, job->stream));
    if (world->rank == root)
        expect_blocks(job, world, data, targets[3], bytes, 0, k, "Gather");
    CALL(world, COUNT_SCATTER, count, type, ncclScatter(mine, targets[4], count, type, root, world->comm, job->stream));
    expect(job, targets[4], (const char *)data_of(data, root, k) + (size_t)world->rank * bytes, bytes, "Scatter");
}

static void mixed_everyone(struct job *job, const struct data *data, size_t count, ncclDataType_t type,
                           ncclRedOp_t reduction, uint64_t k, char **targets) {
    struct party *reversed = job->third;
    const void *mine = data_of(data, reversed->rank, k);
    size_t bytes = count * element_bytes(type);
    all_reduce(job, reversed, data, targets[0], count, type, reduction, k, job->stream);
    CALL(reversed, COUNT_ALL_GATHER, count, type,
         ncclAllGather(mine, targets[1], count, type, reversed->comm, job->stream));
    expect_blocks(job, reversed, data, targets[1], bytes, 0, k, "AllGather");
    CALL(reversed, COUNT_REDUCE_SCATTER, count, type,
         ncclReduceScatter(mine, targets[2], count, type, reduction, reversed->comm, job->stream));
    expect(job, targets[2], (const char *)data_combined(data, k) + (size_t)reversed->rank * bytes, bytes,
           "ReduceScatter");
    CALL(reversed, COUNT_ALL_TO_ALL, count, type,
         ncclAlltoAll(mine, targets[3], count, type, reversed->comm, job->stream));
    expect_blocks(job, reversed, data, targets[3], bytes, (size_t)reversed->rank * bytes, k, "AlltoAll");
    /* In place: the data begins where the result goes. */
    memcpy(targets[4], mine, bytes);
    CALL(reversed, COUNT_ALL_REDUCE, count, type,
         ncclAllReduce(targets[4], targets[4], count, type, reduction, reversed->comm, job->stream));
    expect(job, targets[4], data_combined(data, k), bytes, "AllReduce in place");
}

/* Both neighbours and the own rank in one group, on two streams, with a collective of another communicator. */
static void mixed_grouped(struct job *job, const struct data *data, size_t count, ncclDataType_t type, uint64_t k,
                          char **targets) {
    struct party *world = job->world;
    size_t bytes = count * element_bytes(type);
    int peers[3] = {(world->rank + 1) % world->nranks, (world->rank + world->nranks - 1) % world->nranks, world->rank};
    struct data *halves = data_make(ncclFloat32, ncclSum, count, job->second->nranks, job->options->seed);
    must(ncclGroupStart(), "ncclGroupStart");
    must(ncclGroupStart(), "ncclGroupStart");
    for (int i = 0; i < 3; i++) {
        cudaStream_t stream = i == 1 ? job->other_stream : job->stream;
        int from = peers[i == 0 ? 1 : i == 1 ? 0 : 2]; /* what all send forwards arrives from behind */
        CALL(world, COUNT_SEND, count, type,
             ncclSend(data_of(data, world->rank, k + (uint64_t)i), count, type, peers[i], world->comm, stream));
        CALL(world, COUNT_RECV, count, type, ncclRecv(targets[i], count, type, from, world->comm, stream));
        expect(job, targets[i], data_of(data, from, k + (uint64_t)i), bytes, "Recv");
    }
    must(ncclGroupEnd(), "ncclGroupEnd");
    all_reduce(job, job->second, halves, targets[3], count, ncclFloat32, ncclSum, k, job->other_stream);
    must(ncclGroupEnd(), "ncclGroupEnd");
    settle(job);
    data_free(halves);
}

static void mixed_iterate(struct job *job, uint64_t k) {
    const struct options *options = job->options;
    size_t count = mix(options->seed, k) % MIXED_COUNT + 1;
    ncclDataType_t type = mixed_types[k % (sizeof mixed_types / sizeof *mixed_types)];
    ncclRedOp_t reduction = (ncclRedOp_t)(mix(options->seed, ~k) % ncclNumOps);
    int n = job->world->nranks;
    if (k % 8 == 1)
        count = 1 + k % 3; /* fewer elements than ranks */
    struct data *data = data_make(type, reduction, count * (size_t)n, n, options->seed);
    mixed_rooted(job, data, count, type, reduction, k, job->buffers);
    mixed_everyone(job, data, count, type, reduction, k, job->buffers + 5);
    settle(job);
    mixed_grouped(job, data, count, type, k, job->buffers + 10);
    data_free(data);
    if (k % 4 == 3) {
        destroy(job->second);
        destroy(job->third);
        mixed_split(job);
    }
}

static void mixed_finish(struct job *job) {
    destroy(job->second);
    destroy(job->third);
    finish_buffers(job);
}

/* ---- idle: a communicator and nothing on it ---- */

static void nothing(struct job *job) { (void)job; }

static void idle_iterate(struct job *job, uint64_t iteration) {
    (void)job;
    (void)iteration;
    compute(20);
}

static const struct pattern patterns[] = {
    {"ddp", ddp_prepare, ddp_iterate, finish_buffers, true},
    {"tensor-parallel", tensor_prepare, tensor_iterate, finish_buffers, true},
    {"moe", moe_prepare, moe_iterate, moe_finish, false},
    {"inference", inference_prepare, inference_iterate, finish_buffers, true},
    {"gpt", gpt_prepare, gpt_iterate, gpt_finish, true},
    {"mixed", mixed_prepare, mixed_iterate, mixed_finish, false},
    {"idle", nothing, idle_iterate, nothing, false},
};

const struct pattern *pattern_named(const char *name) {
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++)
        if (strcmp(patterns[i].name, name) == 0)
            return &patterns[i];
    return NULL;
}
