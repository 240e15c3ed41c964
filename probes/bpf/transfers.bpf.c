// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Transfers of libraries other than NCCL (UCX, NIXL, MPI, …), at the entries and returns of their public functions: how
 * many, how many bytes, with whom, how long until complete, and what is under way.  Which functions those are, and where
 * their arguments lie, is data: probes/transfers/functions.py, which makes the attach cookies.  An object of its own:
 * loaded when the first such library is mapped.
 *
 * No record is written for a call.  A call costs two look-ups at entry and two at return; one that goes on after its
 * return (a request) an entry of a table, which the function that tells of its end takes out.
 *
 * A call that another one makes in turn on its thread is part of that one: what NIXL or MPI sends through UCX is counted
 * once, as NIXL's or MPI's.
 *
 * Every table is shared out (shares.h).  Who has used up his share keeps his totals in one entry for all peers, then in
 * none; the node's totals by function stay exact (`transfer_overflow`).
 */
#include <linux/bpf.h>
#include <linux/types.h>

#include <bpf/bpf_helpers.h>

#include "nccl.h"

char _license[] SEC("license") = "Dual BSD/GPL";

/* Set by the loader before load, as in nccl.bpf.c. */
const volatile __u64 pid_namespace_device = 0;
const volatile __u64 pid_namespace_inode = 0;
const volatile __u32 only_observed_processes = 0;
const volatile __u32 write_events = 1;
const volatile __u32 sample_shift = 4;
const volatile __u32 communicator_entries = 16384;
const volatile __u32 aggregate_entries = 65536;
const volatile __u32 task_nsproxy = 0;
const volatile __u32 nsproxy_net_ns = 0;
const volatile __u32 net_ns_inum = 0;
#include "answerable.h"
const volatile __u32 transfer_entries = 16384; /* of each table */

#include "arguments.h"
#include "arithmetic.h"
#include "observed.h"
#include "shares.h"
#include "transfers.h"

#define MOST_PARTS 32 /* of a list of buffers; what a longer one holds is not known */
#define MOST_BYTES (1ULL << 47) /* of one operation: more than a process has addresses for is not what it moves */
#define MOST_TOTAL_BYTES (1ULL << 62) /* in one entry: a total that has come so far stands still */
#define MOST_TURNS 4096 /* of a loop: what a longer list holds is not known */
#define UCX_ATTRIBUTE_REQUEST 1
#define UCX_ATTRIBUTE_DATA_TYPE 8
#define UCX_FIRST_ERROR (-256LL) /* ucs_status_t: UCS_ERR_LAST is -100 */
#define UCX_COMPLETED 1 /* UCP_REQUEST_FLAG_COMPLETED */

/* Read by probes/transfers/programs.py. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 16384); /* transfer_entries */
	__type(key, struct transfer_key);
	__type(value, struct transfer_total);
} transfer_totals SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 16384);
	__type(key, struct transfer_request_key);
	__type(value, struct transfer_request);
} transfer_requests SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 16384);
	__type(key, __u32);
	__type(value, struct transfer_thread);
} transfer_threads SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 16384);
	__type(key, struct transfer_peer_key);
	__type(value, struct transfer_peer);
} transfer_peers SEC(".maps");

/* By function: what found no entry in `transfer_totals`. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 256);
	__type(key, __u32);
	__type(value, struct transfer_total);
} transfer_overflow SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, TRANSFER_STAT_COUNT);
	__type(key, __u32);
	__type(value, __u64);
} transfer_stats SEC(".maps");

/* By thread; each is made by one that has an entry in `transfer_threads`, and goes with it: their places serve both. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 16384);
	__type(key, __u32);
	__type(value, struct transfer_waited);
} transfer_waited SEC(".maps");

/* All zero: too large for a program's stack. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct transfer_total);
} fresh_total SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct transfer_waited);
} fresh_waited SEC(".maps");

/* Nothing is in it: bpf_for_each_map_elem() counts its entries, a loop that is verified once (bpf_loop() is of 5.17). */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MOST_TURNS);
	__type(key, __u32);
	__type(value, __u8);
} turns SEC(".maps");

static __always_inline void count_transfer(__u32 stat)
{
	__u64 *value = bpf_map_lookup_elem(&transfer_stats, &stat);

	if (value)
		__sync_fetch_and_add(value, 1);
}

/* What a call does: read at entry. */
struct transfer {
	__u64 bytes;
	__u64 peer;
	__u64 request;
	__u32 function;
	__u16 sized;
	__u16 followed; /* its completion can be seen */
};

/* What bpf_for_each_map_elem() passes. */
#define TURN                                                                                                          \
	__attribute__((unused)) void *map, __attribute__((unused)) const __u32 *turn, __attribute__((unused)) void *nothing

/* The bytes of so many elements, unless no process could hold them: an argument may be anything. */
static __always_inline void size_transfer(struct transfer *transfer, __u64 elements, __u64 unit)
{
	transfer->sized = elements <= MOST_BYTES && (!unit || elements <= MOST_BYTES / unit);
	transfer->bytes = transfer->sized ? elements * unit : 0;
}

/* The bytes of a list of buffers: (address, length) each; returns whether they are known. */
VERIFIED_ONCE int add_parts(struct transfer *transfer, __u64 parts, __u64 count)
{
	__u64 part[2] = {}, total = 0;

	if (!transfer || count > MOST_PARTS)
		return 0;
	for (__u32 i = 0; i < MOST_PARTS && i < count; i++) {
		if (bpf_probe_read_user(part, sizeof(part), (const void *)(parts + i * sizeof(part))))
			return 0;
		if (part[1] > MOST_BYTES)
			return 0;
		total += part[1];
	}
	size_transfer(transfer, total, 1);
	return transfer->sized;
}

/* The leading fields of ucp_request_param_t (ucp.h of UCX 1.10 to 1.22). */
struct ucx_parameters {
	__u32 attributes;
	__u32 flags;
	__u64 request;
	__u64 callback;
	__u64 data_type;
};

/* What a call is given: read before its meaning is. */
struct given {
	__u64 elements, unit, buffer, peer, request;
};

