// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Probes on NCCL's entry points: count every collective exactly, number it within its communicator, and write one
 * event for it.  Nothing here changes or delays the job beyond the trap itself.
 *
 * The hot path is collective_entry(): two hash look-ups, four atomic adds, one ring record.  Everything that happens
 * once in a communicator's life (reading its identity, its init and its end) is kept out of line.
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

#include "arguments.h"
#include "nccl.h"

char _license[] SEC("license") = "Dual BSD/GPL";

/* Set by the loader before load. */
const volatile __u64 pid_namespace_device = 0; /* of the reader; 0 with inode 0: the initial pid namespace */
const volatile __u64 pid_namespace_inode = 0;
const volatile __u32 only_observed_processes = 0; /* 1: count what observed_processes names, nothing else */
const volatile __u32 write_events = 1;
const volatile __u32 sample_shift = 4; /* host time is measured for 1 call in 2^shift */

/* Read and, for ended processes, cleared by agent/accounting.py. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, struct aggregate_key);
	__type(value, struct aggregate);
} aggregates SEC(".maps");

/* Calls that found `aggregates` full: op × data type, so that the node's totals stay exact. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, OP_COUNT * 16);
	__type(key, __u32);
	__type(value, struct aggregate);
} overflow_totals SEC(".maps");

/* Communicators that made a call, by process and address; read by agent/communicators.py. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 16384);
	__type(key, struct communicator_key);
	__type(value, struct communicator);
} communicators SEC(".maps");

/* Filled by the loader, one slot a library. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 256);
	__type(key, __u32);
	__type(value, struct comm_layout);
} layouts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, __u8);
} observed_processes SEC(".maps");

/* Host time inside the call, by op. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, OP_COUNT);
	__type(key, __u32);
	__type(value, struct enqueue_time);
} enqueue_times SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, STAT_COUNT);
	__type(key, __u32);
	__type(value, __u64);
} stats SEC(".maps");

/* One call_event a call, for time lines; never woken up, read by polling. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 8 * 1024 * 1024);
} call_events SEC(".maps");

/* Communicators coming and going: few, never crowded out by calls, and the reader is woken for each. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1024 * 1024);
} lifecycle_events SEC(".maps");

/* Sampled calls under way, by thread; only where there is no session program. */
struct call_under_way {
	__u64 start_ns;
	__u32 op;
	__u32 reserved;
};
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 8192);
	__type(key, __u32);
	__type(value, struct call_under_way);
} calls_under_way SEC(".maps");

/* Init calls under way, by thread, between entry and return. */
struct init_under_way {
	__u64 start_ns;
	__u64 new_comm; /* where the pointer will be stored */
	__u64 parent;
	__s32 nranks;
	__s32 rank;
	__u32 has_unique_id;
	__u32 reserved;
	__u8 unique_id[UNIQUE_ID_BYTES];
};
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, struct init_under_way);
} inits_under_way SEC(".maps");

/* Numbers communicators. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} instance_counter SEC(".maps");

static __always_inline void count(__u32 stat)
{
	__u64 *value = bpf_map_lookup_elem(&stats, &stat);

	if (value)
		__sync_fetch_and_add(value, 1);
}

struct thread {
	__u32 tgid;
	__u32 tid;
};

/* The calling thread as the reader sees it; false when this process is not to be observed. */
static __always_inline int observed_thread(struct thread *thread)
{
	if (pid_namespace_inode) {
		struct bpf_pidns_info info = {};

		if (bpf_get_ns_current_pid_tgid(pid_namespace_device, pid_namespace_inode, &info, sizeof(info))) {
			count(STAT_FOREIGN_PID_NAMESPACE);
			return 0;
		}
		thread->tgid = info.tgid;
		thread->tid = info.pid;
	} else {
		__u64 both = bpf_get_current_pid_tgid();

		thread->tgid = both >> 32;
		thread->tid = (__u32)both;
	}
	if (only_observed_processes && !bpf_map_lookup_elem(&observed_processes, &thread->tgid)) {
		count(STAT_FILTERED);
		return 0;
	}
	return 1;
}

