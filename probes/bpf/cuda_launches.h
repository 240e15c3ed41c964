/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What stands on which stream: the tables of cuda.h, and its probes on NCCL (cuda_note, cuda_finish and the plans).
 */
#ifndef RAILSCOPE_CUDA_LAUNCHES_H
#define RAILSCOPE_CUDA_LAUNCHES_H

#include "completion.h"
#include "cuda_structs.h"

#define CUDA_COMMUNICATORS 16384
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, CUDA_COMMUNICATORS);
	__type(key, struct communicator_key);
	__type(value, struct cuda_communicator);
} cuda_communicators SEC(".maps");

/* A communicator has a range of its own: they are shared out as the places of shapes.h are. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1 << (CUDA_RANGE_BITS + CUDA_CALL_BITS));
	__type(key, __u32);
	__type(value, struct cuda_call);
} cuda_calls SEC(".maps");

#define CUDA_STREAMS 8192
/* The number of the communicator that has the range; 0: free.  The reader frees it with the communicator. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1 << CUDA_RANGE_BITS);
	__type(key, __u32);
	__type(value, __u32);
} cuda_ranges SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, CUDA_STREAMS);
	__type(key, struct cuda_stream_key);
	__type(value, struct cuda_stream);
} cuda_streams SEC(".maps");

/* All zero: too large for a program's stack. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct cuda_stream);
} cuda_fresh_stream SEC(".maps");

/* Events that stand behind something. */
#define CUDA_MARKS 32768
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, CUDA_MARKS);
	__type(key, struct cuda_handle_key);
	__type(value, struct cuda_stream);
} cuda_marks SEC(".maps");

/* Processes that launched something: CUDA's functions of all others are none of our business. */
#define CUDA_PROCESSES 4096
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, CUDA_PROCESSES);
	__type(key, __u32);
	__type(value, struct owner);
} cuda_processes SEC(".maps");

/* Calls of CUDA's functions whose return matters, by thread. */
struct cuda_under_way {
	__u64 handle;
	__u64 generation;
	__u32 tgid;
	__u32 kind;
	struct owner owner;
};
ASSERT_SIZE(cuda_under_way, 32);

#define CUDA_CALLS 4096
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, CUDA_CALLS);
	__type(key, __u32);
	__type(value, struct cuda_under_way);
} cuda_calls_under_way SEC(".maps");

/* From enqueue to proof, by op. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, OP_COUNT);
	__type(key, __u32);
	__type(value, struct distribution);
} cuda_durations SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, CUDA_STAT_COUNT);
	__type(key, __u32);
	__type(value, __u64);
} cuda_stats SEC(".maps");

/* Numbers communicators, streams and records. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} cuda_counter SEC(".maps");

static __always_inline void count_cuda_more(__u32 stat, __u64 times)
{
	__u64 *value = bpf_map_lookup_elem(&cuda_stats, &stat);

	if (value)
		__sync_fetch_and_add(value, times);
}

static __always_inline void count_cuda(__u32 stat)
{
	count_cuda_more(stat, 1);
}

static __always_inline __u64 next_cuda_number(void)
{
	__u32 zero = 0;
	__u64 *counter = bpf_map_lookup_elem(&cuda_counter, &zero);

	return counter ? __sync_fetch_and_add(counter, 1) + 1 : 0;
}

static __always_inline struct cuda_call *cuda_call_of(__u32 range, __u64 call)
{
	__u32 at = ((range - 1) & ((1 << CUDA_RANGE_BITS) - 1)) << CUDA_CALL_BITS |
		   ((__u32)call & ((1 << CUDA_CALL_BITS) - 1));

	return range ? bpf_map_lookup_elem(&cuda_calls, &at) : 0;
}

/* A free range for a new communicator of the calling process, as cuda_communicator has it. */
static __noinline __u32 claim_range(__u32 tgid, __u32 number)
{
	__u64 place = take_place(answerable(), tgid, SHARED_CUDA_RANGES, 1 << CUDA_RANGE_BITS);
	__u32 *owner;
	__u32 at;

	if (!place)
		return 0;
#pragma unroll /* in older kernels no loop may go back from a call */
	for (int i = 0; i < PLACE_ATTEMPTS; i++) {
		at = bpf_get_prandom_u32() & ((1 << CUDA_RANGE_BITS) - 1);
		owner = bpf_map_lookup_elem(&cuda_ranges, &at);
		if (owner && !*owner && !__sync_val_compare_and_swap(owner, 0, number))
			return at + 1;
	}
	return_place((__u32)place, tgid, SHARED_CUDA_RANGES);
	return 0;
}

