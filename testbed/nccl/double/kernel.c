/* A kernel launch of NCCL, played on the CPU.
 *
 * The launch's arguments name the communicator's device structure, the channels taking part, and for
 * each channel a list of batches of work.  A GPU gives each channel a block of threads; here the stream's
 * thread takes the channels in turn and moves each as far as its neighbours allow, until all are done.
 * Works of a collective follow one another on a channel; the sends and receives of one batch run side
 * by side, as they may depend on each other across ranks.
 *
 * What a batch computes is told by the device function's name: libnccl's host table of device functions
 * points at stubs that carry it.  (Public source: src/device/common.h, ncclKernelMain.)
 */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "double.h"

enum { BATCH_WORKS_MAX = 64, TRANSFERS_MAX = 32, LINE_BYTES = 16, GRAIN_BYTES_SIMPLE = 512, GRAIN_BYTES_LL = 16 };
enum { IDLE_ROUNDS_BEFORE_SLEEP = 2000, IDLE_SLEEP_NS = 50000 };

struct transfer { /* one passage and where its chunks come from */
    struct passage passage;
    struct collective_work collective;
    struct p2p_work p2p;
    size_t next_chunk;
    bool is_p2p, done;
};

struct channel {
    int number;
    const struct ncclDevWorkBatch *batch; /* the next one, NULL at the end */
    const unsigned char *works[BATCH_WORKS_MAX];
    size_t work_count, next_work; /* of the batch being played */
    bool is_p2p;
    struct arithmetic how;
    enum collective collective;
    enum protocol protocol;
    bool is_tree;
    struct transfer transfers[TRANSFERS_MAX]; /* side by side */
    size_t transfer_count;
};

struct kernel {
    const char *mangled;
    char *name;
    unsigned char *arguments;
    size_t arguments_bytes;
    const struct ncclKernelComm *comm;
    size_t channel_count;
    struct channel *channels;
};

/* ---- which function a batch runs ---- */

static const char *const collective_names[COLLECTIVES] = {"AllReduce", "AllGather", "ReduceScatter", "Broadcast",
                                                          "Reduce"};
static const char *const reduction_names[] = {"", "Sum", "Prod", "MinMax", "PreMulSum", "SumPostDiv"};
static const char *const element_names[ELEMENTS] = {"u8", "u32", "u64", "f16", "f32", "f64", "bf16"};

/* "ncclDevFunc_AllReduce_Sum_f32_RING_SIMPLE" out of its mangled name; aborts for an absent function. */
static void function_name(const struct kernel *kernel, unsigned id, char *text, size_t size_bytes) {
    static void *const *table;
    if (table == NULL && (table = symbol_address("ncclDevFuncTable")) == NULL)
        double_fail("libnccl has no ncclDevFuncTable");
    const char *mangled = table[id] != NULL ? symbol_name(table[id]) : NULL;
    const char *name = mangled != NULL ? strstr(mangled, "ncclDevFunc_") : NULL;
    if (name == NULL)
        double_fail("unsupported device function %u of kernel %s", id, kernel->name);
    snprintf(text, size_bytes, "%.*s", (int)strlen(name) - 1, name); /* without the mangled (void) */
}

static size_t find(const char *const *names, size_t count, const char *name) {
    size_t i = 0;
    while (i < count && strcmp(names[i], name) != 0)
        i++;
    return i;
}

/* "RING_SIMPLE" and the like: whether it is one that we play. */
static bool understand_way(struct channel *channel, const char *way) {
    channel->is_tree = strncmp(way, "TREE_", 5) == 0;
    channel->protocol = strcmp(way + 5, "LL") == 0 ? PROTOCOL_LL : PROTOCOL_SIMPLE;
    return (channel->is_tree || strncmp(way, "RING_", 5) == 0) &&
           (channel->protocol == PROTOCOL_LL || strcmp(way + 5, "SIMPLE") == 0);
}

