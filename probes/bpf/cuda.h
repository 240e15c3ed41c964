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

#include "cuda_launches.h"

/* What a mark's communicator had launched is complete. */
VERIFIED_ONCE int prove_communicator(struct cuda_behind *behind, __u32 tgid)
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
	walk.range = known->range;
	walk.now = bpf_ktime_get_ns();
	known->completed_ns = walk.now;
	bpf_loop(begin_cuda_walk(&walk), complete_call, &walk, 0);
	return 1;
}

/* An event has happened, or a stream has come to where a thread waited for it. */
VERIFIED_ONCE int prove(const struct cuda_handle_key *handle, __u64 generation)
{
	struct cuda_handle_key key;
	struct cuda_stream_key stream_key = {};
	struct cuda_stream *mark;
	struct cuda_stream *stream;
	struct cuda_behind behind;
	__u64 launches;
	struct owner owner;
	__u32 number;
	int i, proved = 0;

	if (!handle)
		return 0;
	key = *handle;
	stream_key.tgid = key.tgid;
	mark = bpf_map_lookup_elem(&cuda_marks, &key);
	if (!mark || mark->generation != generation)
		return 0;
	launches = mark->launches;
	number = mark->number;
	owner = mark->owner;
	stream_key.stream = mark->stream;
	for (i = 0; i < CUDA_BEHIND; i++) {
		behind = mark->behind[i];
		/* Another thread may record the event anew meanwhile, and its memory may serve another mark. */
		if (mark->generation != generation)
			return 0;
		if (!behind.comm)
			break;
		proved |= prove_communicator(&behind, key.tgid);
	}
	stream = bpf_map_lookup_elem(&cuda_streams, &stream_key);
	if (stream && stream->number == number && stream->proved < launches)
		stream->proved = launches;
	if (proved)
		count_cuda(CUDA_STAT_PROOFS);
	drop_shared(&cuda_marks, &key, &owner, SHARED_CUDA_MARKS);
	return 0;
}

static __noinline int drop_mark(struct cuda_handle_key *key)
{
	/* A look-up takes no lock; most handles have no mark. */
	struct cuda_stream *mark = key ? bpf_map_lookup_elem(&cuda_marks, key) : 0;
	struct owner owner;

	if (!mark)
		return 0;
	owner = mark->owner;
	drop_shared(&cuda_marks, key, &owner, SHARED_CUDA_MARKS);
	return 0;
}

static __noinline int drop_stream(struct cuda_stream_key *key)
{
	struct cuda_stream *stream = key ? bpf_map_lookup_elem(&cuda_streams, key) : 0;
	struct owner owner;

	if (!stream)
		return 0;
	owner = stream->owner;
	drop_shared(&cuda_streams, key, &owner, SHARED_CUDA_STREAMS);
	return 0;
}

/* Mark a handle with what stands on a stream; returns the mark's generation, 0: nothing to prove there. */
static __noinline __u64 make_mark(struct cuda_handle_key *key, struct cuda_stream_key *stream_key)
{
	struct cuda_stream *stream;
	struct cuda_stream *mark;
	struct owner owner = {};

	if (!key || !stream_key)
		return 0;
	stream = bpf_map_lookup_elem(&cuda_streams, stream_key);
	if (!stream || stream->ambiguous || stream->launches == stream->proved) {
		drop_mark(key);
		return 0;
	}
	mark = bpf_map_lookup_elem(&cuda_marks, key);
	if (mark)
		owner = mark->owner;
	if (put_shared(&cuda_marks, key, stream, &owner, mark != 0, key->tgid, SHARED_CUDA_MARKS, CUDA_MARKS)) {
		count_cuda(CUDA_STAT_FULL);
		drop_mark(key);
		return 0;
	}
	mark = bpf_map_lookup_elem(&cuda_marks, key);
	if (!mark)
		return 0;
	mark->owner = owner;
	mark->generation = next_cuda_number();
	return mark->generation;
}

/* Entry of one of CUDA's functions; returns whether its return matters. */
static __always_inline int enter_cuda(struct registers *ctx, __u64 cookie)
{
	struct cuda_handle_key key = {.handle = FIRST_ARGUMENT(ctx)};
	struct cuda_stream_key stream = {};
	struct cuda_under_way call = {.kind = CUDA_KIND(cookie)};
	struct cuda_under_way *left;
	struct cuda_stream *mark;
	struct thread thread;
	__u32 tid = (__u32)bpf_get_current_pid_tgid();
	__u32 zero_stream = CUDA_PER_THREAD(cookie) ? CUDA_PER_THREAD_STREAM : CUDA_LEGACY_STREAM;

	if (!observed_thread(&thread))
		return 0;
	count_cuda(CUDA_STAT_CALLS);
	if (!bpf_map_lookup_elem(&cuda_processes, &thread.tgid))
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
		drop_stream(&stream);
		break;
	}
	if (!call.generation)
		return 0;
	call.handle = key.handle;
	call.tgid = thread.tgid;
	left = bpf_map_lookup_elem(&cuda_calls_under_way, &tid);
	if (left)
		call.owner = left->owner;
	/* Without a place its return is nobody's. */
	return !put_shared(&cuda_calls_under_way, &tid, &call, &call.owner, left != 0, call.tgid, SHARED_CUDA_CALLS,
			   CUDA_CALLS);
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
	drop_shared(&cuda_calls_under_way, &tid, &call.owner, SHARED_CUDA_CALLS);
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
	struct cuda_under_way *left;
	struct owner owner;

	if (enter_cuda(ctx, bpf_get_attach_cookie(ctx)))
		return 0;
	/* What a call left that never returned (longjmp, a thread's cancellation) must not be taken for this one. */
	left = bpf_map_lookup_elem(&cuda_calls_under_way, &tid);
	if (left) {
		owner = left->owner;
		drop_shared(&cuda_calls_under_way, &tid, &owner, SHARED_CUDA_CALLS);
	}
	return 0;
}

SEC("uretprobe")
int cuda_return(struct registers *ctx)
{
	return leave_cuda(ctx, CUDA_KIND(bpf_get_attach_cookie(ctx)));
}

#endif
