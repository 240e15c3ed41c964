/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What a job itself learns of completion from CUDA: part of nccl_internals.bpf.c.
 *
 * An event that was recorded on a stream behind a collective, and that is found to have happened, proves that the
 * collective is complete; so does a stream that was waited for.  That is late (whenever somebody asked), but it holds
 * for every transport, NVLink alone included, where no proxy tells anything.
 *
 * Four steps, each with its own probe:
 *   cuda_note    at ncclEnqueueCheck: a call will go to this stream; it is numbered and its time kept
 *   cuda_finish  at ncclLaunchFinish: all calls of the group have been put on the stream.  A call alone proves nothing:
 *                within a group, or on a communicator that does not block, it is launched later than it returns
 *   record       an event now stands behind what had been launched on the stream when the call began.  That counts from
 *                the return of the call on: until then a question about the event is answered for its record before
 *   query, wait  the call returned 0 and nobody has recorded the event anew: what stood before it is complete
 *
 * NCCL puts the operations of one communicator one behind the other, whatever streams they are given (ncclLaunchPrepare,
 * 2.18 to 2.32), so the latest of a communicator's calls that is proved complete proves those before it.
 *
 * Nothing is taken from what captures: a captured call does not run (cuda_plan sees it), and CUDA answers questions
 * about a captured event with an error.  An event with flags may be recorded by a graph: it is left alone.
 * The legacy default stream has one name on every device: it is followed while NCCL uses it on one device only, and
 * what else it waits for is not used.  The per-thread default stream has one name for every thread: not followed.
 * An event shared between processes (cudaIpcGetEventHandle) is taken for one of the process that recorded it.
 */
#ifndef RAILSCOPE_CUDA_H
#define RAILSCOPE_CUDA_H

#include "completion.h"

#define CUDA_SUCCESS 0
#define CUDA_LEGACY_STREAM 1 /* cudaStreamLegacy */
#define CUDA_PER_THREAD_STREAM 2
#define CUDA_CALL_BITS 10 /* calls of one communicator that are followed at once */
#define CUDA_COMMUNICATOR_BITS 7
#define CUDA_BEHIND 8 /* communicators followed on one stream */

/* Attach cookie of a CUDA function: what it does, and whether stream 0 is the thread's own there (*_ptsz). */
#define CUDA_KIND(cookie) ((__u32)(cookie) & 0xff)
#define CUDA_PER_THREAD(cookie) (((cookie) >> 8) & 1)

enum cuda_kind {
	CUDA_RECORD = 0, /* (event, stream) */
	CUDA_RECORD_FLAGS = 1, /* (event, stream, flags) */
	CUDA_ASK_EVENT = 2, /* (event): query, or wait */
	CUDA_ASK_STREAM = 3, /* (stream) */
	CUDA_DROP_EVENT = 4,
	CUDA_DROP_STREAM = 5,
};

/* By communicator_key.  Calls are numbered here from 1, as far as these probes saw them. */
struct cuda_communicator {
	__u64 stream; /* of the latest call */
	__u64 noted;
	__u64 finished; /* noted when the latest group ended */
	__u64 launched; /* known to stand on a stream that is followed */
	__u64 completed;
	__u64 completed_sequence; /* the communicator's own number of that call */
	__u64 completed_ns; /* when it was proved */
	__u32 instance; /* 0: not known yet */
	__u32 number; /* of this entry's present communicator: no other has it */
	__u32 several_streams; /* calls of the present group went to different streams */
	__u32 captured; /* they are captured */
};

/* A call that is not proved complete. */
struct cuda_call {
	__u64 owner; /* number of the communicator, and the low half of that of the call; 0: free */
	__u64 time_and_op; /* enqueue time, ns, the op in the low 4 bits; 0: it never ran */
};

struct cuda_behind {
	__u64 comm; /* 0: free */
	__u64 launched;
	__u64 sequence;
	__u32 number;
	__u32 reserved;
};