VERIFIED_ONCE int read_given(struct arguments *arguments, __u64 cookie, struct given *given)
{
	if (!arguments || !given)
		return 0;
	given->elements = argument(arguments, COOKIE_PLACE(cookie, PLACE_ELEMENTS));
	given->unit = argument(arguments, COOKIE_PLACE(cookie, PLACE_UNIT));
	given->buffer = argument(arguments, COOKIE_PLACE(cookie, PLACE_BUFFER));
	given->peer = argument(arguments, COOKIE_PLACE(cookie, PLACE_TO));
	given->request = argument(arguments, COOKIE_PLACE(cookie, PLACE_REQUEST));
	return arguments->failed;
}

VERIFIED_ONCE int read_ucx(const struct given *given, __u64 cookie, struct transfer *transfer)
{
	struct ucx_parameters parameters = {};
	__u32 class;

	if (!given || !transfer)
		return 0;
	if (bpf_probe_read_user(&parameters, sizeof(parameters), (const void *)given->unit))
		return 1;
	/* A request in the caller's memory is never freed. */
	transfer->followed = !(parameters.attributes & UCX_ATTRIBUTE_REQUEST);
	if (COOKIE_PLACE(cookie, PLACE_ELEMENTS) == PLACE_NONE)
		return 0;
	class = parameters.attributes & UCX_ATTRIBUTE_DATA_TYPE ? parameters.data_type & 7 : 0;
	if (!(parameters.attributes & UCX_ATTRIBUTE_DATA_TYPE)) {
		size_transfer(transfer, given->elements, 1);
	} else if (class == 0) { /* contiguous */
		size_transfer(transfer, given->elements, parameters.data_type >> 3);
	} else if (class == 2) { /* a list of buffers */
		transfer->sized = add_parts(transfer, given->buffer, given->elements);
	}
	return 0;
}

/* Number of a datatype that is built in: MPIR_Datatype_get_basic_size() of MPICH 3 and 4. */
#define MPICH_BUILT_IN(t) (((t) & 0xff000000U) == 0x4c000000U)
#define MPICH_BYTES(t) ((t) >> 8 & 0xff)
#define OPEN_MPI_SIZE 24 /* opal_datatype_t: its size, behind an object's 16 bytes, flags, id and bdt_used */

VERIFIED_ONCE int read_mpi(const struct given *given, __u64 cookie, struct transfer *transfer)
{
	__u64 elements, type, bytes = 0;

	if (!given || !transfer)
		return 0;
	elements = given->elements;
	type = given->unit;
	if (!COOKIE_COUNTS_ARE_LONG(cookie))
		elements = (__s32)elements; /* of type int: the upper half of the register is anything; below 0 it is too many */
	if (COOKIE_SIZE(cookie) == SIZE_MPICH) {
		if (!MPICH_BUILT_IN((__u32)type))
			return 0;
		bytes = MPICH_BYTES((__u32)type);
	} else if (bpf_probe_read_user(&bytes, sizeof(bytes), (const void *)(type + OPEN_MPI_SIZE))) {
		return 1;
	}
	/* Nothing goes to MPI_PROC_NULL, which is below 0 in each MPI: a neighbour that an edge of a grid lacks. */
	size_transfer(transfer, (__s32)given->peer < 0 ? 0 : elements, bytes);
	return 0;
}

/* nixlDescList: a table of functions, a type, and a vector of descriptors (nixl_descriptors.h of NIXL 0.3 to 1.5). */
struct nixl_list {
	__u64 functions;
	__u32 type;
	__u32 padding;
	__u64 begin;
	__u64 end;
	__u64 room;
};

#define NIXL_INITIATOR 16 /* its list in nixlXferReqH, or a pointer to it before NIXL 1.1 */
#define NIXL_LIST_BYTES sizeof(struct nixl_list)
#define NIXL_TYPES 16
#define NIXL_DESCRIPTOR_BYTES 32 /* nixlMetaDesc: address, length, device, metadata */
#define NIXL_LENGTH 8
#define NIXL_AT_ONCE 4 /* descriptors that are read together */

/* Zero, which the verifier does not know: it cannot follow what it knows back through a callback. */
static __always_inline __u64 unknown_zero(void)
{
	__u32 zero = 0;
	const struct transfer_total *fresh = bpf_map_lookup_elem(&fresh_total, &zero);

	return fresh ? fresh->bytes : 1;
}

/* The sum over a list of descriptors. */
struct nixl_sum {
	__u64 at;
	__u64 count;
	__u64 total;
	__u64 wrong;
};

static long add_descriptors(TURN, struct nixl_sum *sum)
{
	__u64 read[NIXL_AT_ONCE * NIXL_DESCRIPTOR_BYTES / 8] = {};
	__u64 first = (__u64)*turn * NIXL_AT_ONCE, left = sum->count - first;
	const void *at = (const void *)(sum->at + first * NIXL_DESCRIPTOR_BYTES);

	if (first >= sum->count)
		return 1;
	if (bpf_probe_read_user(read, left >= NIXL_AT_ONCE ? sizeof(read) : (left & 3) * NIXL_DESCRIPTOR_BYTES, at)) {
		sum->wrong = 1;
		return 1;
	}
	for (__u32 i = 0; i < NIXL_AT_ONCE; i++) {
		/* What was not read is 0. */
		__u64 length = read[(i * NIXL_DESCRIPTOR_BYTES + NIXL_LENGTH) / 8];

		sum->wrong |= length >> 48;
		sum->total += length;
	}
	return 0;
}

VERIFIED_ONCE int sum_descriptors(struct transfer *transfer, __u64 begin, __u64 count)
{
	struct nixl_sum sum = {.at = begin, .count = count};

	if (!transfer || count > MOST_TURNS)
		return 0;
	sum.total = unknown_zero();
	sum.wrong = unknown_zero();
	bpf_for_each_map_elem(&turns, add_descriptors, &sum, 0);
	if (!sum.wrong)
		size_transfer(transfer, sum.total, 1);
	return transfer->sized;
}