static __always_inline __u32 log2_floor(__u64 value)
{
	__u32 result = 0;

	if (value >> 32) { value >>= 32; result += 32; }
	if (value >> 16) { value >>= 16; result += 16; }
	if (value >> 8) { value >>= 8; result += 8; }
	if (value >> 4) { value >>= 4; result += 4; }
	if (value >> 2) { value >>= 2; result += 2; }
	if (value >> 1) result += 1;
	return result;
}

/* Bucket b holds (2^(b-1), 2^b]. */
static __always_inline __u8 size_bucket(__u64 bytes)
{
	return bytes <= 1 ? 0 : log2_floor(bytes - 1) + 1;
}

/* log2 of an element's bytes, four bits a ncclDataType_t from Int8 (0) to Float8e5m2 (11). */
#define DATA_TYPE_SHIFTS 0x001321332200ULL
#define DATA_TYPES 12

static __noinline __s32 read_field(__u64 comm, __u32 offset)
{
	__s32 value = -1;

	if (offset != NO_OFFSET)
		bpf_probe_read_user(&value, sizeof(value), (const void *)(comm + offset));
	return value;
}

/*
 * Read a communicator's identity from its struct.  It is confirmed when both magics hold and the rank lies within
 * the number of ranks; a non-blocking init may not have come that far yet.
 */
static __noinline int read_identity(struct communicator *communicator, __u64 comm)
{
	__u32 library;
	struct comm_layout *layout;
	struct identity identity = {.node = -1, .n_nodes = -1, .local_rank = -1, .local_ranks = -1, .bus_id = -1};
	__u64 magic = 0;

	if (!communicator)
		return 0;
	library = communicator->library;
	layout = bpf_map_lookup_elem(&layouts, &library);
	if (!layout || !layout->known)
		return 0;
	if (bpf_probe_read_user(&magic, sizeof(magic), (const void *)comm) || magic != COMMUNICATOR_MAGIC)
		return 0;
	if (layout->end_magic != NO_OFFSET &&
	    (bpf_probe_read_user(&magic, sizeof(magic), (const void *)(comm + layout->end_magic)) ||
	     magic != COMMUNICATOR_MAGIC))
		return 0;
	if (bpf_probe_read_user(&identity.comm_hash, sizeof(__u64), (const void *)(comm + layout->comm_hash)))
		return 0;
	if (layout->bus_id != NO_OFFSET)
		bpf_probe_read_user(&identity.bus_id, sizeof(__s64), (const void *)(comm + layout->bus_id));
	identity.rank = read_field(comm, layout->rank);
	identity.nranks = read_field(comm, layout->nranks);
	identity.cuda_dev = read_field(comm, layout->cuda_dev);
	identity.nvml_dev = read_field(comm, layout->nvml_dev);
	identity.node = read_field(comm, layout->node);
	identity.n_nodes = read_field(comm, layout->n_nodes);
	identity.local_rank = read_field(comm, layout->local_rank);
	identity.local_ranks = read_field(comm, layout->local_ranks);
	if (identity.nranks < 1 || identity.rank < 0 || identity.rank >= identity.nranks)
		return 0;
	/* The transport phase of init fills these last; before it, zero nodes mean "not yet". */
	if (layout->n_nodes != NO_OFFSET && identity.n_nodes < 1)
		return 0;
	communicator->identity = identity;
	communicator->confirmed = 1;
	return 1;
}

/* Tell the reader that a communicator came, was confirmed or went. */
static __noinline int write_lifecycle(struct communicator *communicator, __u64 comm, __u32 kind,
				      struct thread *thread)
{
	struct lifecycle_event *event;

	if (!communicator || !thread)
		return 0;
	event = bpf_ringbuf_reserve(&lifecycle_events, sizeof(*event), 0);
	if (!event) {
		count(STAT_LIFECYCLE_RING_FULL);
		return 0;
	}
	__builtin_memset(event, 0, sizeof(*event));
	event->time_ns = bpf_ktime_get_ns();
	event->comm = comm;
	event->tgid = thread->tgid;
	event->tid = thread->tid;
	event->instance = communicator->instance;
	event->kind = kind;
	event->nranks = -1;
	event->rank = -1;
	event->library = communicator->library;
	event->confirmed = communicator->confirmed;
	event->identity = communicator->identity;
	bpf_ringbuf_submit(event, BPF_RB_FORCE_WAKEUP);
	return 0;
}

