/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What the kernel side of the NCCL probes shares with probes/nccl/records/calls.py: every struct here stands there once
 * more as a numpy dtype, and both sides assert its size.
 */
#ifndef RAILSCOPE_NCCL_H
#define RAILSCOPE_NCCL_H

#include <linux/types.h>

/*
 * Declares a function that the verifier looks at once for each program.  A static one it follows anew from every place
 * and every turn of a loop that calls it, in each state that leads there, which was nine tenths of the time that
 * loading took.  Such a function knows nothing of what it is given: it checks its pointers, it copies a key before a
 * helper takes it, which older kernels insist on, and what they point to has no byte that was not written.
 */
#ifndef VERIFIED_ONCE
#define VERIFIED_ONCE __attribute__((noinline))
#endif
#ifndef ALL_INLINED
#define ALL_INLINED 0
#endif

#define OP_COUNT 16
#define OP_SIGNAL 13
#define OP_WAIT_SIGNAL 14
#define OP_UNKNOWN 15
#define DATA_TYPE_UNKNOWN 15
#define UNIQUE_ID_BYTES 128
#define NO_PEER (-1)
#define NO_OFFSET 0xffffffffU
#define COMMUNICATOR_MAGIC 0x0280028002800280ULL /* NCCL_MAGIC, src/include/comm.h, 2.21 to 2.32 */
#define MOST_GPUS 1024 /* of one host */
#define UNREADABLE_PROCESSES 1024 /* that are told apart */

/*
 * Attach cookie of a collective's entry point.  A place is 0-7: argument register; 8-14: stack slot, counted from
 * the first stack argument; 15: the function has no such argument.
 */
#define COOKIE_OP(c) ((__u32)(c) & 0xff)
#define COOKIE_PLACE(c, shift) ((__u32)((c) >> (shift)) & 0xf)
#define PLACE_COMM 8
#define PLACE_COUNT 12
#define PLACE_DATA_TYPE 16
#define PLACE_PEER 20
#define PLACE_STREAM 24
#define PLACE_NONE 15
#define PLACE_STACK 8
#define COOKIE_IS_INFO(c) (((c) >> 28) & 1) /* the first argument is a struct ncclInfo* */
#define COOKIE_LIBRARY(c) ((__u32)((c) >> 32) & 0xffff)
#define COOKIE_STACK_BYTES(c) ((__u32)((c) >> 48)) /* what the prologue pushed before the probed instruction */

/* Cookie of a lifecycle function: same places, other meanings. */
#define COOKIE_KIND(c) ((__u32)(c) & 0xff)
#define PLACE_NEW_COMM 8 /* ncclComm_t*: where the new communicator will be stored */
#define PLACE_RANKS 12
#define PLACE_RANK 16
#define PLACE_PARENT 20 /* ncclComm_t: the parent, or the communicator that ends */
#define PLACE_UNIQUE_ID 24
#define COOKIE_ID_BY_VALUE(c) (((c) >> 28) & 1)

enum lifecycle_kind {
	LIFECYCLE_SEEN = 0, /* first seen at an operation: it was made before the probes came */
	LIFECYCLE_CONFIRMED = 1, /* identity filled in after the init call had returned (non-blocking, grouped) */
	LIFECYCLE_INIT = 2,
	LIFECYCLE_INIT_ALL = 3,
	LIFECYCLE_SPLIT = 4,
	LIFECYCLE_SHRINK = 5,
	LIFECYCLE_GROW = 6,
	LIFECYCLE_FINALIZE = 7,
	LIFECYCLE_DESTROY = 8,
	LIFECYCLE_ABORT = 9,
	LIFECYCLE_REVOKE = 10,
	LIFECYCLE_SUSPEND = 11,
	LIFECYCLE_RESUME = 12,
	/* Of calls under way only: nothing begins or ends with them, so that no event has them; but the last one. */
	LIFECYCLE_CONNECT = 13, /* ranks are connected, inside an operation's call, a group's end or an init */
	LIFECYCLE_INIT_WORK = 14, /* an init, split, shrink or grow in a group, or without blocking: on its own thread */
	LIFECYCLE_WINDOW = 15, /* memory is registered with all ranks */
	LIFECYCLE_DEVICE_COMM = 16, /* ranks agree on what kernels call themselves (device API, GIN); an event at its return */
};