/* The name of a peer, and the number that stands for it: FNV-1a's.  `last`: one that is noted. */
VERIFIED_ONCE __u64 note_peer(__u32 tgid, __u64 text, __u64 length, __u64 last)
{
	struct transfer_peer_key key = {.tgid = tgid};
	struct transfer_peer peer = {};
	__u64 hash = 0xcbf29ce484222325ULL, place;

	if (!length)
		return 0;
	if (length > PEER_NAME_BYTES - 1)
		length = PEER_NAME_BYTES - 1;
	if (bpf_probe_read_user(peer.name, length & (PEER_NAME_BYTES - 1), (const void *)text))
		return 0;
	for (__u32 i = 0; i < PEER_NAME_BYTES / 8; i++)
		hash = (hash ^ ((__u64 *)peer.name)[i]) * 0x100000001b3ULL;
	key.peer = hash;
	if (hash == last || bpf_map_lookup_elem(&transfer_peers, &key))
		return hash;
	place = take_place(answerable(), tgid, SHARED_TRANSFER_PEERS, transfer_entries);
	if (!place)
		return 0;
	peer.uid = (__u32)place;
	if (bpf_map_update_elem(&transfer_peers, &key, &peer, BPF_NOEXIST))
		return_place(peer.uid, tgid, SHARED_TRANSFER_PEERS);
	return hash;
}

/* nixlXferReqH, from its list on: the other agent's list, and its name, a std::string of libstdc++. */
struct nixl_request {
	struct nixl_list initiator;
	__u64 target[NIXL_LIST_BYTES / 8];
	__u64 name[2]; /* its text and its length */
};

/* From its kind of operation on: its total of bytes and of descriptors; each eight bytes further after NIXL 1.5. */
struct nixl_kind {
	__u32 kind;
	__u32 between[8];
	__u64 told[3];
} __attribute__((packed));

/* What a request says of itself: its bytes, where the number of descriptors that stands behind them is right. */
VERIFIED_ONCE int read_nixl_kind(struct transfer *transfer, __u32 kind_at, __u64 count)
{
	struct nixl_kind kind = {};

	if (!transfer)
		return 0;
	if (bpf_probe_read_user(&kind, sizeof(kind), (const void *)(transfer->request + kind_at)))
		return 1;
	if (kind.kind < 2) /* NIXL_READ, NIXL_WRITE */
		transfer->function += 1 + kind.kind;
	if (kind.told[1] == count || kind.told[2] == count)
		size_transfer(transfer, kind.told[1] == count ? kind.told[0] : kind.told[1], 1);
	return 0;
}

VERIFIED_ONCE int read_nixl(struct transfer *transfer, __u32 tgid, __u64 cookie, __u64 last)
{
	struct nixl_request request = {};
	__u64 count;
	int failed = 0;

	if (!transfer)
		return 0;
	if (bpf_probe_read_user(&request, sizeof(request), (const void *)(transfer->request + NIXL_INITIATOR)))
		return 1;
	/* A pointer's lower half is no memory type. */
	if (request.initiator.type >= NIXL_TYPES) {
		__u64 behind = transfer->request + NIXL_INITIATOR + 2 * sizeof(__u64);

		if (bpf_probe_read_user(request.name, sizeof(request.name), (const void *)behind) ||
		    bpf_probe_read_user(&request.initiator, sizeof(request.initiator),
					(const void *)request.initiator.functions) ||
		    request.initiator.type >= NIXL_TYPES)
			return 1;
	}
	transfer->peer = note_peer(tgid, request.name[0], request.name[1], last);
	count = (request.initiator.end - request.initiator.begin) / NIXL_DESCRIPTOR_BYTES;
	if (COOKIE_KIND_AT(cookie))
		failed = read_nixl_kind(transfer, COOKIE_KIND_AT(cookie), count);
	if (!transfer->sized && request.initiator.end >= request.initiator.begin)
		sum_descriptors(transfer, request.initiator.begin, count);
	return failed;
}

/* What Transport::TransferRequest begins with (transport.h of Mooncake 0.3); how long it is depends on the build. */
struct mooncake_request {
	__u32 opcode; /* READ, WRITE */
	__u32 padding;
	__u64 source;
	__u64 segment;
	__u64 offset;
	__u64 length;
};

/* The sum over a list of them. */
struct mooncake_sum {
	__u64 at;
	__u64 stride;
	__u64 count;
	__u64 total;
	__u64 writes;
	__u64 wrong;
};

static long add_mooncake(TURN, struct mooncake_sum *sum)
{
	struct mooncake_request one = {};
	__u32 number = *turn;

	if (number >= sum->count)
		return 1;
	if (bpf_probe_read_user(&one, sizeof(one), (const void *)(sum->at + number * sum->stride))) {
		sum->wrong = 1;
		return 1;
	}
	sum->wrong |= one.opcode >> 1 | one.length >> 48;
	sum->writes += one.opcode;
	sum->total += one.length;
	return 0;
}

VERIFIED_ONCE int read_mooncake(__u64 list, __u64 stride, struct transfer *transfer)
{
	struct mooncake_sum sum = {.stride = stride};
	__u64 vector[2] = {}, bytes;

	if (!transfer || stride < sizeof(struct mooncake_request))
		return 0;
	sum.total = unknown_zero();
	sum.writes = unknown_zero();
	sum.wrong = unknown_zero();
	if (bpf_probe_read_user(vector, sizeof(vector), (const void *)list))
		return 1;
	bytes = vector[1] - vector[0];
	sum.at = vector[0];
	sum.count = bytes / stride;
	if (vector[1] < vector[0] || bytes % stride || sum.count > MOST_TURNS)
		return 0;
	bpf_for_each_map_elem(&turns, add_mooncake, &sum, 0);
	/* Of another length than this build's, what is read makes no sense. */
	if (sum.wrong)
		return 0;
	if (sum.count && (!sum.writes || sum.writes == sum.count))
		transfer->function += sum.writes ? 2 : 1;
	size_transfer(transfer, sum.total, 1);
	return 0;
}

