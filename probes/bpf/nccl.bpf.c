// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Probes on NCCL's entry points: count every collective exactly, number it within its communicator, and write one
 * event for it.  Nothing here changes or delays the job beyond the trap itself.
 *
 * The hot path is account(): three look-ups in arrays, four atomic adds, one record (call_slots.h), and no read of user
 * memory that is not needed for counting.  Everything that happens once in a communicator's life (reading its identity,
 * its init and its end) is kept out of line.
 *
 * Per-CPU values are changed with atomic adds although no other CPU writes them: on a preemptible kernel a second
 * thread may run the same program on the same CPU between load and store, and a lost count is a wrong count.
 *
 * Only UAPI headers are used, so the object loads on kernels without BTF.  nccl_session.bpf.c includes this file
 * and adds the session program, which needs a kernel function and therefore BTF.
 */
#include <linux/bpf.h>
#include <linux/types.h>

#include <bpf/bpf_helpers.h>

#include "nccl.h"

char _license[] SEC("license") = "Dual BSD/GPL";

/* Set by the loader before load. */
const volatile __u64 pid_namespace_device = 0; /* of the reader; 0 with inode 0: the initial pid namespace */
const volatile __u64 pid_namespace_inode = 0;
const volatile __u32 only_observed_processes = 0; /* 1: count what observed_processes names, nothing else */
const volatile __u32 write_events = 1;
const volatile __u32 sample_shift = 4; /* host time is measured for 1 call in 2^shift */
const volatile __u32 communicator_entries = 16384; /* of the tables that are shared out */
const volatile __u32 aggregate_entries = 65536;
const volatile __u32 task_nsproxy = 0; /* offsets in the kernel's structures, of the fields of these names */
const volatile __u32 nsproxy_net_ns = 0;
const volatile __u32 net_ns_inum = 0; /* 0: not known, or not needed */
#include "answerable.h"
const volatile __u32 call_ring_mask = 0; /* number of rings, a power of two, less one */
const volatile __u32 call_slot_bits = 6; /* a ring has 2^bits slots */

#include "arguments.h"
#include "arithmetic.h"
#include "crowds.h"
#include "call_slots.h"
#include "communicators.h"
#include "lifecycle.h"
#include "observed.h"
#include "shares.h"

/*
 * Exact counts, found as communicators are: a slot belongs to the first combination that comes to it, until the reader
 * takes it out.  Its counts are shared by all CPUs, like the number of the communicator's calls: threads seldom share
 * a communicator, and per-CPU values would cost every reading a copy for each possible CPU.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1 << AGGREGATE_SLOT_BITS);
	__type(key, __u32);
	__type(value, struct aggregate_slot);
} aggregate_slots SEC(".maps");

/* Combinations whose slot belongs to another, and calls without a communicator. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, struct aggregate_key);
	__type(value, struct hashed_aggregate);
} aggregates SEC(".maps");

/* Calls that found no place in `aggregates`: op × data type, so that the node's totals stay exact. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, OP_COUNT * 16);
	__type(key, __u32);
	__type(value, struct aggregate);
} overflow_totals SEC(".maps");

/*
 * Calls whose arguments could not be read, by process: who asks must not doubt those of others.  Shared out, as one
 * user may start any number of processes; those that have ended are taken out by the reader.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, UNREADABLE_PROCESSES);
	__type(key, __u32);
	__type(value, struct unreadable);
} unreadable_calls SEC(".maps");

/* Host time inside the call, by op. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, OP_COUNT);
	__type(key, __u32);
	__type(value, struct enqueue_time);
} enqueue_times SEC(".maps");

/* Sampled calls under way, by thread, shared out; only where the return is probed. */
#define CALLS_UNDER_WAY 4096
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, CALLS_UNDER_WAY);
	__type(key, __u32);
	__type(value, struct call_under_way);
} calls_under_way SEC(".maps");

struct call {
	__u64 comm;
	__u64 stream;
	__u64 payload_bytes;
	__s32 peer;
	__u32 library;
	__u8 op;
	__u8 data_type;
};

/* The first 72 bytes of struct ncclInfo, unchanged from 2.18 to 2.32. */
struct nccl_info {
	__u32 coll;
	__u32 padding;
	__u64 name;
	__u64 send_buffer;
	__u64 receive_buffer;
	__u64 count;
	__s32 data_type;
	__s32 reduction;
	__s32 root;
	__u32 padding2;
	__u64 comm;
	__u64 stream;
};