/* What was launched on a stream; copied whole into the mark of an event that is recorded there. */
struct cuda_stream {
	__u64 launches;
	__u64 proved; /* launches of which completion was proved */
	__u64 stream;
	__u64 generation; /* of a mark: which record it belongs to */
	__s32 device; /* of the legacy stream: where NCCL uses it, from 1; 0: not known */
	__u32 ambiguous;
	__u32 armed; /* of a mark: the call that records has returned */
	__u32 reserved;
	struct cuda_behind behind[CUDA_BEHIND];
};

enum cuda_handle {
	CUDA_HANDLE_EVENT = 0,
	CUDA_HANDLE_THREAD = 1, /* a thread that waits for a stream */
};

struct cuda_handle_key {
	__u64 handle;
	__u32 tgid;
	__u32 kind;
};

struct cuda_stream_key {
	__u64 stream;
	__u32 tgid;
	__u32 reserved;
};

enum cuda_stat {
	CUDA_STAT_NOTES, /* runs at a call of NCCL */
	CUDA_STAT_PLANS, /* runs at a launch */
	CUDA_STAT_FINISHES, /* runs at the end of launching */
	CUDA_STAT_CALLS, /* runs at entries of CUDA's functions */
	CUDA_STAT_RETURNS, /* runs at their returns */
	CUDA_STAT_PROOFS, /* events and streams that proved something */
	CUDA_STAT_FORGOTTEN, /* calls without a duration: too many were not complete at once */
	CUDA_STAT_FULL, /* not followed: a table was full */
	CUDA_STAT_UNREADABLE,
	CUDA_STAT_COUNT,
};

ASSERT_SIZE(cuda_communicator, 72);
ASSERT_SIZE(cuda_call, 16);
ASSERT_SIZE(cuda_behind, 32);
ASSERT_SIZE(cuda_stream, 304);
ASSERT_SIZE(cuda_handle_key, 16);
ASSERT_SIZE(cuda_stream_key, 16);

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 16384);
	__type(key, struct communicator_key);
	__type(value, struct cuda_communicator);
} cuda_communicators SEC(".maps");

/* Each communicator has a range of its own, as long as no more are there than ranges. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1 << (CUDA_COMMUNICATOR_BITS + CUDA_CALL_BITS));
	__type(key, __u32);
	__type(value, struct cuda_call);
} cuda_calls SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 8192);
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
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 32768);
	__type(key, struct cuda_handle_key);
	__type(value, struct cuda_stream);
} cuda_marks SEC(".maps");

/* Processes that launched something: CUDA's functions of all others are none of our business. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, __u8);
} cuda_processes SEC(".maps");

/* Calls of CUDA's functions whose return matters, by thread. */
struct cuda_under_way {
	__u64 handle;
	__u64 generation;
	__u32 tgid;
	__u32 kind;
};
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
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

/* Numbers communicators and records. */
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

static __always_inline struct cuda_call *cuda_call_of(__u32 number, __u64 call)
{
	__u32 at = (number & ((1 << CUDA_COMMUNICATOR_BITS) - 1)) << CUDA_CALL_BITS |
		   ((__u32)call & ((1 << CUDA_CALL_BITS) - 1));

	return bpf_map_lookup_elem(&cuda_calls, &at);
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

		bpf_map_update_elem(&cuda_communicators, key, &fresh, BPF_NOEXIST);
		known = bpf_map_lookup_elem(&cuda_communicators, key);
		if (!known)
			count_cuda(CUDA_STAT_FULL);
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

	count_cuda(CUDA_STAT_NOTES);
	if (!observed_thread(&thread))
		return 0;
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
	call = cuda_call_of(communicator->number, number);
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

	count_cuda(CUDA_STAT_PLANS);
	if (!observed_thread(&thread))
		return 0;
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
	__u32 reserved;
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
	struct cuda_call *call = cuda_call_of(walk->number, number);

	if (call && call->owner == cuda_call_owner(walk->number, number))
		call->time_and_op = 0;
	return 0;
}

