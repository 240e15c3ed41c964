/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Errors that NCCL keeps until it is asked: part of nccl_internals.bpf.c.
 *
 * What fails outside a call (a peer that went, most of all) is stored in the communicator or in its proxy's state, and
 * waits there for ncclCommGetAsyncError().  NCCL asks that function itself at every call (ncclCommEnsureReady()), so
 * probing it would cost twice as much again as counting the calls.  What is probed are the calls that finalize,
 * revoke, suspend, resume, abort or destroy a communicator: few, and what a job does once it knows of an error.  There
 * the struct tells the error, and the return value tells whether the call itself failed.
 *
 * An error stays, and is met again and again: only another one than before is told.
 */
#ifndef RAILSCOPE_ERRORS_H
#define RAILSCOPE_ERRORS_H

#include "completion.h"
#include "shared_tables.h"

#define RESULT_SUCCESS 0
#define RESULT_IN_PROGRESS 7

/* Where an error was met; from 2 on: enum lifecycle_kind, the result of that call. */
#define ERROR_ASYNC 0 /* the communicator's asynchronous result */

/* Offsets of one library's structs, bytes; filled by the loader from the table of known builds. */
struct error_layout {
	__u32 known; /* 0: nothing here is read */
	__u32 comm_async_result;
	__u32 comm_proxy_state;
	__u32 state_async_result; /* NO_OFFSET: only the communicator's own result is read */
};

struct error_event {
	__u64 time_ns;
	__u64 comm;
	__u32 tgid;
	__u32 tid;
	__u32 instance; /* 0: the communicator is not known */
	__s32 result;
	__u32 source;
	__u32 reserved;
	struct owner owner;
};

/* The last asynchronous error of a communicator that has one. */
struct async_result {
	__u32 instance;
	__s32 result;
	struct owner owner;
};

/* A probed call under way. */
struct error_call {
	__u64 comm;
	__u32 tgid;
	__u32 tid;
	__u32 instance;
	__u32 reserved;
	struct owner owner;
};

enum error_stat {
	ERROR_STAT_CALLS, /* runs of the programs */
	ERROR_STAT_RING_FULL, /* events lost */
	ERROR_STAT_UNREADABLE,
	ERROR_STAT_COUNT,
};

ASSERT_SIZE(error_layout, 16);
ASSERT_SIZE(error_event, 48);
ASSERT_SIZE(async_result, 16);
ASSERT_SIZE(error_call, 32);

/* One slot a library. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 256);
	__type(key, __u32);
	__type(value, struct error_layout);
} error_layouts SEC(".maps");

#define ASYNC_RESULTS 4096
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, ASYNC_RESULTS);
	__type(key, struct communicator_key);
	__type(value, struct async_result);
} async_results SEC(".maps");

/*
 * By thread and source: NCCL makes some of these calls within others.  What a thread left that ended inside its call
 * the reader takes out when its process has ended.
 */
#define ERROR_CALLS 4096
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, ERROR_CALLS);
	__type(key, __u64);
	__type(value, struct error_call);
} error_calls SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, ERROR_STAT_COUNT);
	__type(key, __u32);
	__type(value, __u64);
} error_stats SEC(".maps");

/* Few: the reader is woken for each. */
#define ERROR_RING_BYTES (128 * 1024)
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, ERROR_RING_BYTES);
} error_events SEC(".maps");

static __always_inline void count_error_stat(__u32 stat)
{
	__u64 *value = bpf_map_lookup_elem(&error_stats, &stat);

	if (value)
		__sync_fetch_and_add(value, 1);
}

static __always_inline __u64 error_call_key(__u32 source)
{
	return (__u64)source << 32 | (__u32)bpf_get_current_pid_tgid();
}

static __always_inline int is_error(__s32 result)
{
	return result != RESULT_SUCCESS && result != RESULT_IN_PROGRESS;
}

static __noinline int write_error(struct error_call *call, __u32 instance, __s32 result, __u32 source)
{
	struct error_event *event;
	__u64 place;

	if (!call)
		return 0;
	place = take_place(answerable(), call->tgid, SHARED_ERROR_EVENTS,
			   RING_RECORDS(ERROR_RING_BYTES, error_event));
	event = place ? bpf_ringbuf_reserve(&error_events, sizeof(*event), 0) : 0;
	if (!event) {
		if (place)
			return_place((__u32)place, call->tgid, SHARED_ERROR_EVENTS);
		count_error_stat(ERROR_STAT_RING_FULL);
		return 0;
	}
	event->time_ns = bpf_ktime_get_ns();
	event->comm = call->comm;
	event->tgid = call->tgid;
	event->tid = call->tid;
	event->instance = instance;
	event->result = result;
	event->source = source;
	event->reserved = 0;
	event->owner.uid = (__u32)place;
	event->owner.tgid = call->tgid;
	bpf_ringbuf_submit(event, BPF_RB_FORCE_WAKEUP);
	return 0;
}