/*
 * The stream follows the communicator in every signature.  Where it alone lies on the stack it is left unknown, 0:
 * reading eight bytes of user memory costs more than all of the accounting.
 */
static __always_inline void read_comm_and_stream(struct arguments *arguments, __u64 cookie, struct call *call)
{
	__u32 comm = COOKIE_PLACE(cookie, PLACE_COMM);
	__u32 stream = COOKIE_PLACE(cookie, PLACE_STREAM);
	__u64 both[2] = {};

	if (comm < PLACE_STACK || comm == PLACE_NONE) {
		call->comm = argument(arguments, comm);
		call->stream = stream < PLACE_STACK ? argument(arguments, stream) : 0;
		return;
	}
	if (bpf_probe_read_user(both, sizeof(both), (const void *)stack_slot(arguments, comm - PLACE_STACK)))
		arguments->failed = 1;
	call->comm = both[0];
	call->stream = stream == comm + 1 ? both[1] : 0;
}

static __always_inline int read_call(const struct registers *ctx, __u64 cookie, struct call *call)
{
	__u64 elements;
	__u32 data_type;

	call->library = COOKIE_LIBRARY(cookie);
	if (COOKIE_IS_INFO(cookie)) {
		struct nccl_info info;

		if (bpf_probe_read_user(&info, sizeof(info), (const void *)FIRST_ARGUMENT(ctx)))
			return 0;
		call->op = info.coll < OP_UNKNOWN ? info.coll : OP_UNKNOWN;
		call->comm = info.comm;
		call->stream = info.stream;
		call->peer = info.root;
		elements = info.count;
		data_type = info.data_type;
	} else {
		struct arguments arguments;

		take_arguments(&arguments, ctx, cookie);
		call->op = COOKIE_OP(cookie) & (OP_COUNT - 1);
		read_comm_and_stream(&arguments, cookie, call);
		elements = argument(&arguments, COOKIE_PLACE(cookie, PLACE_COUNT));
		data_type = argument(&arguments, COOKIE_PLACE(cookie, PLACE_DATA_TYPE));
		if (COOKIE_PLACE(cookie, PLACE_DATA_TYPE) == PLACE_NONE)
			data_type = DATA_TYPE_UNKNOWN;
		call->peer = argument(&arguments, COOKIE_PLACE(cookie, PLACE_PEER));
		if (arguments.failed)
			return 0;
	}
	if (call->op == OP_SIGNAL || call->op == OP_WAIT_SIGNAL)
		data_type = DATA_TYPE_UNKNOWN; /* they move no elements; ncclInfo holds a filler there */
	/* Only these have a peer or a root; NCCL leaves 0 there for the others. */
	if (!((1U << call->op) & 0x36c3))
		call->peer = NO_PEER;
	if (data_type < DATA_TYPES) {
		call->data_type = data_type;
		call->payload_bytes = elements << ((DATA_TYPE_SHIFTS >> (4 * data_type)) & 0xf);
	} else {
		call->data_type = DATA_TYPE_UNKNOWN;
		call->payload_bytes = 0;
	}
	return 1;
}

static __noinline int add_overflow(struct call *call)
{
	__u32 slot;
	struct aggregate *total;

	if (!call)
		return 0;
	slot = (call->op & 0xf) * 16 + (call->data_type & 0xf);
	total = bpf_map_lookup_elem(&overflow_totals, &slot);
	count(STAT_AGGREGATES_FULL);
	if (total) {
		__sync_fetch_and_add(&total->calls, 1);
		__sync_fetch_and_add(&total->payload_bytes, call->payload_bytes);
	}
	return 0;
}

static __noinline int note_unreadable(struct thread *thread)
{
	struct unreadable *known, first = {.calls = 1};
	__u64 place;
	__u32 tgid;

	if (!thread)
		return 0;
	count(STAT_ARGUMENTS_UNREADABLE);
	tgid = thread->tgid;
	known = bpf_map_lookup_elem(&unreadable_calls, &tgid);
	if (known) {
		__sync_fetch_and_add(&known->calls, 1);
		return 0;
	}
	place = take_place(answerable(), tgid, SHARED_UNREADABLE_CALLS, UNREADABLE_PROCESSES);
	if (!place)
		return 0;
	first.uid = (__u32)place;
	first.tgid = tgid;
	if (!bpf_map_update_elem(&unreadable_calls, &tgid, &first, BPF_NOEXIST))
		return 0;
	return_place(first.uid, tgid, SHARED_UNREADABLE_CALLS);
	known = bpf_map_lookup_elem(&unreadable_calls, &tgid);
	if (known)
		__sync_fetch_and_add(&known->calls, 1);
	return 0;
}