static long complete_call(__u64 at, struct cuda_walk *walk)
{
	__u64 number = walk->after + at + 1;
	__u64 owner = cuda_call_owner(walk->number, number);
	struct cuda_call *call = cuda_call_of(walk->number, number);
	struct distribution *duration;
	__u64 enqueued_ns, elapsed_ns;
	__u32 op, bucket;

	if (!call)
		return 1;
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
	bucket = elapsed_ns <= 1024 ? 0 : log2_floor(elapsed_ns - 1) - 9;
	if (bucket >= DISTRIBUTION_BUCKETS)
		bucket = DISTRIBUTION_BUCKETS - 1;
	__sync_fetch_and_add(&duration->count, 1);
	__sync_fetch_and_add(&duration->sum, elapsed_ns);
	__sync_fetch_and_add(&duration->buckets[bucket & (DISTRIBUTION_BUCKETS - 1)], 1);
	return 0;
}

static __noinline struct cuda_stream *cuda_stream_of(struct cuda_stream_key *key)
{
	struct cuda_stream *known;
	struct cuda_stream *fresh;
	__u32 zero = 0;
	__u8 one = 1;

	if (!key)
		return 0;
	known = bpf_map_lookup_elem(&cuda_streams, key);
	if (known)
		return known;
	bpf_map_update_elem(&cuda_processes, &key->tgid, &one, BPF_ANY);
	fresh = bpf_map_lookup_elem(&cuda_fresh_stream, &zero);
	if (fresh)
		bpf_map_update_elem(&cuda_streams, key, fresh, BPF_NOEXIST);
	known = bpf_map_lookup_elem(&cuda_streams, key);
	if (known)
		known->stream = key->stream;
	else
		count_cuda(CUDA_STAT_FULL);
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

	count_cuda(CUDA_STAT_FINISHES);
	if (!observed_thread(&thread))
		return 0;
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
		struct cuda_walk walk = {.after = known->launched, .last = known->noted, .number = known->number};

		bpf_loop(begin_cuda_walk(&walk), void_call, &walk, 0);
		known->launched = known->noted;
	}
	left_out = known->captured || known->several_streams;
	known->captured = 0;
	known->several_streams = 0;
	stream.stream = known->stream ? known->stream : CUDA_LEGACY_STREAM;
	/* What is left out is proved with the communicator's next launch, which stands behind it. */
	if (left_out || stream.stream == CUDA_PER_THREAD_STREAM)
		return 0;
	known->launched = known->noted;
	stream.tgid = thread.tgid;
	put_on_stream(&stream, &key, calls_so_far(&key, communicator),
		      communicator->confirmed ? communicator->identity.cuda_dev + 1 : 0);
	return 0;
}

/* What a mark's communicator had launched is complete. */
static __noinline int prove_communicator(struct cuda_behind *behind, __u32 tgid)
{
	struct communicator_key key = {.tgid = tgid};
	struct cuda_communicator *known;
	struct cuda_walk walk = {};
	__u64 completed;

	if (!behind || !behind->launched)
		return 0;
	key.comm = behind->comm;
	known = bpf_map_lookup_elem(&cuda_communicators, &key);
	if (!known || known->number != behind->number)
		return 0;
	completed = known->completed;
	if (completed >= behind->launched)
		return 0;
	/* Whoever loses against another thread leaves the calls to that one, or to the next proof. */
	if (__sync_val_compare_and_swap(&known->completed, completed, behind->launched) != completed)
		return 0;
	if (known->completed_sequence < behind->sequence)
		known->completed_sequence = behind->sequence;
	walk.after = completed;
	walk.last = behind->launched;
	walk.number = behind->number;
	walk.now = bpf_ktime_get_ns();
	known->completed_ns = walk.now;
	bpf_loop(begin_cuda_walk(&walk), complete_call, &walk, 0);
	return 1;
}

