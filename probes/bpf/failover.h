/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * NCCL's own failover of InfiniBand ports: part of nccl_internals.bpf.c.
 *
 * A connection may use several ports (a merged device).  With NCCL_IB_RESILIENCY_PORT_FAILOVER=1, NCCL 2.29.7 and newer
 * go on where one of them fails: a work completion with an error comes to ncclIbResiliencyHandleCompletionError(), which
 * marks the port as failed, gives its queue pairs' work to those of the next port, and sends again what was lost
 * (src/transport/net_ib/p2p_resiliency.cc).  That function is called for nothing else, so its probes cost nothing while
 * nothing fails.  Of the completions that follow on the same port, those of work that was under way, none is told.
 */
#ifndef RAILSCOPE_FAILOVER_H
#define RAILSCOPE_FAILOVER_H

#include "completion.h"

#define IB_MOST_DEVICES 8 /* NCCL_IB_MAX_DEVS_PER_NIC; 4 before 2.30 */
#define PORT_OK 0 /* ncclIbResiliencyDevStateOk */

/* The head of an ibv_wc (libibverbs, infiniband/verbs.h): its layout is part of that library's ABI. */
struct work_completion {
	__u64 wr_id;
	__u32 status;
	__u32 opcode; /* not valid in a completion with an error, as byte_len */
	__u32 vendor_error;
	__u32 byte_len;
	__u32 immediate;
	__u32 queue_pair;
};

struct failover_event {
	__u64 time_ns;
	__u64 comm; /* the connection: NCCL's ncclIbSendComm or ncclIbRecvComm */
	__u64 resiliency; /* its ncclIbResiliency */
	__u32 tgid;
	__u32 tid;
	__u32 library;
	__u32 queue_pair;
	__u32 status; /* enum ibv_wc_status */
	__u32 vendor_error;
	__s32 result; /* 0: NCCL goes on; else the ncclResult_t that it gives up with */
	__u32 place; /* of the failed port, among the connection's */
	__u32 count; /* of the connection's ports */
	__u32 state; /* of the failed port now: enum ncclIbResiliencyDevState */
	__s32 devices[IB_MOST_DEVICES]; /* the ports, as NCCL numbers devices */
	struct owner owner;
};

/* A call under way that handles the first error of a port. */
struct failover_call {
	__u64 resiliency;
	__u64 comm;
	__u32 place;
	__u32 count;
	__u32 status;
	__u32 vendor_error;
	__u32 queue_pair;
	__u32 tgid;
	struct owner owner;
};

/* A connection of which a port failed. */
struct failed_over_connection {
	__u64 resiliency;
	struct owner owner;
};

struct failed_over_key {
	__u64 comm;
	__u32 tgid;
	__u32 reserved;
};

enum failover_stat {
	FAILOVER_STAT_CALLS, /* runs of the programs */
	FAILOVER_STAT_RING_FULL, /* events lost */
	FAILOVER_STAT_UNREADABLE,
	FAILOVER_STAT_COUNT,
};

ASSERT_SIZE(work_completion, 32);
ASSERT_SIZE(failover_event, 104);
ASSERT_SIZE(failed_over_key, 16);
ASSERT_SIZE(failover_call, 48);
ASSERT_SIZE(failed_over_connection, 16);

/* By thread.  What a thread left that ended inside its call the reader takes out when its process has ended. */
#define FAILOVER_CALLS 4096
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, FAILOVER_CALLS);
	__type(key, __u32);
	__type(value, struct failover_call);
} failover_calls SEC(".maps");

/* Connections of which a port failed, each with its ncclIbResiliency: sends.h asks it which port carries what. */
#define FAILED_OVER 16384
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, FAILED_OVER);
	__type(key, struct failed_over_key);
	__type(value, struct failed_over_connection);
} failed_over SEC(".maps");

/* 0: `failed_over` is empty, and no send looks there. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} any_failed_over SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, FAILOVER_STAT_COUNT);
	__type(key, __u32);
	__type(value, __u64);
} failover_stats SEC(".maps");

/* Few: the reader is woken for each. */
#define FAILOVER_RING_BYTES (128 * 1024)
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, FAILOVER_RING_BYTES);
} failover_events SEC(".maps");

static __always_inline void count_failover_stat(__u32 stat)
{
	__u64 *value = bpf_map_lookup_elem(&failover_stats, &stat);

	if (value)
		__sync_fetch_and_add(value, 1);
}

static __always_inline __u64 port_state(__u64 resiliency, const struct internals_layout *layout, __u32 place)
{
	return resiliency + layout->resiliency_devices + place * layout->resiliency_device_size +
	       layout->resiliency_device_state;
}