static void understand(const struct kernel *kernel, struct channel *channel, unsigned id) {
    char name[128], collective[32] = "", reduction[32] = "", element[32] = "", way[64] = "";
    function_name(kernel, id, name, sizeof name);
    channel->how = (struct arithmetic){REDUCE_NONE, ELEMENT_U8, 0};
    if (channel->is_p2p) {
        if (strcmp(name, "ncclDevFunc_SendRecv") != 0)
            double_fail("unsupported kernel %s: %s as point-to-point work", kernel->name, name);
        return;
    }
    size_t reductions = sizeof reduction_names / sizeof *reduction_names;
    sscanf(name, "ncclDevFunc_%31[^_]_%63s", collective, way);
    channel->collective = (enum collective)find(collective_names, COLLECTIVES, collective);
    bool copies = channel->collective == ALLGATHER || channel->collective == BROADCAST;
    if (channel->collective != COLLECTIVES && !copies) {
        sscanf(name, "ncclDevFunc_%*[^_]_%31[^_]_%31[^_]_%63s", reduction, element, way);
        channel->how.reduction = (enum reduction)find(reduction_names, reductions, reduction);
        channel->how.element = (enum element)find(element_names, ELEMENTS, element);
    }
    if (channel->collective == COLLECTIVES || channel->how.reduction == reductions ||
        channel->how.element == ELEMENTS || !understand_way(channel, way) ||
        (channel->is_tree && channel->collective != ALLREDUCE))
        double_fail("unsupported kernel %s: device function %s", kernel->name, name);
}

/* ---- batches ---- */

static void add_works(const struct kernel *kernel, struct channel *channel, const struct ncclDevWorkBatch *batch) {
    const struct ncclDevKernelArgs *arguments = (const void *)kernel->arguments;
    size_t size = channel->is_p2p ? sizeof(struct ncclDevWorkP2p) : sizeof(struct ncclDevWorkColl);
    for (uint64_t bits = batch->offsetBitset; bits != 0; bits &= bits - 1) {
        size_t offset = batch->offsetBase + (size_t)__builtin_ctzll(bits) * size;
        if (channel->work_count == BATCH_WORKS_MAX)
            double_fail("%s: more than %d works in a batch", kernel->name, BATCH_WORKS_MAX);
        const unsigned char *base = kernel->arguments;
        if (arguments->workStorageType != ncclDevWorkStorageTypeArgs) {
            base = arguments->workBuf;
            offset &= arguments->workMask;
        }
        channel->works[channel->work_count++] = base + offset;
    }
}

/* Take the next batch of the channel, and those that only continue it; false at the end of the list. */
static bool next_batch(const struct kernel *kernel, struct channel *channel) {
    const struct ncclDevWorkBatch *batch = channel->batch;
    if (batch == NULL)
        return false;
    unsigned type = (unsigned)ncclDevWorkBatch_workType(batch);
    if (type != ncclDevWorkTypeP2p && type != ncclDevWorkTypeColl)
        double_fail("unsupported kernel %s: work type %u", kernel->name, type);
    channel->is_p2p = type == ncclDevWorkTypeP2p;
    channel->work_count = channel->next_work = channel->transfer_count = 0;
    understand(kernel, channel, (unsigned)ncclDevWorkBatch_funcId(batch));
    for (;;) {
        add_works(kernel, channel, batch);
        size_t jump = ncclDevWorkBatch_nextJump(batch);
        bool extends = ncclDevWorkBatch_nextExtends(batch);
        batch = jump != 0 ? batch + jump : NULL;
        if (!extends)
            break;
    }
    channel->batch = batch;
    return true;
}