/* An event has happened, or a stream has come to where a thread waited for it. */
static __noinline int prove(struct cuda_handle_key *key, __u64 generation)
{
	struct cuda_stream_key stream_key = {};
	struct cuda_stream *mark;
	struct cuda_stream *stream;
	struct cuda_behind behind;
	__u64 launches;
	int i, proved = 0;

	if (!key)
		return 0;
	stream_key.tgid = key->tgid;
	mark = bpf_map_lookup_elem(&cuda_marks, key);
	if (!mark || mark->generation != generation)
		return 0;
	launches = mark->launches;
	stream_key.stream = mark->stream;
	for (i = 0; i < CUDA_BEHIND; i++) {
		behind = mark->behind[i];
		/* Another thread may record the event anew meanwhile, and its memory may serve another mark. */
		if (mark->generation != generation)
			return 0;
		if (!behind.comm)
			break;
		proved |= prove_communicator(&behind, key->tgid);
	}
	stream = bpf_map_lookup_elem(&cuda_streams, &stream_key);
	if (stream && stream->proved < launches)
		stream->proved = launches;
	if (proved)
		count_cuda(CUDA_STAT_PROOFS);
	bpf_map_delete_elem(&cuda_marks, key);
	return 0;
}

static __noinline int drop_mark(struct cuda_handle_key *key)
{
	/* A look-up takes no lock; most handles have no mark. */
	if (key && bpf_map_lookup_elem(&cuda_marks, key))
		bpf_map_delete_elem(&cuda_marks, key);
	return 0;
}

/* Mark a handle with what stands on a stream; returns the mark's generation, 0: nothing to prove there. */
static __noinline __u64 make_mark(struct cuda_handle_key *key, struct cuda_stream_key *stream_key)
{
	struct cuda_stream *stream;
	struct cuda_stream *mark;

	if (!key || !stream_key)
		return 0;
	stream = bpf_map_lookup_elem(&cuda_streams, stream_key);
	if (!stream || stream->ambiguous || stream->launches == stream->proved) {
		drop_mark(key);
		return 0;
	}
	if (bpf_map_update_elem(&cuda_marks, key, stream, BPF_ANY)) {
		count_cuda(CUDA_STAT_FULL);
		drop_mark(key);
		return 0;
	}
	mark = bpf_map_lookup_elem(&cuda_marks, key);
	if (!mark)
		return 0;
	mark->generation = next_cuda_number();
	return mark->generation;
}

/* Entry of one of CUDA's functions; returns whether its return matters. */
static __always_inline int enter_cuda(struct registers *ctx, __u64 cookie)
{
	struct cuda_handle_key key = {.handle = FIRST_ARGUMENT(ctx)};
	struct cuda_stream_key stream = {};
	struct cuda_under_way call = {.kind = CUDA_KIND(cookie)};
	struct cuda_stream *mark;
	struct thread thread;
	__u32 tid = (__u32)bpf_get_current_pid_tgid();
	__u32 zero_stream = CUDA_PER_THREAD(cookie) ? CUDA_PER_THREAD_STREAM : CUDA_LEGACY_STREAM;

	count_cuda(CUDA_STAT_CALLS);
	if (!observed_thread(&thread) || !bpf_map_lookup_elem(&cuda_processes, &thread.tgid))
		return 0;
	key.tgid = thread.tgid;
	stream.tgid = thread.tgid;
	switch (call.kind) {
	case CUDA_RECORD:
	case CUDA_RECORD_FLAGS:
		stream.stream = SECOND_ARGUMENT(ctx) ? SECOND_ARGUMENT(ctx) : zero_stream;
		if (call.kind == CUDA_RECORD_FLAGS && (__u32)THIRD_ARGUMENT(ctx)) {
			drop_mark(&key);
			return 0;
		}
		call.generation = make_mark(&key, &stream);
		break;
	case CUDA_ASK_EVENT:
		mark = bpf_map_lookup_elem(&cuda_marks, &key);
		if (mark && mark->armed)
			call.generation = mark->generation;
		break;
	case CUDA_ASK_STREAM:
		stream.stream = key.handle ? key.handle : zero_stream;
		key.handle = tid;
		key.kind = CUDA_HANDLE_THREAD;
		call.generation = make_mark(&key, &stream);
		break;
	case CUDA_DROP_EVENT:
		drop_mark(&key);
		break;
	case CUDA_DROP_STREAM:
		stream.stream = key.handle;
		if (bpf_map_lookup_elem(&cuda_streams, &stream))
			bpf_map_delete_elem(&cuda_streams, &stream);
		break;
	}
	if (!call.generation)
		return 0;
	call.handle = key.handle;
	call.tgid = thread.tgid;
	bpf_map_update_elem(&cuda_calls_under_way, &tid, &call, BPF_ANY);
	return 1;
}

