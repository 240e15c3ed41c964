/* Communicators: made from a unique id or from another communicator, asked, and taken apart. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "internal.h"

static ncclComm_t comm_allocate(int rank, int nranks, int device) {
    ncclComm_t comm = calloc(1, sizeof *comm);
    if (comm == NULL || (comm->records = calloc((size_t)nranks, sizeof *comm->records)) == NULL) {
        free(comm);
        return NULL;
    }
    comm->startMagic = comm->magic = comm->endMagic = COMM_MAGIC;
    comm->rank = rank;
    comm->nRanks = nranks;
    comm->cudaDev = comm->nvmlDev = device;
    comm->busId = (int64_t)(device + 0x10) << 12; /* 0000:10:00.0 and on: made up, there is no such device */
    return comm;
}

static void comm_free(ncclComm_t comm) {
    peers_disconnect(comm);
    exchange_memory_free(comm->memory);
    free(comm->scratch);
    free(comm->records);
    /* Whoever still uses it is told so instead of being believed. */
    comm->startMagic = comm->magic = comm->endMagic = 0;
    free(comm);
}

/* Hosts are numbered by their first rank. */
static void find_places(ncclComm_t comm) {
    int nodes = 0;
    comm->localRanks = comm->localRank = 0;
    for (int rank = 0; rank < comm->nRanks; rank++) {
        uint64_t host = comm->records[rank].host_hash;
        bool first = true, mine = host == comm->records[comm->rank].host_hash;
        for (int before = 0; before < rank && first; before++)
            first = comm->records[before].host_hash != host;
        if (first && mine)
            comm->node = nodes;
        nodes += first;
        comm->localRank += mine && rank < comm->rank;
        comm->localRanks += mine;
    }
    comm->nNodes = nodes;
}

/* With everybody's records at hand: connect to all and start working. */
static ncclResult_t comm_open(ncclComm_t comm, const struct listeners *listeners) {
    find_places(comm);
    ncclResult_t result = peers_connect(comm, listeners);
    return result == ncclSuccess ? queue_start(comm) : result;
}

static int device_from_environment(void) {
    const char *local_rank = getenv("LOCAL_RANK");
    return local_rank != NULL ? atoi(local_rank) : 0;
}

struct init { /* what the thread of a grouped init needs */
    ncclComm_t comm;
    ncclUniqueId id;
    ncclResult_t *result;
};

static ncclResult_t init_run(struct init *init) {
    ncclComm_t comm = init->comm;
    struct listeners listeners;
    struct rank_record mine = {.host_hash = host_hash(), .rank = comm->rank};
    ncclResult_t result = rails_find();
    if (result != ncclSuccess)
        return result;
    result = listeners_open(&listeners, &mine);
    if (result == ncclSuccess)
        result = bootstrap_meet(&init->id, comm->nRanks, &mine, comm->records);
    if (result == ncclSuccess)
        result = comm_open(comm, &listeners);
    listeners_close(&listeners);
    return result;
}

static void *init_thread(void *argument) {
    struct init *init = argument;
    *init->result = init_run(init);
    free(init);
    return NULL;
}

/* In a group one thread may make several communicators that wait for each other, so each gets a thread. */
static ncclResult_t init_in_group(const struct init *init) {
    struct init *own = malloc(sizeof *own);
    ncclResult_t *result = calloc(1, sizeof *result);
    pthread_t thread;
    if (own == NULL || result == NULL) {
        free(own);
        free(result);
        return fail(ncclSystemError, "out of memory");
    }
    *own = *init;
    own->result = result;
    if (pthread_create(&thread, NULL, init_thread, own) != 0) {
        free(own);
        free(result);
        return fail(ncclSystemError, "cannot start a thread");
    }
    return group_add_init(thread, result);
}