/* Count a call whose combination has no slot. */
static __noinline int add_unslotted(struct call *call, __u32 tgid, __u32 instance)
{
	struct aggregate_key key = {.tgid = tgid, .instance = instance};
	struct hashed_aggregate *entry;

	if (!call)
		return 0;
	key.peer = call->peer;
	key.op = call->op;
	key.data_type = call->data_type;
	key.size_bucket = size_bucket(call->payload_bytes);
	entry = bpf_map_lookup_elem(&aggregates, &key);
	if (!entry) {
		struct hashed_aggregate zero = {};
		__u64 place = take_place(answerable(), tgid, SHARED_AGGREGATES, aggregate_entries);

		if (!place)
			return add_overflow(call);
		zero.uid = (__u32)place;
		if (bpf_map_update_elem(&aggregates, &key, &zero, BPF_NOEXIST))
			return_place(zero.uid, tgid, SHARED_AGGREGATES);
		entry = bpf_map_lookup_elem(&aggregates, &key);
		if (!entry)
			return add_overflow(call);
	}
	__sync_fetch_and_add(&entry->total.calls, 1);
	__sync_fetch_and_add(&entry->total.payload_bytes, call->payload_bytes);
	return 0;
}

static __always_inline void add_aggregate(struct call *call, __u32 tgid, __u32 instance)
{
	__u64 owner = tgid | (__u64)instance << 32;
	__u64 kind = (__u32)call->peer | (__u64)call->op << 32 | (__u64)call->data_type << 40 |
		     (__u64)size_bucket(call->payload_bytes) << 48 | 1ULL << 56;
	__u32 at = (kind ^ (__u64)instance << 20) * HASH_FACTOR >> (64 - AGGREGATE_SLOT_BITS);
	struct aggregate_slot *slot = bpf_map_lookup_elem(&aggregate_slots, &at);

	if (!slot || !instance)
		goto unslotted;
	if (slot->owner != owner || slot->kind != kind) {
		if (slot->owner || __sync_val_compare_and_swap(&slot->owner, 0, owner))
			goto unslotted;
		/* Last: until then neither the reader nor another thread takes the slot for anything. */
		__sync_lock_test_and_set(&slot->kind, kind);
	}
	__sync_fetch_and_add(&slot->calls, 1);
	__sync_fetch_and_add(&slot->payload_bytes, call->payload_bytes);
	return;
unslotted:
	add_unslotted(call, tgid, instance);
}

/* Bit n: collective n is discarded by NCCL where it has no element (taskAppend() in src/enqueue.cc, 2.20 to 2.32). */
#define DISCARDED_WHEN_EMPTY 0x071f

/* A call without payload: no plan tells of it, so what waits for the calls to complete must know its number. */
static __noinline int note_empty(struct call *call, __u32 tgid, __u32 sequence)
{
	struct communicator_key key = {.tgid = tgid};
	struct communicator *communicator;
	__u64 number;

	if (!call || call->data_type == DATA_TYPE_UNKNOWN || !(DISCARDED_WHEN_EMPTY >> (call->op & 31) & 1))
		return 0;
	key.comm = call->comm;
	communicator = bpf_map_lookup_elem(&communicators, &key);
	if (!communicator)
		return 0;
	number = calls_so_far(&key, communicator);
	number -= (__u32)number - sequence; /* other threads may have called since */
	/* In this order: the reader may look in between. */
	if (!communicator->empty_last || communicator->empty_last + 1 != number)
		communicator->empty_first = number;
	communicator->empty_last = number;
	return 0;
}

/* Spread by a multiplicative hash: every 16th call would always hit the same layer of a model. */
static __always_inline int sampled(__u32 sequence)
{
	if (!sequence || sample_shift >= 32)
		return 0;
	return ((__u64)(sequence * 2654435761U) << sample_shift) >> 32 == 0;
}

/* Count one call.  Returns its start time when the host time inside it is to be measured, else 0. */
static __always_inline __u64 account(const struct registers *ctx, __u64 cookie, struct call *call,
				     struct thread *thread)
{
	__u32 sequence = 0;
	__u32 instance = 0;
	__u64 now;