/* The channel's end towards a peer.  Collectives use a peer's connection 0, sends and receives its 1. */
static struct end end_at(const struct kernel *kernel, const struct channel *channel, int peer, bool send,
                         enum protocol protocol) {
    struct ncclDevChannelPeer *found = kernel->comm->channels[channel->number].peers[peer];
    int index = channel->is_p2p ? 1 : 0;
    struct ncclConnInfo *info = send ? &found->send[index] : &found->recv[index];
    if (info->buffs[protocol] == NULL || info->netDeviceHandle_netDeviceType != 0)
        double_fail("unsupported kernel %s: a connection without buffers of its protocol", kernel->name);
    return (struct end){.connection = info};
}

static struct passage new_passage(const struct kernel *kernel, enum protocol protocol, struct arithmetic how) {
    return (struct passage){
        .protocol = protocol,
        .how = how,
        .slices_per_chunk = 1,
        .steps_per_slice = 1,
        .step_elements = (size_t)kernel->comm->buffSizes[PROTOCOL_SIMPLE] / NCCL_STEPS / element_bytes(how.element),
        .step_lines = (size_t)kernel->comm->buffSizes[PROTOCOL_LL] / NCCL_STEPS / LINE_BYTES,
    };
}

/* The channel's part of a collective work: its first channel, its last and those between have shares of
 * three sizes (public source: device.h, ncclCollCbdPart). */
static struct collective_work share_of(const struct kernel *kernel, const struct channel *channel,
                                       const struct ncclDevWorkColl *work) {
    const struct ncclRing *ring = &kernel->comm->channels[channel->number].ring;
    size_t width = element_bytes(channel->how.element);
    size_t grain = (channel->protocol == PROTOCOL_LL ? GRAIN_BYTES_LL : GRAIN_BYTES_SIMPLE) / width;
    int lo = (int)ncclDevWorkColl_channelLo(work), hi = (int)ncclDevWorkColl_channelHi(work), at = channel->number;
    size_t middles = hi > lo ? (size_t)(hi - lo - 1) : 0;
    struct collective_work share = {
        .collective = channel->collective,
        .input = work->sendbuff,
        .output = work->recvbuff,
        .element_size = width,
        .count = work->cbd_countLo + (hi > lo ? work->cbd_countMid * middles + work->cbd_countHi : 0),
        .ranks = ring->userRanks,
        .ring_index = ring->index,
        .rank_count = kernel->comm->nRanks,
        .root = (int)work->root,
    };
    if (at == lo) {
        share.part_count = work->cbd_countLo;
        share.chunk_count = ncclDevWorkColl_cbd_chunkGrainsLo(work) * grain;
    } else if (at == hi) {
        share.part_offset = work->cbd_countLo + middles * work->cbd_countMid;
        share.part_count = work->cbd_countHi;
        share.chunk_count = ncclDevWorkColl_cbd_chunkGrainsHi(work) * grain;
    } else {
        share.part_offset = work->cbd_countLo + (size_t)(at - lo - 1) * work->cbd_countMid;
        share.part_count = work->cbd_countMid;
        share.chunk_count = ncclDevWorkColl_cbd_chunkGrainsMid(work) * grain;
    }
    if (share.chunk_count == 0 && share.part_count > 0)
        double_fail("%s: a work without chunk size", kernel->name);
    return share;
}

static void add_transfer(const struct kernel *kernel, struct channel *channel, struct transfer *transfer) {
    if (channel->transfer_count == TRANSFERS_MAX)
        double_fail("%s: more than %d transfers at once on a channel", kernel->name, TRANSFERS_MAX);
    passage_begin(&transfer->passage);
    channel->transfers[channel->transfer_count++] = *transfer;
}

static void add_ring(const struct kernel *kernel, struct channel *channel, struct transfer transfer) {
    const struct ncclRing *ring = &kernel->comm->channels[channel->number].ring;
    struct passage *passage = &transfer.passage;
    passage->slices_per_chunk = ring_slices_per_chunk(channel->collective);
    passage->steps_per_slice = ring_steps_per_slice(channel->collective);
    passage->from[passage->from_count++] = end_at(kernel, channel, ring->prev, false, channel->protocol);
    passage->to[passage->to_count++] = end_at(kernel, channel, ring->next, true, channel->protocol);
    add_transfer(kernel, channel, &transfer);
}