static ncclResult_t comm_init(ncclComm_t *comm, int nranks, const ncclUniqueId *id, int rank, int device) {
    if (comm == NULL || nranks < 1 || nranks > MAXIMUM_RANKS || rank < 0 || rank >= nranks)
        return fail(ncclInvalidArgument, "ncclCommInitRank: rank %d of %d", rank, nranks);
    struct init init = {.comm = comm_allocate(rank, nranks, device), .id = *id};
    if (init.comm == NULL)
        return fail(ncclSystemError, "out of memory for a communicator");
    init.comm->commHash = hash_bytes(id->internal, sizeof id->internal, 0);
    if (group_open()) {
        *comm = init.comm; /* usable after ncclGroupEnd */
        return init_in_group(&init);
    }
    ncclResult_t result = init_run(&init);
    if (result != ncclSuccess) {
        comm_free(init.comm);
        *comm = NULL;
        return result;
    }
    *comm = init.comm;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    return id != NULL ? bootstrap_create(id) : fail(ncclInvalidArgument, "ncclGetUniqueId: id is NULL");
}
STRONG_TWIN(ncclGetUniqueId);

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank) {
    return comm_init(comm, nranks, &id, rank, device_from_environment());
}
STRONG_TWIN(ncclCommInitRank);

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank, ncclConfig_t *config) {
    (void)config;
    return comm_init(comm, nranks, &id, rank, device_from_environment());
}
STRONG_TWIN(ncclCommInitRankConfig);

/* Only the first id is used: one meeting place is enough for the few ranks of a testbed. */
ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int nranks, int rank, int id_count, ncclUniqueId *ids,
                                      ncclConfig_t *config) {
    (void)config;
    if (ids == NULL || id_count < 1)
        return fail(ncclInvalidArgument, "ncclCommInitRankScalable: no unique id");
    return comm_init(comm, nranks, &ids[0], rank, device_from_environment());
}
STRONG_TWIN(ncclCommInitRankScalable);

ncclResult_t ncclCommInitAll(ncclComm_t *comms, int device_count, const int *devices) {
    ncclUniqueId id;
    if (comms == NULL || device_count < 1)
        return fail(ncclInvalidArgument, "ncclCommInitAll: %d devices", device_count);
    ncclResult_t result = bootstrap_create(&id);
    if (result != ncclSuccess)
        return result;
    ncclGroupStart();
    for (int i = 0; i < device_count && result == ncclSuccess; i++)
        result = comm_init(&comms[i], device_count, &id, i, devices != NULL ? devices[i] : i);
    ncclResult_t ended = ncclGroupEnd();
    return result != ncclSuccess ? result : ended;
}
STRONG_TWIN(ncclCommInitAll);

/* Everybody's colour, key and listeners travel round the parent's ring, and each takes those of its own colour. */
static ncclResult_t split_members(ncclComm_t parent, const struct rank_record *all, ncclComm_t *child) {
    const struct rank_record *mine = &all[parent->rank];
    int nranks = 0, rank = 0;
    for (int other = 0; other < parent->nRanks; other++) {
        if (all[other].color != mine->color)
            continue;
        nranks++;
        rank += all[other].key < mine->key || (all[other].key == mine->key && other < parent->rank);
    }
    ncclComm_t comm = comm_allocate(rank, nranks, parent->cudaDev);
    if (comm == NULL)
        return fail(ncclSystemError, "out of memory for a communicator");
    for (int other = 0; other < parent->nRanks; other++) {
        if (all[other].color != mine->color)
            continue;
        int place = 0;
        for (int before = 0; before < parent->nRanks; before++)
            place += all[before].color == mine->color &&
                     (all[before].key < all[other].key || (all[before].key == all[other].key && before < other));
        comm->records[place] = all[other];
        comm->records[place].rank = place;
    }
    uint64_t seed[2] = {parent->split_count, (uint64_t)(uint32_t)mine->color};
    comm->commHash = hash_bytes(seed, sizeof seed, parent->commHash);
    *child = comm;
    return ncclSuccess;
}

ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t *child, ncclConfig_t *config) {
    (void)config;
    ncclResult_t result = check_comm(parent, "ncclCommSplit");
    if (result != ncclSuccess)
        return result;
    if (child == NULL || (color < 0 && color != NCCL_SPLIT_NOCOLOR) || group_open())
        return fail(ncclInvalidArgument, "ncclCommSplit: colour %d%s", color, group_open() ? ", in a group" : "");
    *child = NULL;
    struct listeners listeners;
    struct rank_record mine = {.host_hash = host_hash(), .rank = parent->rank, .color = color, .key = key};
    struct rank_record *all = calloc((size_t)parent->nRanks, sizeof *all);
    if (all == NULL)
        return fail(ncclSystemError, "out of memory");
    result = listeners_open(&listeners, &mine);
    struct operation gather = {.kind = OP_ALL_GATHER, .send = &mine, .receive = all, .count = sizeof mine,
                               .type = ncclUint8};
    parent->split_count++;
    if (result == ncclSuccess)
        result = run_uncounted(parent, &gather);
    if (result == ncclSuccess && color != NCCL_SPLIT_NOCOLOR) {
        result = split_members(parent, all, child);
        if (result == ncclSuccess && (result = comm_open(*child, &listeners)) != ncclSuccess) {
            comm_free(*child);
            *child = NULL;
        }
    }
    listeners_close(&listeners);
    free(all);
    return result;
}
STRONG_TWIN(ncclCommSplit);

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    ncclResult_t result = check_comm(comm, "ncclCommFinalize");
    return result == ncclSuccess ? workload_comm_synchronize(comm) : result;
}
STRONG_TWIN(ncclCommFinalize);

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    if (comm == NULL)
        return ncclSuccess; /* as in NCCL */
    ncclResult_t result = check_comm(comm, "ncclCommDestroy");
    if (result != ncclSuccess)
        return result;
    queue_leave(comm);
    comm_free(comm);
    return ncclSuccess;
}
STRONG_TWIN(ncclCommDestroy);