	if (!observed_thread(thread))
		return 0;
	count(STAT_CALLS);
	if (!read_call(ctx, cookie, call)) {
		note_unreadable(thread);
		return 0;
	}
	now = bpf_ktime_get_ns();
	if (call->comm) {
		struct communicator_slot *slot = slot_of(call->comm, thread->tgid);

		if (slot && slot->comm == call->comm && slot->tgid == thread->tgid)
			instance = slot->instance;
		if (instance) {
			sequence = __sync_fetch_and_add(&slot->sequence, 1) + 1;
			slot->last_ns = now;
		} else {
			struct communicator_key key = {.comm = call->comm, .tgid = thread->tgid};
			__u64 numbered = number_call(&key, call->library, thread, now);

			instance = numbered >> 32;
			sequence = (__u32)numbered;
		}
	}
	add_aggregate(call, thread->tgid, instance);
	if (instance)
		note_shape(call->op, call->data_type, call->peer, call->payload_bytes, instance, sequence);
	/* Where no count can be told, none is not zero. */
	if (!call->payload_bytes && instance &&
	    (COOKIE_IS_INFO(cookie) || COOKIE_PLACE(cookie, PLACE_COUNT) != PLACE_NONE))
		note_empty(call, thread->tgid, sequence);
	if (write_events) {
		__u64 stamp;
		struct call_slot *slot = reserve_call_slot(thread->tgid, &stamp);

		if (slot) {
			struct call_event *event = &slot->event;

			event->time_ns = now;
			event->comm = call->comm;
			event->stream = call->stream;
			event->payload_bytes = call->payload_bytes;
			event->tgid = thread->tgid;
			event->tid = thread->tid;
			event->instance = instance;
			event->sequence = sequence;
			event->peer = call->peer;
			event->op = call->op;
			event->data_type = call->data_type;
			event->library = call->library;
			finish_call_slot(slot, stamp);
		} else {
			count(STAT_RING_FULL);
		}
	}
	return sampled(sequence) ? now : 0;
}

static __always_inline void add_enqueue_time(__u32 op, __u64 start_ns)
{
	__u64 elapsed_ns = bpf_ktime_get_ns() - start_ns;
	__u32 bucket = elapsed_ns <= 128 ? 0 : log2_floor(elapsed_ns - 1) - 6;
	struct enqueue_time *time = bpf_map_lookup_elem(&enqueue_times, &op);

	if (!time)
		return;
	if (bucket > 31)
		bucket = 31;
	__sync_fetch_and_add(&time->calls, 1);
	__sync_fetch_and_add(&time->sum_ns, elapsed_ns);
	__sync_fetch_and_add(&time->buckets[bucket & 31], 1);
}

/*
 * Entry of a collective.  With a return probe beside it, sampled calls leave their start time for it, and others clear
 * what a call of this thread left that never returned (longjmp, a thread's cancellation).
 */
SEC("uprobe")
int collective_entry(struct registers *ctx)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	struct call_under_way *under_way;
	struct thread thread = {};
	struct call call;
	__u64 start_ns;

	call.op = 0;
	start_ns = account(ctx, cookie, &call, &thread);
	if (sample_shift >= 32 || !thread.tid)
		return 0;
	under_way = bpf_map_lookup_elem(&calls_under_way, &thread.tid);
	if (under_way) {
		under_way->start_ns = start_ns;
		under_way->op = call.op;
	} else if (start_ns) {
		struct call_under_way fresh = {.start_ns = start_ns, .op = call.op, .tgid = thread.tgid};
		__u64 place = take_place(answerable(), thread.tgid, SHARED_CALLS_UNDER_WAY, CALLS_UNDER_WAY);

		fresh.uid = (__u32)place;
		if (!place)
			return 0;
		if (bpf_map_update_elem(&calls_under_way, &thread.tid, &fresh, BPF_NOEXIST))
			return_place(fresh.uid, thread.tgid, SHARED_CALLS_UNDER_WAY);
	}
	return 0;
}

SEC("uretprobe")
int collective_return(struct registers *ctx)
{
	struct call_under_way *under_way, found;
	struct thread thread;

	(void)ctx;
	if (!observed_thread(&thread))
		return 0;
	count(STAT_RETURNS);
	under_way = bpf_map_lookup_elem(&calls_under_way, &thread.tid);
	if (!under_way)
		return 0;
	found = *under_way;
	if (!bpf_map_delete_elem(&calls_under_way, &thread.tid))
		leave_place(found.uid, found.tgid, SHARED_CALLS_UNDER_WAY);
	if (found.start_ns)
		add_enqueue_time(found.op & (OP_COUNT - 1), found.start_ns);
	return 0;
}