/* A communicator's error was met: tell it if it is another one than before. */
static __noinline int meet_error(struct error_call *call, __s32 result)
{
	struct communicator_key key = {};
	struct async_result *known;
	struct async_result fresh = {.result = result};

	if (!call)
		return 0;
	key.comm = call->comm;
	key.tgid = call->tgid;
	fresh.instance = call->instance;
	known = bpf_map_lookup_elem(&async_results, &key);
	if (known && known->instance == fresh.instance && known->result == result)
		return 0;
	if (known)
		fresh.owner = known->owner;
	put_shared(&async_results, &key, &fresh, &fresh.owner, known != 0, key.tgid, SHARED_ASYNC_RESULTS, ASYNC_RESULTS);
	write_error(call, call->instance, result, ERROR_ASYNC);
	return 0;
}

/*
 * The asynchronous result that the structs tell; the communicator's own comes before its proxy's.  NCCL asks further
 * places (ncclGinState), so "success" does not prove that there is no error.
 */
static __noinline __s32 stored_result(__u64 comm, __u32 library)
{
	const struct error_layout *layout = bpf_map_lookup_elem(&error_layouts, &library);
	__u64 magic = 0, state = 0;
	__s32 result = RESULT_SUCCESS;

	if (!layout || !layout->known)
		return RESULT_SUCCESS;
	if (read_user(&magic, sizeof(magic), comm) || magic != COMMUNICATOR_MAGIC ||
	    read_user(&result, sizeof(result), comm + layout->comm_async_result)) {
		count_error_stat(ERROR_STAT_UNREADABLE);
		return RESULT_SUCCESS;
	}
	if (result != RESULT_SUCCESS || layout->state_async_result == NO_OFFSET)
		return result;
	if (read_user(&state, sizeof(state), comm + layout->comm_proxy_state) || !state)
		return RESULT_SUCCESS;
	if (read_user(&result, sizeof(result), state + layout->state_async_result)) {
		count_error_stat(ERROR_STAT_UNREADABLE);
		return RESULT_SUCCESS;
	}
	return result;
}

/* Entry of a call that ends or changes its first argument. */
SEC("uprobe")
int async_error_entry(struct registers *ctx)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	__u64 key = error_call_key(COOKIE_KIND(cookie));
	struct error_call call = {};
	struct communicator_key whose = {};
	struct communicator *communicator;
	struct error_call *left;
	struct thread thread;
	__s32 stored;

	count_error_stat(ERROR_STAT_CALLS);
	if (!observed_thread(&thread))
		return 0;
	call.comm = FIRST_ARGUMENT(ctx);
	call.tgid = thread.tgid;
	call.tid = thread.tid;
	whose.comm = call.comm;
	whose.tgid = call.tgid;
	/* Now: at the return another communicator may have this address. */
	communicator = bpf_map_lookup_elem(&communicators, &whose);
	if (communicator)
		call.instance = communicator->instance;
	stored = stored_result(call.comm, COOKIE_LIBRARY(cookie));
	if (is_error(stored))
		meet_error(&call, stored);
	/* What is there never returned: longjmp, or a thread that ended. */
	left = bpf_map_lookup_elem(&error_calls, &key);
	if (left)
		call.owner = left->owner;
	put_shared(&error_calls, &key, &call, &call.owner, left != 0, call.tgid, SHARED_ERROR_CALLS, ERROR_CALLS);
	return 0;
}

SEC("uretprobe")
int async_error_return(struct registers *ctx)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	__u32 source = COOKIE_KIND(cookie);
	__u64 key = error_call_key(source);
	__s32 result = (__s32)RETURN_VALUE(ctx);
	struct error_call *call;
	struct owner owner;

	count_error_stat(ERROR_STAT_CALLS);
	call = bpf_map_lookup_elem(&error_calls, &key);
	if (!call)
		return 0;
	if (is_error(result))
		write_error(call, call->instance, result, source);
	owner = call->owner;
	drop_shared(&error_calls, &key, &owner, SHARED_ERROR_CALLS);
	return 0;
}

#endif