static __noinline struct transfer_total *total_of(__u64 peer, __u32 tgid, __u32 function)
{
	struct transfer_key key = {.peer = peer, .tgid = tgid, .function = function & 0xff};
	struct transfer_total *total, *fresh;
	__u32 zero = 0;
	__u64 place;

	for (int i = 0; i < 2; i++) {
		total = bpf_map_lookup_elem(&transfer_totals, &key);
		if (total)
			return total;
		place = take_place(answerable(), tgid, SHARED_TRANSFER_TOTALS, transfer_entries);
		fresh = bpf_map_lookup_elem(&fresh_total, &zero);
		if (place && fresh) {
			bpf_map_update_elem(&transfer_totals, &key, fresh, BPF_NOEXIST);
			total = bpf_map_lookup_elem(&transfer_totals, &key);
			if (total && !__sync_val_compare_and_swap(&total->reserved, 0, 1)) {
				total->uid = (__u32)place;
				return total;
			}
			return_place((__u32)place, tgid, SHARED_TRANSFER_TOTALS);
			if (total)
				return total;
		}
		if (!key.peer)
			break;
		key.peer = 0;
	}
	function &= 0xff;
	count_transfer(TRANSFER_STAT_FULL);
	return bpf_map_lookup_elem(&transfer_overflow, &function);
}

/* How an operation ends. */
enum outcome {
	SUCCEEDED,
	FAILED,
	GIVEN_UP, /* before it was seen to be complete */
};

/* An operation begins. */
VERIFIED_ONCE int add_started(struct transfer *transfer, __u32 tgid, __u64 now, int unseen)
{
	struct transfer_total *total;

	if (!transfer)
		return 0;
	total = total_of(transfer->peer, tgid, transfer->function);
	if (!total)
		return 0;
	__sync_fetch_and_add(&total->operations, 1);
	if (total->bytes < MOST_TOTAL_BYTES)
		__sync_fetch_and_add(&total->bytes, transfer->bytes);
	if (!transfer->sized)
		__sync_fetch_and_add(&total->unsized, 1);
	if (unseen)
		__sync_fetch_and_add(&total->lost, 1);
	total->last_ns = now;
	return 0;
}

/* An operation is over. */
VERIFIED_ONCE int add_ended(__u64 peer, __u64 tgid_and_function, __u64 elapsed_ns, int outcome)
{
	struct transfer_total *total = total_of(peer, tgid_and_function >> 32, (__u32)tgid_and_function);
	__u32 bucket = elapsed_ns <= 1024 ? 0 : log2_floor(elapsed_ns - 1) - 9;

	if (!total)
		return 0;
	if (outcome == GIVEN_UP) {
		__sync_fetch_and_add(&total->lost, 1);
		return 0;
	}
	__sync_fetch_and_add(&total->completed, 1);
	if (outcome == FAILED) {
		__sync_fetch_and_add(&total->failed, 1);
		return 0;
	}
	__sync_fetch_and_add(&total->sum_ns, elapsed_ns);
	if (bucket >= TRANSFER_BUCKETS)
		bucket = TRANSFER_BUCKETS - 1;
	__sync_fetch_and_add(&total->buckets[bucket], 1);
	return 0;
}

#define OF(tgid, function) ((__u64)(tgid) << 32 | (function))

/* The entry of a thread that makes its first call, or that follows another of the same number. */
VERIFIED_ONCE int add_transfer_thread(__u32 tgid, __u32 tid)
{
	struct transfer_thread fresh = {.tgid = tgid};
	__u64 place = take_place(answerable(), tgid, SHARED_TRANSFER_THREADS, transfer_entries);

	if (!place) {
		count_transfer(TRANSFER_STAT_FULL);
		return 0;
	}
	fresh.uid = (__u32)place;
	fresh.task = bpf_get_current_task();
	if (bpf_map_update_elem(&transfer_threads, &tid, &fresh, BPF_NOEXIST)) {
		return_place(fresh.uid, tgid, SHARED_TRANSFER_THREADS);
		return 0;
	}
	return 1;
}

/* Whether the thread is inside another such call, of which this one is part. */
static __always_inline int is_nested(const struct transfer_thread *known, __u64 stack)
{
	return known->start_ns && known->task == bpf_get_current_task() && known->stack > stack;
}

static __always_inline void read_transfer(const struct registers *ctx, __u64 cookie, __u32 tgid,
					  const struct transfer_thread *known, struct transfer *transfer)
{
	struct arguments arguments = {};
	struct given given = {};
	__u32 size = COOKIE_SIZE(cookie);
	int failed;

	take_arguments(&arguments, ctx, 0);
	failed = read_given(&arguments, cookie, &given);
	transfer->peer = given.peer;
	transfer->request = given.request;
	transfer->followed = COOKIE_COMPLETION(cookie) != COMPLETION_UNSEEN;
	transfer->function = COOKIE_FUNCTION(cookie);
	transfer->sized = size == SIZE_NONE || size == SIZE_ELEMENTS ||
			  (size == SIZE_UCX && COOKIE_PLACE(cookie, PLACE_ELEMENTS) == PLACE_NONE);
	if (size == SIZE_ELEMENTS)
		size_transfer(transfer, given.elements, 1ULL << COOKIE_SHIFT(cookie));
	else if (size == SIZE_UCX)
		failed |= read_ucx(&given, cookie, transfer);
	else if (size == SIZE_NIXL)
		failed |= read_nixl(transfer, tgid, cookie, known && known->tgid == tgid ? known->peer : 0);
	else if (size == SIZE_MOONCAKE)
		failed |= read_mooncake(given.buffer, 8 * COOKIE_SHIFT(cookie), transfer);
	else if (size != SIZE_NONE)
		failed |= read_mpi(&given, cookie, transfer);
	if (failed)
		count_transfer(TRANSFER_STAT_UNREADABLE);
}

/* A request's life. */
enum {
	PASSING, /* it ends with what it was made for */
	PREPARED, /* persistent, and not started */
	STARTED, /* persistent */
};

