/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Programs for the calls that make, end and connect communicators: few, and never in anybody's way.  Included once, by
 * nccl.bpf.c.
 */
#ifndef RAILSCOPE_LIFECYCLE_H
#define RAILSCOPE_LIFECYCLE_H

#include "arguments.h"
#include "communicators.h"
#include "nccl.h"
#include "observed.h"
#include "shares.h"

/*
 * Calls under way, by thread: written at entry, taken out at return, read by probes/nccl/programs/host_calls.py for who
 * never returns.  A plain hash with shares, not one that evicts: one tenant's calls must not push another's out.  What
 * a thread left that ended inside its call the reader takes out.
 */
#define HOST_CALLS 4096
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, HOST_CALLS);
	__type(key, __u32);
	__type(value, struct host_call);
} host_calls SEC(".maps");

static __noinline int drop_call(struct thread *thread, __u32 uid, __u32 tgid)
{
	__u32 tid;

	if (!thread)
		return 0;
	tid = thread->tid;
	/* Only who takes it out gives its place back. */
	if (!bpf_map_delete_elem(&host_calls, &tid))
		leave_place(uid, tgid, SHARED_HOST_CALLS);
	return 0;
}

/*
 * A call begins.  One that another call of the same thread makes in turn is part of that one; what stands there for
 * any other reason never returned (longjmp, a thread that ended), and goes.
 */
static __noinline int begin_call(struct host_call *call, struct thread *thread)
{
	struct host_call *before;
	__u64 place;
	__u32 tid;

	if (!call || !thread)
		return 0;
	tid = thread->tid;
	before = bpf_map_lookup_elem(&host_calls, &tid);
	if (before) {
		if (before->task == call->task && before->stack > call->stack)
			return 0;
		drop_call(thread, before->uid, before->tgid);
	}
	place = take_place(answerable(), thread->tgid, SHARED_HOST_CALLS, HOST_CALLS);
	if (!place) {
		count(STAT_HOST_CALLS_FULL);
		return 0;
	}
	call->uid = (__u32)place;
	if (bpf_map_update_elem(&host_calls, &tid, call, BPF_NOEXIST))
		return_place(call->uid, thread->tgid, SHARED_HOST_CALLS);
	return 0;
}

/* What is known of every call at its entry. */
static __always_inline void describe_call(struct host_call *call, const struct registers *ctx, __u64 cookie,
					  struct thread *thread)
{
	call->start_ns = bpf_ktime_get_ns();
	call->stack = STACK_POINTER(ctx);
	call->task = bpf_get_current_task();
	call->tgid = thread->tgid;
	call->nranks = -1;
	call->rank = -1;
	call->library = COOKIE_LIBRARY(cookie);
	call->kind = COOKIE_KIND(cookie);
}

/* The call that returns here; 0: it is not known, or part of another one that goes on. */
static __always_inline struct host_call *returning_call(const struct registers *ctx, struct thread *thread)
{
	struct host_call *call = bpf_map_lookup_elem(&host_calls, &thread->tid);

	return call && call->task == bpf_get_current_task() && STACK_POINTER(ctx) >= call->stack ? call : 0;
}

static __always_inline __u32 instance_of(__u64 comm, __u32 tgid)
{
	struct communicator_key key = {.comm = comm, .tgid = tgid};
	struct communicator *communicator = comm ? bpf_map_lookup_elem(&communicators, &key) : 0;

	return communicator ? communicator->instance : 0;
}

/* Entry of a call that makes communicators. */
SEC("uprobe")
int init_entry(struct registers *ctx)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	__u32 id_place = COOKIE_PLACE(cookie, PLACE_UNIQUE_ID);
	struct host_call init = {};
	struct arguments arguments;
	struct thread thread;
	__u64 id;

	if (!observed_thread(&thread))
		return 0;
	count(STAT_LIFECYCLE);
	take_arguments(&arguments, ctx, cookie);
	describe_call(&init, ctx, cookie, &thread);
	init.new_comm = argument(&arguments, COOKIE_PLACE(cookie, PLACE_NEW_COMM));
	init.comm = argument(&arguments, COOKIE_PLACE(cookie, PLACE_PARENT));
	init.instance = instance_of(init.comm, thread.tgid);
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
	begin_call(&init, &thread);
	return 0;
}

/* One new communicator at the return of an init call. */
VERIFIED_ONCE int settle_init(struct host_call *init, __u64 comm, __u64 cookie, __s32 result,
			      struct thread *thread)
{
	struct communicator_key key = {.comm = comm};
	struct communicator *communicator = 0;
	struct lifecycle_event *event;
	__u32 made = 0;