static __always_inline __u64 cuda_call_owner(__u32 number, __u64 call)
{
	return (__u64)number << 32 | (__u32)call;
}

/*
 * The entry of the communicator whose call begins.  The program that counts calls may run before or after this one, so
 * that a communicator at an address that was used before is new either when its entry says that it ended, or when
 * another instance stands there.
 */
static __noinline struct cuda_communicator *cuda_communicator_of(struct communicator_key *key)
{
	struct cuda_communicator *known;
	struct communicator *communicator;
	__u32 instance = 0;

	if (!key)
		return 0;
	communicator = bpf_map_lookup_elem(&communicators, key);
	if (communicator && !communicator->destroyed_ns)
		instance = communicator->instance;
	known = bpf_map_lookup_elem(&cuda_communicators, key);
	if (!known) {
		struct cuda_communicator fresh = {.instance = instance, .number = next_cuda_number()};

		put_shared(&cuda_communicators, key, &fresh, &fresh.owner, 0, key->tgid, SHARED_CUDA_COMMUNICATORS,
			   CUDA_COMMUNICATORS);
		known = bpf_map_lookup_elem(&cuda_communicators, key);
		if (!known)
			count_cuda(CUDA_STAT_FULL);
		else if (known->number == fresh.number)
			known->range = claim_range(key->tgid, fresh.number);
		return known;
	}
	if (known->instance && known->instance != instance) {
		known->completed_sequence = 0;
		known->number = next_cuda_number();
		known->finished = known->noted;
		known->launched = known->noted;
		known->completed = known->noted;
		known->several_streams = 0;
		known->captured = 0;
	}
	known->instance = instance;
	return known;
}

/* ncclEnqueueCheck(info), where calls are counted too. */
SEC("uprobe")
int cuda_note(struct registers *ctx)
{
	struct communicator_key key = {};
	struct cuda_communicator *communicator;
	struct cuda_call *call;
	struct thread thread;
	__u64 both[2];
	__u64 info = FIRST_ARGUMENT(ctx);
	__u64 number;
	__u32 op = 0;

	if (!observed_thread(&thread))
		return 0;
	count_cuda(CUDA_STAT_NOTES);
	/* struct ncclInfo (nccl.bpf.c): the function first, communicator and stream at 56. */
	if (read_user(&op, 4, info) || read_user(both, sizeof(both), info + 56)) {
		count_cuda(CUDA_STAT_UNREADABLE);
		return 0;
	}
	key.comm = both[0];
	key.tgid = thread.tgid;
	communicator = cuda_communicator_of(&key);
	if (!communicator)
		return 0;
	if (communicator->noted != communicator->finished && communicator->stream != both[1])
		communicator->several_streams = 1;
	communicator->stream = both[1];
	number = __sync_fetch_and_add(&communicator->noted, 1) + 1;
	call = cuda_call_of(communicator->range, number);
	if (!call)
		return 0;
	call->owner = 0;
	call->time_and_op = (bpf_ktime_get_ns() & ~15ULL) | (op < OP_UNKNOWN ? op : OP_UNKNOWN);
	__sync_lock_test_and_set(&call->owner, cuda_call_owner(communicator->number, number));
	return 0;
}