ncclResult_t ncclCommAbort(ncclComm_t comm) {
    if (comm == NULL)
        return ncclSuccess;
    ncclResult_t result = check_comm(comm, "ncclCommAbort");
    if (result != ncclSuccess)
        return result;
    atomic_store(&comm->aborted, true);
    peers_shut_down(comm);
    queue_leave(comm);
    comm_free(comm);
    return ncclSuccess;
}
STRONG_TWIN(ncclCommAbort);

ncclResult_t ncclCommCount(ncclComm_t comm, int *count) {
    ncclResult_t result = check_comm(comm, "ncclCommCount");
    if (result == ncclSuccess && count == NULL)
        result = fail(ncclInvalidArgument, "ncclCommCount: count is NULL");
    if (result == ncclSuccess)
        *count = comm->nRanks;
    return result;
}
STRONG_TWIN(ncclCommCount);

ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank) {
    ncclResult_t result = check_comm(comm, "ncclCommUserRank");
    if (result == ncclSuccess && rank == NULL)
        result = fail(ncclInvalidArgument, "ncclCommUserRank: rank is NULL");
    if (result == ncclSuccess)
        *rank = comm->rank;
    return result;
}
STRONG_TWIN(ncclCommUserRank);

ncclResult_t ncclCommCuDevice(ncclComm_t comm, int *device) {
    ncclResult_t result = check_comm(comm, "ncclCommCuDevice");
    if (result == ncclSuccess && device == NULL)
        result = fail(ncclInvalidArgument, "ncclCommCuDevice: device is NULL");
    if (result == ncclSuccess)
        *device = comm->cudaDev;
    return result;
}
STRONG_TWIN(ncclCommCuDevice);

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *result_out) {
    ncclResult_t result = check_comm(comm, "ncclCommGetAsyncError");
    if (result == ncclSuccess && result_out == NULL)
        result = fail(ncclInvalidArgument, "ncclCommGetAsyncError: result is NULL");
    if (result == ncclSuccess)
        *result_out = atomic_load(&comm->asyncResult);
    return result;
}
STRONG_TWIN(ncclCommGetAsyncError);

ncclResult_t workload_agree_minimum(ncclComm_t comm, int64_t *value) {
    ncclResult_t result = check_comm(comm, "workload_agree_minimum");
    struct operation smallest = {.kind = OP_ALL_REDUCE, .send = value, .receive = value, .count = 1,
                                 .type = ncclInt64, .reduction = ncclMin};
    return result == ncclSuccess ? run_uncounted(comm, &smallest) : result;
}

uint64_t workload_comm_hash(ncclComm_t comm) {
    return check_comm(comm, "workload_comm_hash") == ncclSuccess ? comm->commHash : 0;
}