VERIFIED_ONCE int add_request(__u64 request, struct transfer_thread *call, __u32 tid, int kind)
{
	struct transfer_request_key key = {.request = request};
	struct transfer_request fresh = {}, *stale;
	__u64 place;

	if (!call)
		return 0;
	key.tgid = call->tgid;
	fresh.start_ns = call->start_ns;
	fresh.bytes = call->bytes;
	fresh.peer = call->peer;
	fresh.function = call->function;
	fresh.tid = tid;
	fresh.persistent = kind != PASSING;
	fresh.unsized = call->unsized;
	if (kind == PREPARED)
		fresh.start_ns = 0;
	if (!call->followed)
		return add_ended(call->peer, OF(key.tgid, call->function), 0, GIVEN_UP);
	stale = bpf_map_lookup_elem(&transfer_requests, &key);
	if (stale) {
		/* The library has used its memory again: it is over, and nobody saw when. */
		__u64 peer = stale->peer, function = stale->function, start = stale->start_ns;

		fresh.uid = stale->uid;
		bpf_map_update_elem(&transfer_requests, &key, &fresh, BPF_EXIST);
		return start ? add_ended(peer, OF(key.tgid, function), 0, GIVEN_UP) : 0;
	}
	if (call->spare) {
		call->spare--;
		place = PLACE_TAKEN | call->spare_uid;
	} else {
		place = take_place(answerable(), key.tgid, SHARED_TRANSFER_REQUESTS, transfer_entries);
	}
	if (place) {
		fresh.uid = (__u32)place;
		if (!bpf_map_update_elem(&transfer_requests, &key, &fresh, BPF_NOEXIST))
			return 0;
		return_place(fresh.uid, key.tgid, SHARED_TRANSFER_REQUESTS);
	}
	count_transfer(TRANSFER_STAT_FULL);
	return kind == PREPARED ? 0 : add_ended(call->peer, OF(key.tgid, call->function), 0, GIVEN_UP);
}

/* A request of MPI, as it lies in its program's memory; 0: it cannot be read. */
static __always_inline __u64 read_request(__u64 at, __u32 bytes)
{
	__u64 request = 0;
	int failed;

	if (bytes == sizeof(__u32))
		failed = bpf_probe_read_user(&request, sizeof(__u32), (const void *)at);
	else
		failed = bpf_probe_read_user(&request, sizeof(request), (const void *)at);
	return failed ? 0 : request;
}

/* Where Open MPI has the request of all that are complete at once: ompi_request_empty; else 0. */
static __always_inline __u64 complete_request(const struct registers *ctx, __u64 cookie)
{
	if (COOKIE_COMPLETION(cookie) != COMPLETION_MPI || COOKIE_REQUEST_BYTES(cookie) == sizeof(__u32) ||
	    !COOKIE_COMPLETE_AT(cookie))
		return 0;
	return (INSTRUCTION_POINTER(ctx) & ~7ULL) + 8 * COOKIE_COMPLETE_AT(cookie);
}

#define MPICH_MADE(request) ((request) >> 31 & 1) /* of its own memory; those that are built in are complete */

/* A call of MPI has left a request. */
VERIFIED_ONCE int leave_request(struct transfer_thread *call, __u64 cookie, __u32 tid, __u64 elapsed_ns)
{
	__u32 bytes = COOKIE_REQUEST_BYTES(cookie);
	__u64 request;

	if (!call)
		return 0;
	request = read_request(call->request, bytes);
	if (bytes == sizeof(__u32) ? MPICH_MADE(request) : request && request != call->which)
		return add_request(request, call, tid, COOKIE_COMPLETION(cookie) == COMPLETION_MPI ? PASSING : PREPARED);
	if (COOKIE_COMPLETION(cookie) != COMPLETION_MPI)
		return 0;
	return add_ended(call->peer, OF(call->tgid, call->function), elapsed_ns, SUCCEEDED);
}

static __noinline __u64 request_argument(const struct registers *ctx, __u64 cookie)
{
	struct arguments arguments = {};

	take_arguments(&arguments, ctx, 0);
	return argument(&arguments, COOKIE_PLACE(cookie, PLACE_REQUEST));
}

/* Entry of a call; returns whether its return matters. */
static __always_inline int enter_transfer(struct registers *ctx, __u64 cookie)
{
	__u32 completion = COOKIE_COMPLETION(cookie);
	struct transfer_thread *known;
	struct transfer transfer = {};
	struct thread thread;
	__u64 now;

	if (!observed_thread(&thread))
		return 0;
	known = bpf_map_lookup_elem(&transfer_threads, &thread.tid);
	if (known && known->tgid != thread.tgid) {
		/* Of a process that has ended: the place stays with whom it was given to, until the reader is through. */
		known = 0;
		count_transfer(TRANSFER_STAT_FULL);
	} else if (!known) {
		if (add_transfer_thread(thread.tgid, thread.tid))
			known = bpf_map_lookup_elem(&transfer_threads, &thread.tid);
	} else if (is_nested(known, STACK_POINTER(ctx))) {
		return 0;
	}
	now = bpf_ktime_get_ns();
	if (completion == COMPLETION_ENDS_STATUS) {
		struct transfer_request_key key = {.tgid = thread.tgid};

		count_transfer(TRANSFER_STAT_ENDS);
		transfer.request = request_argument(ctx, cookie);
		transfer.function = NO_OPERATION;
		transfer.peer = known ? known->peer : 0; /* its name is noted: see note_peer() */
		key.request = transfer.request;
		/* Of one that is complete there is nothing to learn. */
		if (!known || !bpf_map_lookup_elem(&transfer_requests, &key))
			return 0;
	} else if (completion == COMPLETION_MPI_PREPARES) {
		count_transfer(TRANSFER_STAT_ENDS);
		read_transfer(ctx, cookie, thread.tgid, known, &transfer);
		if (!known)
			return 0;
	} else {
		count_transfer(TRANSFER_STAT_ENTRIES);
		read_transfer(ctx, cookie, thread.tgid, known, &transfer);
		add_started(&transfer, thread.tgid, now, completion == COMPLETION_UNSEEN || !known);
		if (completion == COMPLETION_UNSEEN || !known)
			return 0;
	}
	known->bytes = transfer.bytes;
	known->peer = transfer.peer;
	known->request = transfer.request;
	known->task = bpf_get_current_task();
	known->stack = STACK_POINTER(ctx);
	known->function = transfer.function;
	known->probed = COOKIE_FUNCTION(cookie);
	known->followed = transfer.followed;
	known->unsized = !transfer.sized;
	known->waited = 0;
	known->which = complete_request(ctx, cookie);
	known->last_ns = now;
	known->start_ns = now;
	if (completion == COMPLETION_ENDED) {
		add_request(transfer.request, known, thread.tid, PASSING);
		known->start_ns = 0;
		return 0;
	}
	return 1;
}