static void add_tree(const struct kernel *kernel, struct channel *channel, struct transfer transfer, enum leg leg) {
    const struct ncclTree *tree = &kernel->comm->channels[channel->number].tree;
    struct passage *passage = &transfer.passage;
    transfer.collective.leg = leg;
    for (int i = 0; i < FAN_MAX && tree->down[i] != -1; i++) {
        transfer.collective.children++;
        if (leg != LEG_TREE_DOWN)
            passage->from[passage->from_count++] = end_at(kernel, channel, tree->down[i], false, channel->protocol);
        if (leg != LEG_TREE_UP)
            passage->to[passage->to_count++] = end_at(kernel, channel, tree->down[i], true, channel->protocol);
    }
    if (leg == LEG_TREE_UP)
        passage->to[passage->to_count++] = end_at(kernel, channel, tree->up, true, channel->protocol);
    if (leg == LEG_TREE_DOWN)
        passage->from[passage->from_count++] = end_at(kernel, channel, tree->up, false, channel->protocol);
    add_transfer(kernel, channel, &transfer);
}

static void open_collective(const struct kernel *kernel, struct channel *channel, const struct ncclDevWorkColl *work) {
    if (ncclDevWorkColl_regUsed(work) || ncclDevWorkColl_netRegUsed(work))
        double_fail("unsupported kernel %s: registered user buffers", kernel->name);
    struct arithmetic how = channel->how;
    how.argument = work->redOpArg;
    if (ncclDevWorkColl_redOpArgIsPtr(work)) {
        how.argument = 0;
        memcpy(&how.argument, (const void *)(uintptr_t)work->redOpArg, element_bytes(how.element));
    }
    struct transfer transfer = {
        .collective = share_of(kernel, channel, work),
        .passage = new_passage(kernel, channel->protocol, how),
    };
    if (!channel->is_tree)
        add_ring(kernel, channel, transfer);
    else if (kernel->comm->channels[channel->number].tree.up == -1)
        add_tree(kernel, channel, transfer, LEG_TREE_ROOT);
    else {
        add_tree(kernel, channel, transfer, LEG_TREE_UP);
        add_tree(kernel, channel, transfer, LEG_TREE_DOWN);
    }
}

static void open_p2p(const struct kernel *kernel, struct channel *channel, const struct ncclDevWorkP2p *work) {
    for (int send = 0; send < 2; send++) {
        struct transfer transfer = {.is_p2p = true};
        bool copied;
        if (!p2p_open(work, send, channel->number, kernel->comm->rank, kernel->name, &transfer.p2p, &copied) || copied)
            continue;
        struct passage *passage = &transfer.passage;
        *passage = new_passage(kernel, transfer.p2p.protocol, channel->how);
        passage->step_elements = (size_t)kernel->comm->p2pChunkSize;
        int peer = send ? work->sendRank : work->recvRank;
        struct end end = end_at(kernel, channel, peer, send, transfer.p2p.protocol);
        if (send)
            passage->to[passage->to_count++] = end;
        else
            passage->from[passage->from_count++] = end;
        add_transfer(kernel, channel, &transfer);
    }
}

/* ---- playing ---- */

static bool chunk_of(const struct transfer *transfer, struct chunk *chunk) {
    if (transfer->is_p2p)
        return p2p_chunk(&transfer->p2p, transfer->next_chunk, chunk);
    if (transfer->collective.leg == LEG_RING)
        return ring_chunk(&transfer->collective, transfer->next_chunk, chunk);
    return tree_chunk(&transfer->collective, transfer->next_chunk, chunk);
}