/* Runs are counted where they are for a process that is observed: what these cost is held against a budget. */
enum stat {
	STAT_CALLS, /* runs of the collective program at entry */
	STAT_RETURNS, /* runs at return */
	STAT_LIFECYCLE, /* runs of the lifecycle programs */
	STAT_RING_FULL, /* events lost: the reader was too slow */
	STAT_LIFECYCLE_RING_FULL,
	STAT_AGGREGATES_FULL, /* calls counted in overflow_totals only */
	STAT_COMMUNICATORS_FULL,
	STAT_ARGUMENTS_UNREADABLE, /* struct ncclInfo or stack argument not resident */
	STAT_FOREIGN_PID_NAMESPACE,
	STAT_FILTERED, /* runs of any program for others */
	STAT_HOST_CALLS_FULL, /* calls that are not followed */
	STAT_SHARE_USED_UP, /* entries and records that a user did not get: `refused` says who, and of which table */
	STAT_COUNT,
};

/* In whose share an entry or a record is (shares.h); it stands last. */
struct owner {
	__u32 uid;
	__u32 tgid;
};

/* One call. */
struct call_event {
	__u64 time_ns; /* CLOCK_MONOTONIC at entry */
	__u64 comm; /* communicator's address in its process */
	__u64 stream; /* 0: not known; a stream on the stack is not worth its reading */
	__u64 payload_bytes;
	__u32 tgid;
	__u32 tid;
	__u32 instance;
	__u32 sequence; /* nth operation of this communicator, low 32 bits */
	__s32 peer; /* peer of Send and Recv, root of rooted operations, else -1 */
	__u8 op;
	__u8 data_type;
	__u16 library;
};

/* A call on its way to the reader: one cache line.  Finished when the stamp is its number in the ring, from 1. */
struct call_slot {
	struct call_event event;
	__u64 stamp;
};

/* How far a ring of slots has got; a cache line of its own. */
struct call_ring {
	__u64 reserved; /* slots given to writers so far */
	__u64 taken; /* by the reader, who writes it */
	__u64 unused[6];
};

/* Whose records wait in the crowded part of a ring; tgid 0: all of a user's. */
struct crowd_key {
	__u32 uid;
	__u32 tgid;
	__u32 ring;
	__u32 reserved;
};

struct crowd {
	__u64 taken; /* `taken` of the ring when this was counted: with the next reading it begins anew */
	__u64 records;
};

/* Exact counts: one entry per combination, per CPU. */
struct aggregate_key {
	__u32 tgid;
	__u32 instance; /* 0: no communicator could be told */
	__s32 peer;
	__u8 op;
	__u8 data_type;
	__u8 size_bucket; /* payload in (2^(b-1), 2^b]; 0: up to one byte */
	__u8 reserved;
};

struct aggregate {
	__u64 calls;
	__u64 payload_bytes;
};

/* In the hash. */
struct hashed_aggregate {
	struct aggregate total;
	__u32 uid; /* in whose share the entry is; on other CPUs than the one that made it 0 */
	__u32 reserved;
};

/* Calls of a process whose arguments could not be read. */
struct unreadable {
	__u64 calls;
	__u32 uid; /* in whose share the entry is */
	__u32 tgid;
};