	if (!init || !thread)
		return 0;
	key.tgid = thread->tgid;
	if (comm) {
		communicator = bpf_map_lookup_elem(&communicators, &key);
		/* An entry older than this call belongs to an earlier communicator at the same address. */
		if (communicator && communicator->first_ns < init->start_ns)
			renew_communicator(&key, communicator, COOKIE_LIBRARY(cookie), communicator->destroyed_ns);
		if (!communicator)
			communicator = add_communicator(&key, COOKIE_LIBRARY(cookie), &made);
		if (!communicator)
			count(STAT_COMMUNICATORS_FULL);
		else if (!communicator->confirmed)
			read_identity(communicator, comm);
	}
	event = new_lifecycle_event(thread);
	if (!event)
		return 0;
	event->time_ns = bpf_ktime_get_ns();
	event->comm = comm;
	event->parent = init->comm;
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
	struct host_call *init;
	struct thread thread;
	__u64 comm = 0;
	__s32 result = (__s32)RETURN_VALUE(ctx);

	if (!observed_thread(&thread))
		return 0;
	count(STAT_LIFECYCLE);
	init = returning_call(ctx, &thread);
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
	drop_call(&thread, init->uid, init->tgid);
	return 0;
}

#define JOB_WORDS 32

/*
 * The communicator that NCCL's own thread makes, or makes another one of: the first word of what it was given that is a
 * communicator of its process.  In a group ncclCommInitRank() had stored it before; a split's is not known yet, and its
 * parent stands there.  (struct ncclCommInitRankAsyncJob in src/init.cc, whose fields move from version to version.)
 * A parent is whole, and confirmed at the latest here: that tells which of the two it is.
 */
static __noinline __u32 instance_in(__u64 job, struct thread *thread)
{
	struct communicator *communicator;
	struct communicator_key key = {};

	if (!thread)
		return 0;
	key.tgid = thread->tgid;
	for (int i = 0; i < JOB_WORDS; i++) {
		if (bpf_probe_read_user(&key.comm, sizeof(key.comm), (const void *)(job + 8ULL * i)))
			break;
		communicator = key.comm ? bpf_map_lookup_elem(&communicators, &key) : 0;
		if (!communicator || communicator->destroyed_ns)
			continue;
		if (!communicator->confirmed && read_identity(communicator, key.comm))
			write_lifecycle(communicator, key.comm, LIFECYCLE_CONFIRMED, thread);
		return communicator->instance;
	}
	return 0;
}

/* Entry of a call that is followed until it returns. */
SEC("uprobe")
int call_entry(struct registers *ctx)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	struct host_call call = {};
	struct arguments arguments;
	struct thread thread;

	if (!observed_thread(&thread))
		return 0;
	count(STAT_LIFECYCLE);
	take_arguments(&arguments, ctx, cookie);
	describe_call(&call, ctx, cookie, &thread);
	call.comm = argument(&arguments, COOKIE_PLACE(cookie, PLACE_PARENT));
	call.instance = call.kind == LIFECYCLE_INIT_WORK ? instance_in(FIRST_ARGUMENT(ctx), &thread)
							   : instance_of(call.comm, thread.tgid);
	begin_call(&call, &thread);
	return 0;
}

SEC("uretprobe")
int call_return(struct registers *ctx)
{
	struct host_call *call;
	struct thread thread;

	if (!observed_thread(&thread))
		return 0;
	count(STAT_LIFECYCLE);
	call = returning_call(ctx, &thread);
	if (!call)
		return 0;
	/* From here on kernels may communicate by themselves, and a communicator make no call of an operation at all. */
	if (call->kind == LIFECYCLE_DEVICE_COMM && !(__s32)RETURN_VALUE(ctx) && call->comm) {
		struct communicator_key key = {.comm = call->comm, .tgid = thread.tgid};
		struct communicator *communicator = bpf_map_lookup_elem(&communicators, &key);

		if (!communicator || !settled(communicator))
			communicator = settle_communicator(&key, call->library, &thread);
		write_lifecycle(communicator, key.comm, LIFECYCLE_DEVICE_COMM, &thread);
	}
	drop_call(&thread, call->uid, call->tgid);
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
	struct host_call call = {};
	struct thread thread;

	if (!observed_thread(&thread))
		return 0;
	count(STAT_LIFECYCLE);
	key.comm = FIRST_ARGUMENT(ctx);
	key.tgid = thread.tgid;
	communicator = bpf_map_lookup_elem(&communicators, &key);
	describe_call(&call, ctx, cookie, &thread);
	call.comm = key.comm;
	call.instance = communicator ? communicator->instance : 0;
	begin_call(&call, &thread);
	if (!communicator)
		return 0;
	if (kind == LIFECYCLE_DESTROY || kind == LIFECYCLE_ABORT) {
		leave_places(&key, communicator);
		communicator->destroyed_ns = bpf_ktime_get_ns();
	}
	write_lifecycle(communicator, key.comm, kind, &thread);
	return 0;
}

#endif