static void play_transfer(struct transfer *transfer, bool *moved) {
    struct chunk chunk;
    for (;;) {
        if (!chunk_of(transfer, &chunk))
            break;
        if (!passage_chunk(&transfer->passage, &chunk, moved))
            return;
        transfer->next_chunk++;
    }
    passage_end(&transfer->passage);
    transfer->done = true;
    *moved = true;
}

/* Move one channel as far as it goes; false when it has nothing left. */
static bool play_channel(const struct kernel *kernel, struct channel *channel, bool *moved) {
    for (;;) {
        bool waiting = false;
        for (size_t i = 0; i < channel->transfer_count; i++) {
            if (!channel->transfers[i].done)
                play_transfer(&channel->transfers[i], moved);
            waiting |= !channel->transfers[i].done;
        }
        if (waiting)
            return true;
        channel->transfer_count = 0;
        if (channel->next_work == channel->work_count && !next_batch(kernel, channel))
            return false;
        if (channel->is_p2p)
            while (channel->next_work < channel->work_count)
                open_p2p(kernel, channel, (const void *)channel->works[channel->next_work++]);
        else if (channel->next_work < channel->work_count)
            open_collective(kernel, channel, (const void *)channel->works[channel->next_work++]);
    }
}

void kernel_run(struct kernel *kernel) {
    size_t left = kernel->channel_count, idle_rounds = 0;
    while (left > 0) {
        bool moved = false;
        left = 0;
        for (size_t i = 0; i < kernel->channel_count; i++)
            left += play_channel(kernel, &kernel->channels[i], &moved);
        if (moved) {
            idle_rounds = 0;
            continue;
        }
        if (__atomic_load_n(kernel->comm->abortFlag, __ATOMIC_ACQUIRE) != 0) {
            double_log("kernel %s aborted by its communicator", kernel->name);
            return;
        }
        if (++idle_rounds < IDLE_ROUNDS_BEFORE_SLEEP)
            sched_yield();
        else
            nanosleep(&(struct timespec){.tv_nsec = IDLE_SLEEP_NS}, NULL);
    }
}

struct kernel *kernel_new(const char *mangled, const void *arguments, size_t size_bytes) {
    struct kernel *kernel = calloc(1, sizeof *kernel);
    const struct ncclDevKernelArgs *head = arguments;
    const char *name = strstr(mangled, "ncclDevKernel_"), *end = strstr(mangled, "24ncclDevKernelArgsStorage");
    if (name == NULL || size_bytes < sizeof *head)
        double_fail("unsupported kernel %s", mangled);
    if (kernel == NULL || (kernel->arguments = malloc(size_bytes)) == NULL ||
        (kernel->name = strndup(name, end != NULL ? (size_t)(end - name) : strlen(name))) == NULL)
        double_fail("out of memory");
    memcpy(kernel->arguments, arguments, size_bytes);
    kernel->mangled = mangled;
    kernel->arguments_bytes = size_bytes;
    kernel->comm = head->comm;
    kernel->channel_count = (size_t)__builtin_popcountll(head->channelMask);
    kernel->channels = calloc(kernel->channel_count, sizeof *kernel->channels);
    if (kernel->channels == NULL)
        double_fail("out of memory");
    /* The first batch of the n-th channel in the mask is the n-th batch. */
    const struct ncclDevWorkBatch *batches = (const void *)(kernel->arguments + sizeof *head);
    size_t n = 0;
    for (uint64_t mask = head->channelMask; mask != 0; mask &= mask - 1, n++) {
        kernel->channels[n].number = __builtin_ctzll(mask);
        kernel->channels[n].batch = &batches[n];
    }
    return kernel;
}

const char *kernel_name(const struct kernel *kernel) {
    return kernel->name;
}

struct kernel *kernel_again(const struct kernel *kernel) {
    return kernel_new(kernel->mangled, kernel->arguments, kernel->arguments_bytes);
}

void kernel_free(struct kernel *kernel) {
    free(kernel->channels);
    free(kernel->arguments);
    free(kernel->name);
    free(kernel);
}