/* A request has come to its end.  `call`: of the thread that sees it; it keeps the place for its next one. */
VERIFIED_ONCE int end_request(__u64 request, __u32 tgid, __u64 now, int outcome, struct transfer_thread *call)
{
	struct transfer_request_key key = {.request = request, .tgid = tgid};
	struct transfer_request *found = bpf_map_lookup_elem(&transfer_requests, &key);
	struct transfer_request ended;
	__u64 start;

	if (!found)
		return 0;
	if (found->persistent && outcome != GIVEN_UP) {
		start = found->start_ns;
		/* Not started, or another thread was faster. */
		if (!start || __sync_val_compare_and_swap(&found->start_ns, start, 0) != start)
			return 0;
		return add_ended(found->peer, OF(tgid, found->function), now - start, outcome);
	}
	ended = *found;
	if (bpf_map_delete_elem(&transfer_requests, &key))
		return 0; /* another thread was faster */
	if (call && call->spare < MOST_SPARE && (!call->spare || call->spare_uid == ended.uid)) {
		call->spare_uid = ended.uid;
		call->spare++;
	} else {
		return_place(ended.uid, tgid, SHARED_TRANSFER_REQUESTS);
	}
	if (!ended.start_ns)
		return 0;
	return add_ended(ended.peer, OF(tgid, ended.function), now - ended.start_ns, outcome);
}

static __always_inline int leave_transfer(struct registers *ctx, __u64 cookie)
{
	__u32 completion = COOKIE_COMPLETION(cookie);
	struct transfer_thread *known;
	struct thread thread;
	__u64 now, start, value = RETURN_VALUE(ctx);
	__s32 status = (__s32)value;
	int failed = 0;

	if (!observed_thread(&thread))
		return 0;
	known = bpf_map_lookup_elem(&transfer_threads, &thread.tid);
	if (!known || known->tgid != thread.tgid || !known->start_ns)
		return 0;
	/* Part of another call that goes on. */
	if (known->probed != COOKIE_FUNCTION(cookie) || STACK_POINTER(ctx) < known->stack)
		return 0;
	count_transfer(TRANSFER_STAT_RETURNS);
	now = bpf_ktime_get_ns();
	start = known->start_ns;
	known->last_ns = now;
	if (completion == COMPLETION_ENDS_STATUS) {
		known->start_ns = 0;
		return status == 1 ? 0 : end_request(known->request, thread.tgid, now, status < 0 ? FAILED : SUCCEEDED, known);
	}
	if (completion == COMPLETION_UCX) {
		failed = (__s64)value < 0 && (__s64)value >= UCX_FIRST_ERROR;
		if (value && !failed) {
			add_request(value, known, thread.tid, PASSING);
			known->start_ns = 0;
			return 0;
		}
	} else if (completion == COMPLETION_STATUS) {
		failed = status < 0;
		if (status == 1) {
			add_request(known->request, known, thread.tid, PASSING);
			known->start_ns = 0;
			return 0;
		}
	} else if (completion == COMPLETION_MPI_PREPARES || (completion == COMPLETION_MPI && !status)) {
		if (!status)
			leave_request(known, cookie, thread.tid, now - start);
		known->start_ns = 0;
		return 0;
	} else {
		failed = status != 0;
	}
	known->start_ns = 0;
	return add_ended(known->peer, OF(thread.tgid, known->function), now - start, failed ? FAILED : SUCCEEDED);
}

/* Loaded as a session program (kernel 6.13): entry and return; see cuda.h. */
SEC("uprobe")
int transfer_session(struct registers *ctx)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);

	if (INSTRUCTION_POINTER(ctx) != bpf_get_func_ip(ctx))
		return leave_transfer(ctx, cookie);
	return !enter_transfer(ctx, cookie);
}

SEC("uprobe")
int transfer_entry(struct registers *ctx)
{
	enter_transfer(ctx, bpf_get_attach_cookie(ctx));
	return 0;
}

SEC("uretprobe")
int transfer_return(struct registers *ctx)
{
	return leave_transfer(ctx, bpf_get_attach_cookie(ctx));
}

/* Functions that tell of a request at their entry. */
SEC("uprobe")
int transfer_end(struct registers *ctx)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	struct arguments arguments;
	struct thread thread;
	__u32 words[2] = {};
	__u64 back = COOKIE_BACK(cookie);
	struct transfer_request_key key = {};
	struct transfer_request *found;
	struct transfer_thread *known;
	__u32 completion = COOKIE_COMPLETION(cookie);
	int outcome = completion == COMPLETION_ENDS_UCX ? SUCCEEDED : GIVEN_UP;

	if (!observed_thread(&thread))
		return 0;
	count_transfer(TRANSFER_STAT_ENDS);
	take_arguments(&arguments, ctx, 0);
	key.request = argument(&arguments, COOKIE_PLACE(cookie, PLACE_REQUEST));
	if (completion == COMPLETION_MPI_FREES) {
		key.request = read_request(key.request, COOKIE_REQUEST_BYTES(cookie));
		back = 0;
	}
	key.tgid = thread.tgid;
	found = bpf_map_lookup_elem(&transfer_requests, &key);
	if (!found)
		return 0;
	/* So far in front of a request lie its status, a byte, and its flags. */
	if (back && !bpf_probe_read_user(words, sizeof(words), (const void *)(key.request - back))) {
		if (!(words[1] & UCX_COMPLETED)) {
			/* UCX frees it when it is complete, and tells nobody but the program: the reader looks. */
			found->let_go = back;
			return 0;
		}
		outcome = (__s8)words[0] < 0 ? FAILED : SUCCEEDED;
	}
	known = bpf_map_lookup_elem(&transfer_threads, &thread.tid);
	if (known && known->tgid != thread.tgid)
		known = 0;
	return end_request(key.request, thread.tgid, bpf_ktime_get_ns(), outcome, known);
}

/*
 * Functions of MPI that wait for requests, ask about them, or start persistent ones.  Which requests those are is read
 * at entry: MPI writes its null request over those that are complete.
 */

/* What a turn of a loop over requests works on. */
struct requests {
	struct transfer_thread *call;
	struct transfer_waited *waited; /* 0: they lie in the program's memory */
	__u64 at;
	__u64 now;
	__u32 count, bytes, tid;
	int outcome;
};

static __always_inline __u64 waited_request(const struct transfer_waited *waited, __u32 number, __u32 bytes)
{
	if (bytes == sizeof(__u32)) {
		if (number >= 2 * TRANSFER_WAITED)
			return 0;
		return ((const __u32 *)waited->requests)[number];
	}
	return number < TRANSFER_WAITED ? waited->requests[number] : 0;
}