/* ncclIbResiliencyHandleCompletionError(resiliency, completion, place). */
SEC("uprobe")
int failover_entry(struct registers *ctx)
{
	__u32 library = COOKIE_LIBRARY(bpf_get_attach_cookie(ctx));
	const struct internals_layout *layout;
	struct work_completion completion = {};
	struct failover_call call = {.resiliency = FIRST_ARGUMENT(ctx), .place = (__u32)THIRD_ARGUMENT(ctx)};
	struct failover_call *left;
	struct thread thread;
	__u32 state = 0;

	count_failover_stat(FAILOVER_STAT_CALLS);
	if (!observed_thread(&thread))
		return 0;
	layout = bpf_map_lookup_elem(&internals_layouts, &library);
	if (!layout || !layout->known || layout->resiliency_comm == NO_OFFSET)
		return 0;
	if (read_user(&call.comm, 8, call.resiliency + layout->resiliency_comm) ||
	    read_user(&call.count, 4, call.resiliency + layout->resiliency_count) || call.count < 1 ||
	    call.count > IB_MOST_DEVICES || call.place >= call.count ||
	    read_user(&state, 4, port_state(call.resiliency, layout, call.place)) ||
	    read_user(&completion, sizeof(completion), SECOND_ARGUMENT(ctx))) {
		count_failover_stat(FAILOVER_STAT_UNREADABLE);
		return 0;
	}
	if (state != PORT_OK)
		return 0;
	call.status = completion.status;
	call.vendor_error = completion.vendor_error;
	call.queue_pair = completion.queue_pair;
	call.tgid = thread.tgid;
	left = bpf_map_lookup_elem(&failover_calls, &thread.tid);
	if (left)
		call.owner = left->owner;
	put_shared(&failover_calls, &thread.tid, &call, &call.owner, left != 0, thread.tgid, SHARED_FAILOVER_CALLS,
		   FAILOVER_CALLS);
	return 0;
}

SEC("uretprobe")
int failover_return(struct registers *ctx)
{
	__u32 library = COOKIE_LIBRARY(bpf_get_attach_cookie(ctx));
	__s32 result = (__s32)RETURN_VALUE(ctx);
	__u32 tid = (__u32)bpf_get_current_pid_tgid();
	const struct internals_layout *layout;
	struct failed_over_key key = {};
	struct failed_over_connection connection = {};
	struct failed_over_connection *before;
	struct failover_event *event;
	struct failover_call call;
	struct failover_call *known;
	__u32 state = 0, one = 1, slot = 0;
	struct thread thread;
	__u64 place;

	count_failover_stat(FAILOVER_STAT_CALLS);
	if (!observed_thread(&thread))
		return 0;
	tid = thread.tid;
	known = bpf_map_lookup_elem(&failover_calls, &tid);
	layout = bpf_map_lookup_elem(&internals_layouts, &library);
	if (!known || !layout)
		return 0;
	call = *known;
	drop_shared(&failover_calls, &tid, &call.owner, SHARED_FAILOVER_CALLS);
	if (read_user(&state, 4, port_state(call.resiliency, layout, call.place))) {
		count_failover_stat(FAILOVER_STAT_UNREADABLE);
		return 0;
	}
	if (result == 0 && state == PORT_OK)
		return 0; /* nothing was moved */
	if (result == 0) {
		key.comm = call.comm;
		key.tgid = thread.tgid;
		connection.resiliency = call.resiliency;
		before = bpf_map_lookup_elem(&failed_over, &key);
		if (before)
			connection.owner = before->owner;
		put_shared(&failed_over, &key, &connection, &connection.owner, before != 0, key.tgid, SHARED_FAILED_OVER,
			   FAILED_OVER);
		bpf_map_update_elem(&any_failed_over, &slot, &one, BPF_ANY);
	}
	place = take_place(answerable(), thread.tgid, SHARED_FAILOVER_EVENTS,
			   RING_RECORDS(FAILOVER_RING_BYTES, failover_event));
	event = place ? bpf_ringbuf_reserve(&failover_events, sizeof(*event), 0) : 0;
	if (!event) {
		if (place)
			return_place((__u32)place, thread.tgid, SHARED_FAILOVER_EVENTS);
		count_failover_stat(FAILOVER_STAT_RING_FULL);
		return 0;
	}
	event->time_ns = bpf_ktime_get_ns();
	event->comm = call.comm;
	event->resiliency = call.resiliency;
	event->tgid = thread.tgid;
	event->tid = thread.tid;
	event->library = library;
	event->queue_pair = call.queue_pair;
	event->status = call.status;
	event->vendor_error = call.vendor_error;
	event->result = result;
	event->place = call.place;
	event->count = call.count;
	event->state = state;
	event->owner.uid = (__u32)place;
	event->owner.tgid = thread.tgid;
#pragma unroll /* in older kernels no loop may go back from a call */
	for (__u32 i = 0; i < IB_MOST_DEVICES; i++) {
		event->devices[i] = NO_NET_DEVICE;
		if (i < call.count &&
		    read_user(&event->devices[i], 4, call.comm + layout->ib_devices + i * layout->ib_device_stride)) {
			event->devices[i] = NO_NET_DEVICE;
			count_failover_stat(FAILOVER_STAT_UNREADABLE);
		}
	}
	bpf_ringbuf_submit(event, BPF_RB_FORCE_WAKEUP);
	return 0;
}

/*
 * Of the first `count` ports of a connection the one that failed, by its place, or `count`: none did.  NCCL goes on
 * without one, never without two.  The state is NCCL's own, so that a port that it took back counts at once.
 */
VERIFIED_ONCE __u32 failed_port(__u64 comm, __u32 tgid, __u32 library, __u32 count)
{
	struct failed_over_key key = {.comm = comm, .tgid = tgid};
	const struct internals_layout *layout = bpf_map_lookup_elem(&internals_layouts, &library);
	struct failed_over_connection *connection = bpf_map_lookup_elem(&failed_over, &key);
	__u64 now = 0;

	/* Another connection may have this address by now. */
	if (!layout || !connection || read_user(&now, 8, comm + layout->ib_resiliency) || now != connection->resiliency)
		return count;
#pragma unroll /* in older kernels no loop may go back from a call */
	for (__u32 i = 0; i < IB_MOST_DEVICES; i++) {
		__u32 state = PORT_OK;

		if (i >= count || read_user(&state, 4, port_state(now, layout, i)))
			return count;
		if (state != PORT_OK)
			return i;
	}
	return count;
}

#endif