static __always_inline int note_plan(struct registers *ctx)
{
	__u32 library = COOKIE_LIBRARY(bpf_get_attach_cookie(ctx));
	struct communicator_key key = {.comm = FIRST_ARGUMENT(ctx)};
	struct cuda_communicator *communicator;
	const struct internals_layout *layout;
	struct thread thread;
	__u8 persistent = 0;

	if (!observed_thread(&thread))
		return 0;
	count_cuda(CUDA_STAT_PLANS);
	key.tgid = thread.tgid;
	layout = bpf_map_lookup_elem(&internals_layouts, &library);
	communicator = bpf_map_lookup_elem(&cuda_communicators, &key);
	if (!communicator)
		return 0;
	/* What cannot be told is taken for captured. */
	if (!layout || !layout->known || layout->plan_persistent == NO_OFFSET ||
	    read_user(&persistent, 1, SECOND_ARGUMENT(ctx) + layout->plan_persistent))
		persistent = 1;
	if (persistent)
		communicator->captured = 1;
	return 0;
}

/* ncclLaunchKernel(comm, plan). */
SEC("uprobe")
int cuda_plan(struct registers *ctx)
{
	return note_plan(ctx);
}

/* ncclLaunchCeColl(comm, plan). */
SEC("uprobe")
int cuda_copy_plan(struct registers *ctx)
{
	return note_plan(ctx);
}

/* ncclLaunchRma(comm, plan). */
SEC("uprobe")
int cuda_remote_plan(struct registers *ctx)
{
	return note_plan(ctx);
}

/* Calls (after, last] of a communicator. */
struct cuda_walk {
	__u64 after;
	__u64 last;
	__u64 now;
	__u32 number;
	__u32 range;
};

static __always_inline __u32 begin_cuda_walk(struct cuda_walk *walk)
{
	__u64 most = 1 << CUDA_CALL_BITS;

	if (walk->last - walk->after > most) {
		count_cuda_more(CUDA_STAT_FORGOTTEN, walk->last - walk->after - most);
		walk->after = walk->last - most;
	}
	return walk->last - walk->after;
}

/* A captured call: it does not run, and has no duration. */
static long void_call(__u64 at, struct cuda_walk *walk)
{
	__u64 number = walk->after + at + 1;
	struct cuda_call *call = cuda_call_of(walk->range, number);

	if (call && call->owner == cuda_call_owner(walk->number, number))
		call->time_and_op = 0;
	return 0;
}

static long complete_call(__u64 at, struct cuda_walk *walk)
{
	__u64 number = walk->after + at + 1;
	__u64 owner = cuda_call_owner(walk->number, number);
	struct cuda_call *call = cuda_call_of(walk->range, number);
	struct distribution *duration;
	__u64 enqueued_ns, elapsed_ns;
	__u32 op;

	if (!call) {
		count_cuda(CUDA_STAT_FORGOTTEN);
		return 0;
	}
	enqueued_ns = call->time_and_op;
	/* Two threads may find the same events complete: a call counts for the first. */
	if (__sync_val_compare_and_swap(&call->owner, owner, 0) != owner) {
		count_cuda(CUDA_STAT_FORGOTTEN);
		return 0;
	}
	op = enqueued_ns & (OP_COUNT - 1);
	enqueued_ns &= ~15ULL;
	duration = bpf_map_lookup_elem(&cuda_durations, &op);
	if (!duration || !enqueued_ns)
		return 0;
	elapsed_ns = walk->now > enqueued_ns ? walk->now - enqueued_ns : 0;
	add_to(duration, elapsed_ns, FIRST_DURATION);
	return 0;
}

static __noinline struct cuda_stream *cuda_stream_of(struct cuda_stream_key *key)
{
	struct cuda_stream *known;
	struct cuda_stream *fresh;
	struct owner owner = {};
	__u32 tgid, zero = 0;
	int added;

	if (!key)
		return 0;
	known = bpf_map_lookup_elem(&cuda_streams, key);
	if (known)
		return known;
	tgid = key->tgid;
	if (!bpf_map_lookup_elem(&cuda_processes, &tgid))
		put_shared(&cuda_processes, &tgid, &owner, &owner, 0, tgid, SHARED_CUDA_PROCESSES, CUDA_PROCESSES);
	fresh = bpf_map_lookup_elem(&cuda_fresh_stream, &zero);
	added = fresh && !put_shared(&cuda_streams, key, fresh, &owner, 0, tgid, SHARED_CUDA_STREAMS, CUDA_STREAMS);
	known = bpf_map_lookup_elem(&cuda_streams, key);
	if (!known) {
		count_cuda(CUDA_STAT_FULL);
		return 0;
	}
	known->stream = key->stream;
	if (added) {
		known->owner = owner;
		known->number = next_cuda_number();
	}
	return known;
}