/* Tables that are shared out (shares.h). */
#define SHARED_COMMUNICATORS 0
#define SHARED_AGGREGATES 1
#define SHARED_HOST_CALLS 2
#define SHARED_SHAPES 3
#define SHARED_CONNECTIONS 4
#define SHARED_OPERATIONS 5
#define SHARED_PARTS 6
#define SHARED_HISTORIES 7
#define SHARED_SENT 8
#define SHARED_LAUNCHES 9
#define SHARED_CUDA_COMMUNICATORS 10
#define SHARED_CUDA_STREAMS 11
#define SHARED_CUDA_MARKS 12
#define SHARED_CUDA_PROCESSES 13
#define SHARED_CUDA_RANGES 18
#define SHARED_DRIVER_THREADS 19
/* Rings are shared out as tables are: a record holds a place until it is read. */
#define SHARED_LIFECYCLE_EVENTS 14
#define SHARED_COMPLETION_EVENTS 15
#define SHARED_ERROR_EVENTS 16
#define SHARED_CALL_EVENTS 17
#define SHARED_FAILOVER_EVENTS 20
/* Calls under way, by thread, and what is kept of failures. */
#define SHARED_ERROR_CALLS 21
#define SHARED_ASYNC_RESULTS 22
#define SHARED_FAILOVER_CALLS 23
#define SHARED_FAILED_OVER 24
#define SHARED_CUDA_CALLS 25
#define SHARED_CALLS_UNDER_WAY 26
/* Of other libraries' transfers. */
#define SHARED_TRANSFER_THREADS 27
#define SHARED_TRANSFER_TOTALS 28
#define SHARED_TRANSFER_REQUESTS 29
#define SHARED_TRANSFER_PEERS 30
#define SHARED_UNREADABLE_CALLS 31
#define SHARED_TABLES 32 /* a power of two */
#define NOBODY 0xffffffffU /* no user's number */

/* tgid 0: a user's whole share.  Of uid NOBODY: 0 everybody's, 1 that of users for whom there was no room. */
struct share_key {
	__u32 uid; /* who answers for the process: answerable.h */
	__u32 tgid;
};

struct share {
	__u64 taken[SHARED_TABLES]; /* entries made */
	__u64 refused[SHARED_TABLES]; /* calls that got no entry because the share was used up; of users only */
	__u64 entries; /* all of `taken` together; of processes only */
};

struct share_freed {
	__u64 freed[SHARED_TABLES]; /* entries that were taken out since */
};

struct call_under_way {
	__u64 start_ns;
	__u32 op;
	__u32 uid;
	__u32 tgid;
	__u32 reserved;
};

/* Slots of tables that are searched by one multiplication: Knuth's, with the golden ratio of 2^64. */
#define HASH_FACTOR 0x9e3779b97f4a7c15ULL
#define AGGREGATE_SLOT_BITS 12
#define COMMUNICATOR_SLOT_BITS 11
#define SHAPES_BITS 11
#define WITHOUT_SHAPES (1U << 30) /* in the number of a communicator whose collectives are not kept */
#define BLOCK_BITS 6 /* collectives of the smallest block that has a signature, as a power of two */
#define BLOCK_LEVELS 15 /* lengths of blocks, each twice the one before */

/* An aggregate_key in two words and its counts. */
struct aggregate_slot {
	__u64 owner; /* tgid, and instance in the upper half; 0: free */
	__u64 kind; /* peer, op, data_type, size_bucket and 1, as in aggregate_key; 0: not there yet */
	__u64 calls;
	__u64 payload_bytes;
};

struct enqueue_time {
	__u64 calls;
	__u64 sum_ns;
	__u64 buckets[32]; /* i: up to 2^(7+i) ns; the last one has no bound */
};

struct identity {
	__u64 comm_hash;
	__s64 bus_id;
	__s32 rank;
	__s32 nranks;
	__s32 cuda_dev;
	__s32 nvml_dev;
	__s32 node;
	__s32 n_nodes;
	__s32 local_rank;
	__s32 local_ranks;
};

struct communicator_key {
	__u64 comm;
	__u32 tgid;
	__u32 reserved;
};

struct communicator {
	__u64 sequence; /* operations so far; in its slot while it has one, like last_ns */
	__u64 first_ns;
	__u64 last_ns; /* last operation */
	__u64 destroyed_ns; /* 0: alive */
	__u64 empty_first; /* the latest collectives in a row without an element, by number: NCCL discards them */
	__u64 empty_last; /* 0: there were none */
	__u32 instance; /* unique while the programs are loaded; in no order (shapes.h) */
	__u16 library;
	__u8 confirmed; /* identity was read and its magics held */
	__u8 attempts;
	struct identity identity;
	__u32 uid; /* in whose share the entry is */
	__u32 reserved;
};