static long end_waited(TURN, struct requests *requests)
{
	__u32 number = *turn;

	if (number >= requests->count)
		return 1;
	end_request(waited_request(requests->waited, number, requests->bytes), requests->call->tgid, requests->now,
		    requests->outcome, requests->call);
	return 0;
}

/* One of those that a call has found complete, by the list of their numbers in the program's memory. */
static long end_listed(TURN, struct requests *requests)
{
	__u32 number = *turn, which = 0;

	if (number >= requests->count ||
	    bpf_probe_read_user(&which, sizeof(which), (const void *)(requests->at + number * sizeof(which))))
		return 1;
	end_request(waited_request(requests->waited, which, requests->bytes), requests->call->tgid, requests->now,
		    requests->outcome, requests->call);
	return 0;
}

/* Of a longer list than `transfer_waited` holds: each request names the one before it. */
static long chain_request(TURN, struct requests *requests)
{
	struct transfer_request_key key = {.tgid = requests->call->tgid};
	struct transfer_request *found;
	__u32 number = *turn;

	if (number >= requests->count)
		return 1;
	key.request = read_request(requests->at + number * requests->bytes, requests->bytes);
	found = bpf_map_lookup_elem(&transfer_requests, &key);
	if (found) {
		found->next = requests->call->request;
		requests->call->request = key.request;
	}
	return 0;
}

static long end_chained(TURN, struct requests *requests)
{
	struct transfer_request_key key = {.request = requests->call->request, .tgid = requests->call->tgid};
	struct transfer_request *found = bpf_map_lookup_elem(&transfer_requests, &key);

	if (!found)
		return 1;
	requests->call->request = found->next;
	end_request(key.request, key.tgid, requests->now, requests->outcome, requests->call);
	return 0;
}

/* A persistent request begins what it was made for. */
static __always_inline int start_request(__u64 request, struct transfer_thread *call, __u32 tid)
{
	struct transfer_request_key key = {.request = request};
	struct transfer_request *found;
	struct transfer transfer = {};
	__u64 before;

	key.tgid = call->tgid;
	found = bpf_map_lookup_elem(&transfer_requests, &key);
	if (!found || !found->persistent) {
		/* It was made when nobody looked: what it does is not known.  Nor is its end where it cannot be read. */
		transfer.function = call->function;
		add_started(&transfer, key.tgid, call->start_ns, !request);
		return request ? add_request(request, call, tid, STARTED) : 0;
	}
	transfer.function = found->function;
	transfer.peer = found->peer;
	transfer.bytes = found->bytes;
	transfer.sized = !found->unsized;
	before = found->start_ns;
	found->asked_ns = 0;
	found->next = 0;
	found->start_ns = call->start_ns;
	if (before)
		add_ended(transfer.peer, OF(key.tgid, transfer.function), 0, GIVEN_UP);
	return add_started(&transfer, key.tgid, call->start_ns, 0);
}

static long start_listed(TURN, struct requests *requests)
{
	__u32 number = *turn;

	if (number >= requests->count)
		return 1;
	start_request(read_request(requests->at + number * requests->bytes, requests->bytes), requests->call,
		      requests->tid);
	return 0;
}

static __noinline struct transfer_waited *waited_of(__u32 tid)
{
	struct transfer_waited *found = bpf_map_lookup_elem(&transfer_waited, &tid), *fresh;
	__u32 zero = 0;

	if (found)
		return found;
	fresh = bpf_map_lookup_elem(&fresh_waited, &zero);
	if (!fresh)
		return 0;
	bpf_map_update_elem(&transfer_waited, &tid, fresh, BPF_NOEXIST);
	return bpf_map_lookup_elem(&transfer_waited, &tid);
}

/* Entry: note which requests a call is about; returns whether its return matters. */
static __always_inline int note_requests(struct transfer_thread *call, const struct given *given, __u64 cookie, __u32 tid)
{
	__u32 completion = COOKIE_COMPLETION(cookie), bytes = COOKIE_REQUEST_BYTES(cookie);
	__s64 count = (__s32)given->elements;
	struct requests requests = {.call = call, .at = given->request, .bytes = bytes, .tid = tid};
	struct transfer_request_key key = {.tgid = call->tgid};
	struct transfer_waited *waited;
	__u64 size;

	call->waited = 0;
	call->request = 0;
	if (COOKIE_PLACE(cookie, PLACE_ELEMENTS) == PLACE_NONE)
		count = 1;
	if (count <= 0)
		return 0;
	requests.count = count < MOST_TURNS ? count : MOST_TURNS;
	if (completion == COMPLETION_MPI_STARTS) {
		bpf_for_each_map_elem(&turns, start_listed, &requests, 0);
		return 1;
	}
	if (completion == COMPLETION_MPI_ONE) {
		key.request = read_request(given->request, bytes);
		call->request = key.request;
		return bpf_map_lookup_elem(&transfer_requests, &key) != 0;
	}
	size = (__u64)requests.count * bytes;
	if (size > sizeof(waited->requests)) {
		if (completion == COMPLETION_MPI_ALL) {
			bpf_for_each_map_elem(&turns, chain_request, &requests, 0);
			return call->request != 0;
		}
		size = sizeof(waited->requests); /* those behind them end unseen */
	}
	waited = waited_of(tid);
	if (!waited || bpf_probe_read_user(waited->requests, size, (const void *)given->request)) {
		count_transfer(waited ? TRANSFER_STAT_UNREADABLE : TRANSFER_STAT_FULL);
		return 0;
	}
	call->waited = size / bytes;
	call->request_bytes = bytes;
	return 1;
}