/* Let a stream know that all calls of a communicator so far stand on it, or before something that does. */
static __noinline int put_on_stream(struct cuda_stream_key *key, struct communicator_key *whose, __u64 sequence,
				    __s32 device)
{
	struct cuda_communicator *communicator;
	struct cuda_stream *stream;
	struct cuda_behind *behind = 0;
	int i;

	if (!key || !whose)
		return 0;
	communicator = bpf_map_lookup_elem(&cuda_communicators, whose);
	stream = cuda_stream_of(key);
	if (!communicator || !stream)
		return 0;
	if (key->stream == CUDA_LEGACY_STREAM) {
		if (stream->device && stream->device != device)
			stream->ambiguous = 1;
		stream->device = device;
	}
	for (i = 0; i < CUDA_BEHIND && !behind; i++) {
		struct cuda_behind *one = &stream->behind[i];

		if (one->comm == whose->comm || (!one->comm && !__sync_val_compare_and_swap(&one->comm, 0, whose->comm)))
			behind = one;
	}
	if (!behind) {
		count_cuda(CUDA_STAT_FULL);
		return 0;
	}
	if (behind->number != communicator->number) {
		/* Somebody may be copying this: what is there must at no time be true of another communicator only. */
		__sync_lock_test_and_set(&behind->launched, 0);
		__sync_lock_test_and_set(&behind->sequence, 0);
		__sync_lock_test_and_set(&behind->number, communicator->number);
	}
	behind->sequence = sequence;
	__sync_lock_test_and_set(&behind->launched, communicator->launched);
	__sync_fetch_and_add(&stream->launches, 1);
	return 0;
}

/* ncclLaunchFinish(comm): what the group holds for this communicator was launched. */
SEC("uprobe")
int cuda_finish(struct registers *ctx)
{
	struct communicator_key key = {.comm = FIRST_ARGUMENT(ctx)};
	struct cuda_stream_key stream = {};
	struct cuda_communicator *known;
	struct communicator *communicator;
	struct thread thread;
	__u32 left_out;

	if (!observed_thread(&thread))
		return 0;
	count_cuda(CUDA_STAT_FINISHES);
	key.tgid = thread.tgid;
	known = bpf_map_lookup_elem(&cuda_communicators, &key);
	communicator = bpf_map_lookup_elem(&communicators, &key);
	if (!known || !communicator || known->noted == known->finished)
		return 0;
	if (communicator->destroyed_ns || (known->instance && known->instance != communicator->instance))
		return 0;
	known->instance = communicator->instance;
	known->finished = known->noted;
	if (known->captured) {
		struct cuda_walk walk = {.after = known->launched,
					 .last = known->noted,
					 .number = known->number,
					 .range = known->range};

		bpf_loop(begin_cuda_walk(&walk), void_call, &walk, 0);
		known->launched = known->noted;
	}
	stream.stream = known->stream ? known->stream : CUDA_LEGACY_STREAM;
	left_out = known->captured || known->several_streams || stream.stream == CUDA_PER_THREAD_STREAM;
	known->captured = 0;
	known->several_streams = 0;
	/* Which device's legacy stream it is, only a communicator that could be read tells. */
	if (stream.stream == CUDA_LEGACY_STREAM && !communicator->confirmed)
		left_out = 1;
	/* What is left out is proved with the communicator's next launch, which stands behind it. */
	if (left_out)
		return 0;
	known->launched = known->noted;
	stream.tgid = thread.tgid;
	put_on_stream(&stream, &key, calls_so_far(&key, communicator), communicator->identity.cuda_dev + 1);
	return 0;
}

#endif