static __noinline int leave_cuda(struct registers *ctx, __u32 kind)
{
	__u32 tid = (__u32)bpf_get_current_pid_tgid();
	struct cuda_under_way *found;
	struct cuda_under_way call;
	struct cuda_handle_key key = {};
	struct cuda_stream *mark;
	__s32 result;

	if (!ctx)
		return 0;
	result = (__s32)RETURN_VALUE(ctx);
	count_cuda(CUDA_STAT_RETURNS);
	found = bpf_map_lookup_elem(&cuda_calls_under_way, &tid);
	if (!found || found->kind != kind)
		return 0;
	call = *found;
	bpf_map_delete_elem(&cuda_calls_under_way, &tid);
	key.handle = call.handle;
	key.tgid = call.tgid;
	key.kind = kind == CUDA_ASK_STREAM ? CUDA_HANDLE_THREAD : CUDA_HANDLE_EVENT;
	switch (kind) {
	case CUDA_RECORD:
	case CUDA_RECORD_FLAGS:
		mark = bpf_map_lookup_elem(&cuda_marks, &key);
		if (mark && mark->generation == call.generation && result == CUDA_SUCCESS)
			mark->armed = 1;
		else
			drop_mark(&key);
		break;
	case CUDA_ASK_EVENT:
		if (result == CUDA_SUCCESS)
			prove(&key, call.generation);
		break;
	case CUDA_ASK_STREAM:
		if (result == CUDA_SUCCESS)
			prove(&key, call.generation);
		else
			drop_mark(&key);
		break;
	}
	return 0;
}

#ifdef __TARGET_ARCH_arm64
#define INSTRUCTION_POINTER(ctx) ((ctx)->pc)
#else
#define INSTRUCTION_POINTER(ctx) ((ctx)->rip)
#endif

/*
 * Loaded as a session program (kernel 6.13): entry and return, and 1 at entry says that the return does not matter.
 * At the return the instruction pointer is the caller's; no kernel function is called to tell, so no BTF is needed.
 */
SEC("uprobe")
int cuda_session(struct registers *ctx)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);

	if (INSTRUCTION_POINTER(ctx) != bpf_get_func_ip(ctx))
		return leave_cuda(ctx, CUDA_KIND(cookie));
	return !enter_cuda(ctx, cookie);
}

SEC("uprobe")
int cuda_entry(struct registers *ctx)
{
	__u32 tid = (__u32)bpf_get_current_pid_tgid();

	/* What a call left that never returned (longjmp, a thread's cancellation) must not be taken for this one. */
	if (!enter_cuda(ctx, bpf_get_attach_cookie(ctx)) && bpf_map_lookup_elem(&cuda_calls_under_way, &tid))
		bpf_map_delete_elem(&cuda_calls_under_way, &tid);
	return 0;
}

SEC("uretprobe")
int cuda_return(struct registers *ctx)
{
	return leave_cuda(ctx, CUDA_KIND(bpf_get_attach_cookie(ctx)));
}

#endif