static __always_inline __u32 next_instance(void)
{
	__u32 zero = 0;
	__u32 *counter = bpf_map_lookup_elem(&instance_counter, &zero);

	return counter ? __sync_fetch_and_add(counter, 1) + 1 : 0;
}

/* Make the entry of a communicator that was not known, or whose address is used again after its end. */
static __noinline struct communicator *add_communicator(struct communicator_key *key, __u32 library)
{
	struct communicator fresh = {};

	if (!key)
		return 0;
	fresh.first_ns = bpf_ktime_get_ns();
	fresh.instance = next_instance();
	fresh.library = library;
	fresh.identity.rank = -1;
	fresh.identity.nranks = -1;
	/* Another thread may have been faster: then its entry is the communicator's. */
	bpf_map_update_elem(&communicators, key, &fresh, BPF_NOEXIST);
	return bpf_map_lookup_elem(&communicators, key);
}

#define IDENTITY_ATTEMPTS 200

/* The communicator of a call that is new, unconfirmed or used again: everything the hot path leaves out. */
static __noinline struct communicator *settle_communicator(struct communicator_key *key, __u32 library,
							     struct thread *thread)
{
	struct communicator *communicator;
	__u32 kind = LIFECYCLE_CONFIRMED;

	if (!key || !thread)
		return 0;
	communicator = bpf_map_lookup_elem(&communicators, key);
	if (communicator && communicator->destroyed_ns) {
		bpf_map_delete_elem(&communicators, key);
		communicator = 0;
	}
	if (!communicator) {
		communicator = add_communicator(key, library);
		kind = LIFECYCLE_SEEN;
	}
	if (!communicator) {
		count(STAT_COMMUNICATORS_FULL);
		return 0;
	}
	if (!communicator->confirmed && communicator->attempts < IDENTITY_ATTEMPTS) {
		communicator->attempts++;
		read_identity(communicator, key->comm);
	}
	if (kind == LIFECYCLE_SEEN || communicator->confirmed)
		write_lifecycle(communicator, key->comm, kind, thread);
	return communicator;
}

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
		call->comm = argument(&arguments, COOKIE_PLACE(cookie, PLACE_COMM));
		call->stream = argument(&arguments, COOKIE_PLACE(cookie, PLACE_STREAM));
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