struct communicator_slot {
	__u64 comm; /* 0: free, or its communicator is not settled */
	__u32 tgid;
	__u32 instance; /* 0: free */
	__u64 sequence;
	__u64 last_ns;
};

/* The latest collectives of a communicator, and the signatures of full blocks of them (shapes.h). */
struct call_shapes {
	__u32 instance; /* 0: free */
	__u32 unnumbered; /* operations that not all ranks make: a collective's number is its call's less these */
	__u64 closed[BLOCK_LEVELS]; /* by length: of the last full block, its signature, and below it where it ended */
	__u64 shapes[1 << BLOCK_BITS]; /* payload, root (16 bits), data type (4), op (4), by number less 1 */
};

/* Who has such a place, and how often it was given: part of its communicators' numbers. */
struct shapes_place {
	__u32 given;
	__u32 reserved;
	struct owner owner;
};

struct lifecycle_event {
	__u64 time_ns;
	__u64 comm;
	__u64 parent;
	__u32 tgid;
	__u32 tid;
	__u32 instance;
	__u32 kind;
	__s32 result; /* ncclResult_t of the call; 7 is "in progress" */
	__s32 nranks; /* as given to the init call, -1 if the call has none */
	__s32 rank;
	__u16 library;
	__u8 confirmed;
	__u8 has_unique_id;
	struct identity identity;
	__u8 unique_id[UNIQUE_ID_BYTES];
	struct owner owner;
};

/* A call under way that makes, ends or connects communicators, by its thread. */
struct host_call {
	__u64 start_ns; /* CLOCK_MONOTONIC at entry */
	__u64 stack; /* the stack pointer at entry */
	__u64 task; /* the thread, as the kernel addresses it: numbers are used again */
	__u64 comm; /* what it works on, or splits, shrinks or grows; 0: it makes one of nothing */
	__u64 new_comm; /* where the pointer of a new one will be stored */
	__u32 tgid;
	__u32 uid; /* in whose share the entry is */
	__u32 instance; /* of comm; 0: not known */
	__s32 nranks; /* as given to the call, -1: it is not */
	__s32 rank;
	__u16 library;
	__u8 kind;
	__u8 has_unique_id;
	__u8 unique_id[UNIQUE_ID_BYTES];
};

/* Offsets in struct ncclComm of one library; NO_OFFSET where not known. */
struct comm_layout {
	__u32 known;
	__u32 start_magic;
	__u32 end_magic;
	__u32 comm_hash;
	__u32 rank;
	__u32 nranks;
	__u32 cuda_dev;
	__u32 nvml_dev;
	__u32 bus_id;
	__u32 node;
	__u32 n_nodes;
	__u32 local_rank;
	__u32 local_ranks;
};

#define ASSERT_SIZE(type, size) _Static_assert(sizeof(struct type) == (size), #type " is not " #size " bytes")
ASSERT_SIZE(owner, 8);
ASSERT_SIZE(call_event, 56);
ASSERT_SIZE(call_slot, 64);
ASSERT_SIZE(call_ring, 64);
ASSERT_SIZE(crowd_key, 16);
ASSERT_SIZE(crowd, 16);
ASSERT_SIZE(aggregate_key, 16);
ASSERT_SIZE(aggregate, 16);
ASSERT_SIZE(hashed_aggregate, 24);
ASSERT_SIZE(unreadable, 16);
ASSERT_SIZE(share_key, 8);
ASSERT_SIZE(share, 520);
ASSERT_SIZE(share_freed, 256);
ASSERT_SIZE(call_under_way, 24);
ASSERT_SIZE(aggregate_slot, 32);
ASSERT_SIZE(enqueue_time, 272);
ASSERT_SIZE(identity, 48);
ASSERT_SIZE(communicator_key, 16);
ASSERT_SIZE(communicator, 112);
ASSERT_SIZE(communicator_slot, 32);
ASSERT_SIZE(call_shapes, 640);
ASSERT_SIZE(shapes_place, 16);
ASSERT_SIZE(lifecycle_event, 240);
ASSERT_SIZE(host_call, 192);
ASSERT_SIZE(comm_layout, 52);

#endif
