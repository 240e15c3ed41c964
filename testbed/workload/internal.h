/* How the library's parts fit together.
 *
 *   api.c        entry points of operations: check arguments, hand over to the queue
 *   queue.c      groups, streams, one queue and one worker thread per communicator
 *   rings.c      which bytes go to whom: ring and chain algorithms, on the worker
 *   exchange.c   moves a set of messages at once over the peers' links
 *   reduce.c     arithmetic on elements
 *   comm.c       communicators: create, split, destroy, ask
 *   bootstrap.c  the unique id and the meeting of ranks that it names, and which of them share a host
 *   network.c    rails, sockets, links between ranks
 *   errors.c     result codes and their texts */
#ifndef RAILSCOPE_INTERNAL_H
#define RAILSCOPE_INTERNAL_H

#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "workload.h"

enum {
    MAXIMUM_RAILS = 8,
    MAXIMUM_RANKS = 1024,
    STRIPE_ABOVE_BYTES = 64 << 10, /* operations with more payload per message use all rails */
    QUEUE_TASKS = 1024,            /* NCCL's calls wait, too, when its work queue is full */
    CONNECT_SECONDS = 60,
};

#define COMM_MAGIC 0x0280028002800280ull /* NCCL's own, at both ends of its communicator */

/* Gives a weak ncclX its strong twin at the same address. */
#define STRONG_TWIN(name) extern __typeof__(name) p##name __attribute__((alias(#name), visibility("default")))

/* ---- operations ---- */

enum operation_kind { /* numbered as NCCL's internal ncclFunc_t */
    OP_BROADCAST = 0,
    OP_REDUCE = 1,
    OP_ALL_GATHER = 2,
    OP_REDUCE_SCATTER = 3,
    OP_ALL_REDUCE = 4,
    OP_POINT_TO_POINT = 5, /* sends and receives of one group */
    OP_SEND = 6,
    OP_RECV = 7,
    OP_ALL_TO_ALL = 8,
    OP_SCATTER = 9,
    OP_GATHER = 10,
};

struct operation {
    enum operation_kind kind;
    const void *send;
    void *receive;
    size_t count; /* elements, in the meaning that NCCL's documentation gives to each operation's count */
    ncclDataType_t type;
    ncclRedOp_t reduction;
    int peer; /* root or peer */
    cudaStream_t stream;
};

/* A place in a stream's order. */
struct stream;
struct turn {
    struct stream *stream;
    uint64_t ticket;
};

/* What a worker does in one go: one collective, or a group's sends and receives together. */
struct task {
    struct operation operation;
    struct operation *batch; /* OP_POINT_TO_POINT only, owned */
    int batch_count;
    int turn_count;
    struct turn turn;   /* of a task on one stream, by far the most common */
    struct turn *turns; /* of a batch over several streams, owned */
};

/* ---- links between ranks ---- */

struct stripe;
struct link { /* one socket */
    int fd;
    int rail;                    /* -1: within the host */
    struct stripe *sends, **sends_end; /* still to do, in order; used by exchange.c only */
    struct stripe *receives, **receives_end;
};

struct peer {
    struct link links[MAXIMUM_RAILS]; /* one a rail; to a rank of the same host one local link */
    int link_count;
};

/* What ranks tell each other when they meet. */
struct rank_record {
    uint64_t host_hash;
    int32_t rank;
    int32_t color, key; /* for splits */
    int32_t rail_count;
    struct sockaddr_in listeners[MAXIMUM_RAILS];
    char local_listener[64]; /* abstract unix socket */
};

struct listeners { /* where the peers of one new communicator connect to */
    int rail_fds[MAXIMUM_RAILS];
    int local_fd;
};

/* One message of an exchange. */
struct message {
    int peer;
    bool receive;
    bool striped;
    size_t bytes;
    const char *send; /* sending: from here; receiving with a reduction: combine with these elements */
    char *target;     /* receiving: to here */
    bool reduce;
};

/* ---- the communicator ---- */

/* Field names and their relative order are NCCL's: whoever reads NCCL's debug information for them finds these too. */
struct ncclComm {
    uint64_t startMagic;

    /* the queue; the worker sleeps on `filled`, callers on `drained` */
    pthread_mutex_t lock;
    pthread_cond_t filled, drained;
    struct task tasks[QUEUE_TASKS];
    uint64_t enqueued, completed; /* tasks, ever */
    int sleeping_callers;
    bool worker_sleeps, leaving;
    pthread_t worker;
    bool worker_started;
    atomic_bool aborted;

    struct peer *peers;
    struct rank_record *records;
    int rail_count;
    uint32_t split_count;
    struct exchange_memory *memory; /* kept between exchanges */
    char *scratch;                  /* reductions on their way */
    size_t scratch_bytes;

    uint64_t magic;
    uint64_t commHash;
    int rank;
    int nRanks;
    int cudaDev;
    int nvmlDev;
    int64_t busId;
    int node;
    int nNodes;
    int localRank;
    int localRanks;
    uint64_t opCount;
    _Atomic ncclResult_t asyncResult;
    uint64_t endMagic;
};

/* errors.c */
ncclResult_t fail(ncclResult_t result, const char *format, ...) __attribute__((format(printf, 2, 3)));
ncclResult_t check_comm(ncclComm_t comm, const char *function);

/* reduce.c */
void reduce_elements(void *target, const void *left, const void *right, size_t count, ncclDataType_t type,
                     ncclRedOp_t reduction);
void divide_elements(void *target, size_t count, ncclDataType_t type, int divisor);
bool can_reduce(ncclDataType_t type);

/* network.c */
ncclResult_t rails_find(void); /* once a process; later calls return at once */
int rails_count(void);
void rails_add_bytes(int rail, size_t transmit_bytes, size_t receive_bytes);
ncclResult_t socket_listen(const struct sockaddr_in *address, int *fd, struct sockaddr_in *bound);
ncclResult_t socket_connect(const struct sockaddr_in *from, const struct sockaddr_in *to, int *fd);
ncclResult_t socket_accept(int listener, int *fd);
ncclResult_t socket_write(int fd, const void *data, size_t bytes);
ncclResult_t socket_read(int fd, void *data, size_t bytes);
struct sockaddr_in rail_address(int rail);
ncclResult_t listeners_open(struct listeners *listeners, struct rank_record *record);
void listeners_close(struct listeners *listeners);
ncclResult_t peers_connect(ncclComm_t comm, const struct listeners *listeners);
void peers_disconnect(ncclComm_t comm);
void peers_shut_down(ncclComm_t comm);

/* bootstrap.c */
uint64_t hash_bytes(const void *data, size_t bytes, uint64_t seed);
uint64_t host_hash(void);
ncclResult_t bootstrap_create(ncclUniqueId *id);
ncclResult_t bootstrap_meet(const ncclUniqueId *id, int nranks, const struct rank_record *mine,
                            struct rank_record *all);

/* exchange.c */
ncclResult_t exchange(ncclComm_t comm, enum operation_kind kind, const struct operation *reduction,
                      const struct message *messages, int count);
void exchange_memory_free(struct exchange_memory *memory);

/* rings.c */
ncclResult_t run_task(ncclComm_t comm, const struct task *task);

/* queue.c */
ncclResult_t queue_start(ncclComm_t comm);
void queue_leave(ncclComm_t comm); /* finish what is enqueued, then end the worker */
ncclResult_t enqueue(ncclComm_t comm, const struct operation *operation);
ncclResult_t run_uncounted(ncclComm_t comm, const struct operation *operation);
bool group_open(void);
ncclResult_t group_add_init(pthread_t thread, ncclResult_t *result);

#endif