static __always_inline void add_aggregate(struct call *call, __u32 tgid, __u32 instance)
{
	struct aggregate_key key = {
		.tgid = tgid,
		.instance = instance,
		.peer = call->peer,
		.op = call->op,
		.data_type = call->data_type,
		.size_bucket = size_bucket(call->payload_bytes),
	};
	struct aggregate *total = bpf_map_lookup_elem(&aggregates, &key);

	if (!total) {
		struct aggregate zero = {};

		bpf_map_update_elem(&aggregates, &key, &zero, BPF_NOEXIST);
		total = bpf_map_lookup_elem(&aggregates, &key);
		if (!total) {
			add_overflow(call);
			return;
		}
	}
	__sync_fetch_and_add(&total->calls, 1);
	__sync_fetch_and_add(&total->payload_bytes, call->payload_bytes);
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
	struct communicator *communicator = 0;
	struct call_event *event;
	__u64 sequence = 0;
	__u32 instance = 0;
	__u64 now;

	count(STAT_CALLS);
	if (!observed_thread(thread))
		return 0;
	if (!read_call(ctx, cookie, call)) {
		count(STAT_ARGUMENTS_UNREADABLE);
		return 0;
	}
	now = bpf_ktime_get_ns();
	if (call->comm) {
		struct communicator_key key = {.comm = call->comm, .tgid = thread->tgid};

		communicator = bpf_map_lookup_elem(&communicators, &key);
		if (!communicator || communicator->destroyed_ns ||
		    (!communicator->confirmed && communicator->attempts < IDENTITY_ATTEMPTS))
			communicator = settle_communicator(&key, call->library, thread);
		if (communicator) {
			sequence = __sync_fetch_and_add(&communicator->sequence, 1) + 1;
			communicator->last_ns = now;
			instance = communicator->instance;
		}
	}
	add_aggregate(call, thread->tgid, instance);
	if (write_events) {
		event = bpf_ringbuf_reserve(&call_events, sizeof(*event), 0);
		if (event) {
			event->time_ns = now;
			event->comm = call->comm;
			event->stream = call->stream;
			event->payload_bytes = call->payload_bytes;
			event->tgid = thread->tgid;
			event->tid = thread->tid;
			event->instance = instance;
			event->sequence = sequence;
			event->peer = call->peer;
			event->cpu = bpf_get_smp_processor_id();
			event->op = call->op;
			event->data_type = call->data_type;
			event->library = call->library;
			event->reserved = 0;
			bpf_ringbuf_submit(event, BPF_RB_NO_WAKEUP);
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

/* Entry of a collective.  With a return probe beside it, sampled calls leave their start time for it. */
SEC("uprobe")
int collective_entry(struct registers *ctx)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	struct thread thread;
	struct call call;
	__u64 start_ns = account(ctx, cookie, &call, &thread);

	if (start_ns) {
		struct call_under_way under_way = {.start_ns = start_ns, .op = call.op};

		bpf_map_update_elem(&calls_under_way, &thread.tid, &under_way, BPF_ANY);
	}
	return 0;
}

SEC("uretprobe")
int collective_return(struct registers *ctx)
{
	struct call_under_way *under_way;
	struct thread thread;

	(void)ctx;
	count(STAT_RETURNS);
	if (!observed_thread(&thread))
		return 0;
	under_way = bpf_map_lookup_elem(&calls_under_way, &thread.tid);
	if (!under_way)
		return 0;
	add_enqueue_time(under_way->op & (OP_COUNT - 1), under_way->start_ns);
	bpf_map_delete_elem(&calls_under_way, &thread.tid);
	return 0;
}

/* Entry of a call that makes communicators. */
SEC("uprobe")
int init_entry(struct registers *ctx)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	__u32 id_place = COOKIE_PLACE(cookie, PLACE_UNIQUE_ID);
	struct init_under_way init = {};
	struct arguments arguments;
	struct thread thread;
	__u64 id;

	count(STAT_LIFECYCLE);
	if (!observed_thread(&thread))
		return 0;
	take_arguments(&arguments, ctx, cookie);
	init.start_ns = bpf_ktime_get_ns();
	init.new_comm = argument(&arguments, COOKIE_PLACE(cookie, PLACE_NEW_COMM));
	init.parent = argument(&arguments, COOKIE_PLACE(cookie, PLACE_PARENT));
	init.nranks = -1;
	init.rank = -1;
	if (COOKIE_PLACE(cookie, PLACE_RANKS) != PLACE_NONE)
		init.nranks = argument(&arguments, COOKIE_PLACE(cookie, PLACE_RANKS));
	if (COOKIE_PLACE(cookie, PLACE_RANK) != PLACE_NONE)
		init.rank = argument(&arguments, COOKIE_PLACE(cookie, PLACE_RANK));
	if (id_place != PLACE_NONE) {
		/* By value on x86-64 the 128 bytes are the stack argument; otherwise the place holds a pointer. */
		if (COOKIE_ID_BY_VALUE(cookie) && id_place >= PLACE_STACK)
			id = stack_slot(&arguments, id_place - PLACE_STACK);
		else
			id = argument(&arguments, id_place);
		init.has_unique_id = !bpf_probe_read_user(init.unique_id, UNIQUE_ID_BYTES, (const void *)id);
	}
	if (arguments.failed) {
		count(STAT_ARGUMENTS_UNREADABLE);
		return 0;
	}
	bpf_map_update_elem(&inits_under_way, &thread.tid, &init, BPF_ANY);
	return 0;
}

/* One new communicator at the return of an init call. */
static __noinline int settle_init(struct init_under_way *init, __u64 comm, __u64 cookie, __s32 result,
				  struct thread *thread)
{
	struct communicator_key key = {.comm = comm};
	struct communicator *communicator = 0;
	struct lifecycle_event *event;

	if (!init || !thread)
		return 0;
	key.tgid = thread->tgid;
	if (comm) {
		communicator = bpf_map_lookup_elem(&communicators, &key);
		/* An entry older than this call belongs to an earlier communicator at the same address. */
		if (communicator && communicator->first_ns < init->start_ns) {
			bpf_map_delete_elem(&communicators, &key);
			communicator = 0;
		}
		if (!communicator)
			communicator = add_communicator(&key, COOKIE_LIBRARY(cookie));
		if (!communicator)
			count(STAT_COMMUNICATORS_FULL);
		else if (!communicator->confirmed)
			read_identity(communicator, comm);
	}
	event = bpf_ringbuf_reserve(&lifecycle_events, sizeof(*event), 0);
	if (!event) {
		count(STAT_LIFECYCLE_RING_FULL);
		return 0;
	}
	__builtin_memset(event, 0, sizeof(*event));
	event->time_ns = bpf_ktime_get_ns();
	event->comm = comm;
	event->parent = init->parent;
	event->tgid = thread->tgid;
	event->tid = thread->tid;
	event->kind = COOKIE_KIND(cookie);
	event->result = result;
	event->nranks = init->nranks;
	event->rank = init->rank;
	event->library = COOKIE_LIBRARY(cookie);
	event->has_unique_id = init->has_unique_id;
	__builtin_memcpy(event->unique_id, init->unique_id, UNIQUE_ID_BYTES);
	if (communicator) {
		event->instance = communicator->instance;
		event->confirmed = communicator->confirmed;
		event->identity = communicator->identity;
	}
	bpf_ringbuf_submit(event, BPF_RB_FORCE_WAKEUP);
	return 0;
}

#define INIT_ALL_MAX 64

SEC("uretprobe")
int init_return(struct registers *ctx)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	struct init_under_way *init;
	struct thread thread;
	__u64 comm = 0;
	__s32 result = (__s32)RETURN_VALUE(ctx);

	count(STAT_LIFECYCLE);
	if (!observed_thread(&thread))
		return 0;
	init = bpf_map_lookup_elem(&inits_under_way, &thread.tid);
	if (!init)
		return 0;
	if (COOKIE_KIND(cookie) == LIFECYCLE_INIT_ALL) {
		for (int i = 0; i < INIT_ALL_MAX; i++) {
			if (i >= init->nranks)
				break;
			if (bpf_probe_read_user(&comm, sizeof(comm), (const void *)(init->new_comm + 8ULL * i)))
				break;
			settle_init(init, comm, cookie, result, &thread);
		}
	} else {
		if (bpf_probe_read_user(&comm, sizeof(comm), (const void *)init->new_comm))
			comm = 0;
		settle_init(init, comm, cookie, result, &thread);
	}
	bpf_map_delete_elem(&inits_under_way, &thread.tid);
	return 0;
}

/* A communicator ends, is revoked, suspended or resumed. */
SEC("uprobe")
int end_entry(struct registers *ctx)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	__u32 kind = COOKIE_KIND(cookie);
	struct communicator_key key = {};
	struct communicator *communicator;
	struct thread thread;

	count(STAT_LIFECYCLE);
	if (!observed_thread(&thread))
		return 0;
	key.comm = FIRST_ARGUMENT(ctx);
	key.tgid = thread.tgid;
	communicator = bpf_map_lookup_elem(&communicators, &key);
	if (!communicator)
		return 0;
	if (kind == LIFECYCLE_DESTROY || kind == LIFECYCLE_ABORT)
		communicator->destroyed_ns = bpf_ktime_get_ns();
	write_lifecycle(communicator, key.comm, kind, &thread);
	return 0;
}