/* Return: what of them is complete. */
static __noinline int end_requests(struct transfer_thread *call, __u64 cookie, __u32 tid, __u64 now, __s32 status)
{
	__u32 completion = COOKIE_COMPLETION(cookie), bytes = COOKIE_REQUEST_BYTES(cookie), which = 0;
	/* Of several, which one failed is in a list of their states. */
	int outcome = !status ? SUCCEEDED : completion == COMPLETION_MPI_ONE ? FAILED : GIVEN_UP;
	struct requests requests = {.call = call, .at = call->list, .now = now, .bytes = bytes, .outcome = outcome};

	if (completion == COMPLETION_MPI_ONE)
		return end_request(call->request, call->tgid, now, outcome, call);
	if (!call->waited) {
		if (completion == COMPLETION_MPI_ALL)
			bpf_for_each_map_elem(&turns, end_chained, &requests, 0);
		return 0;
	}
	requests.waited = bpf_map_lookup_elem(&transfer_waited, &tid);
	if (!requests.waited)
		return 0;
	if (completion == COMPLETION_MPI_ALL) {
		requests.count = call->waited;
		bpf_for_each_map_elem(&turns, end_waited, &requests, 0);
		return 0;
	}
	if (bpf_probe_read_user(&which, sizeof(which), (const void *)call->which))
		return 0;
	if (completion == COMPLETION_MPI_ANY)
		return end_request(waited_request(requests.waited, which, bytes), call->tgid, now, outcome, call);
	requests.count = (__s32)which > 0 ? which : 0;
	bpf_for_each_map_elem(&turns, end_listed, &requests, 0);
	return 0;
}

#define ASKED_AGAIN_NS 1000000000ULL /* who asks less often does something else meanwhile */

/* A program has asked for a request that is not complete. */
static __noinline int note_asked(struct transfer_thread *call, __u64 now)
{
	struct transfer_request_key key = {.request = call->request, .tgid = call->tgid};
	struct transfer_request *found = bpf_map_lookup_elem(&transfer_requests, &key);

	if (!found)
		return 0;
	if (!found->asked_ns || now - found->asked_last_ns > ASKED_AGAIN_NS)
		found->asked_ns = now;
	found->asked_last_ns = now;
	return 0;
}

/* Not inlined: Linux 6.1 allows all that call each other 512 bytes of stack together. */
static __noinline int read_wait(const struct registers *ctx, __u64 cookie, struct given *given)
{
	struct arguments arguments = {};

	take_arguments(&arguments, ctx, 0);
	return read_given(&arguments, cookie, given);
}

/* A call begins that moves nothing itself.  Not inlined: as above. */
static __noinline int add_call(__u32 function, __u32 tgid, __u64 now, int unseen)
{
	struct transfer transfer = {.function = function, .sized = 1};

	return add_started(&transfer, tgid, now, unseen);
}

static __always_inline int enter_wait(struct registers *ctx, __u64 cookie)
{
	__u32 function = COOKIE_FUNCTION(cookie);
	struct transfer_thread *known;
	struct given given = {};
	struct thread thread;
	__u64 now;
	int returns;

	if (!observed_thread(&thread))
		return 0;
	known = bpf_map_lookup_elem(&transfer_threads, &thread.tid);
	if (known && known->tgid == thread.tgid && is_nested(known, STACK_POINTER(ctx)))
		return 0;
	now = bpf_ktime_get_ns();
	if (read_wait(ctx, cookie, &given))
		count_transfer(TRANSFER_STAT_UNREADABLE);
	count_transfer(function == NO_OPERATION ? TRANSFER_STAT_ENDS : TRANSFER_STAT_ENTRIES);
	if (COOKIE_COMPLETION(cookie) == COMPLETION_MPI_STARTS)
		function = NO_OPERATION; /* counted for each of its requests */
	if (!known && add_transfer_thread(thread.tgid, thread.tid))
		known = bpf_map_lookup_elem(&transfer_threads, &thread.tid);
	if (known && known->tgid != thread.tgid) {
		known = 0;
		count_transfer(TRANSFER_STAT_FULL);
	}
	if (function != NO_OPERATION)
		add_call(function, thread.tgid, now, !known);
	if (!known)
		return 0;
	known->start_ns = now;
	known->bytes = 0;
	known->peer = 0;
	known->task = bpf_get_current_task();
	known->stack = STACK_POINTER(ctx);
	known->function = COOKIE_FUNCTION(cookie);
	known->probed = COOKIE_COMPLETION(cookie);
	known->followed = 1;
	known->unsized = 1;
	known->last_ns = now;
	known->flag = given.buffer;
	known->which = given.unit;
	known->list = given.peer;
	returns = note_requests(known, &given, cookie, thread.tid);
	if (!returns && function == NO_OPERATION) {
		known->start_ns = 0;
		return 0;
	}
	return 1;
}

static __always_inline int leave_wait(struct registers *ctx, __u64 cookie)
{
	__u32 function = COOKIE_FUNCTION(cookie), flag = 1;
	struct transfer_thread *known;
	struct thread thread;
	__s32 status = (__s32)RETURN_VALUE(ctx);
	__u64 now, start;

	if (!observed_thread(&thread))
		return 0;
	known = bpf_map_lookup_elem(&transfer_threads, &thread.tid);
	if (!known || known->tgid != thread.tgid || !known->start_ns)
		return 0;
	if (known->probed != COOKIE_COMPLETION(cookie) || known->function != function || STACK_POINTER(ctx) < known->stack)
		return 0;
	count_transfer(TRANSFER_STAT_RETURNS);
	now = bpf_ktime_get_ns();
	start = known->start_ns;
	known->last_ns = now;
	if (COOKIE_COMPLETION(cookie) != COMPLETION_MPI_STARTS) {
		if (known->flag && bpf_probe_read_user(&flag, sizeof(flag), (const void *)known->flag))
			flag = 0;
		if (flag)
			end_requests(known, cookie, thread.tid, now, status);
		else if (COOKIE_COMPLETION(cookie) == COMPLETION_MPI_ONE)
			note_asked(known, now);
		if (function != NO_OPERATION)
			add_ended(0, OF(thread.tgid, function), now - start, status ? FAILED : SUCCEEDED);
	}
	known->start_ns = 0;
	return 0;
}

SEC("uprobe")
int wait_session(struct registers *ctx)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);

	if (INSTRUCTION_POINTER(ctx) != bpf_get_func_ip(ctx))
		return leave_wait(ctx, cookie);
	return !enter_wait(ctx, cookie);
}

SEC("uprobe")
int wait_entry(struct registers *ctx)
{
	enter_wait(ctx, bpf_get_attach_cookie(ctx));
	return 0;
}

SEC("uretprobe")
int wait_return(struct registers *ctx)
{
	return leave_wait(ctx, bpf_get_attach_cookie(ctx));
}
