/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * When an operation is complete, as far as its network part tells: part of nccl_internals.bpf.c.
 *
 * NCCL hands the network part of a plan to a proxy thread in ncclProxyStart(): proxy_post() walks the list of proxy
 * operations it is about to hand over and notes, for each collective, how many there are.  The proxy thread calls
 * ncclProfilerStopProxyOpEvent() for each one that is done, also with no profiler loaded: proxy_stop() counts down,
 * and the last one completes the collective.  All Send and Recv of one launch complete together.
 *
 * Only network connections are followed: NCCL tells of no others.  Numbers of operations (opCount) are unique within
 * a group of communicators that share their resources, so that is what operations are kept by.
 */
#ifndef RAILSCOPE_COMPLETION_H
#define RAILSCOPE_COMPLETION_H

#include "history.h"
#include "posting.h"

static __noinline int add_duration(__u32 op, __u64 duration_ns)
{
	struct distribution *duration = bpf_map_lookup_elem(&durations, &op);

	if (duration)
		add_to(duration, duration_ns, FIRST_DURATION);
	return 0;
}

/* nccl-tests' bus bandwidth: payload x factor over time. */
static __noinline int add_bandwidth(__u32 op, __u64 payload_bytes, __u64 nranks, __u64 duration_ns)
{
	struct distribution *bandwidth = bpf_map_lookup_elem(&bandwidths, &op);
	__u64 bus_bytes, rate;

	if (!bandwidth || nranks < 2 || nranks > (1 << 24) || !duration_ns || payload_bytes == UNKNOWN_BYTES)
		return 0;
	if (op == 4) /* AllReduce */
		bus_bytes = 2 * payload_bytes / nranks * (nranks - 1) + 2 * payload_bytes % nranks * (nranks - 1) / nranks;
	else if (op == 2 || op == 3) /* AllGather, ReduceScatter: the count is one rank's */
		bus_bytes = payload_bytes * (nranks - 1);
	else if (op == 0 || op == 1) /* Broadcast, Reduce */
		bus_bytes = payload_bytes;
	else
		return 0;
	/* In two steps, so that no product leaves 64 bits: a remainder is below the duration. */
	rate = bus_bytes / duration_ns * 1000000000;
	if (duration_ns < (1ULL << 34))
		rate += bus_bytes % duration_ns * 1000000000 / duration_ns;
	else
		rate += bus_bytes % duration_ns / (duration_ns / 1000000000);
	add_to(bandwidth, rate, FIRST_BANDWIDTH);
	return 0;
}

/*
 * From when an operation ran: operations of one communicator run one after another, so it cannot have begun before
 * those of the launch before it were complete.
 */
static __always_inline __u64 started_ns(struct proxy_communicator *proxy, __u64 launch, __u64 posted_ns, __u64 now)
{
	if (launch > proxy->completed_launch) {
		proxy->previous_ns = proxy->completed_ns;
		proxy->completed_launch = launch;
	} else if (launch < proxy->completed_launch) {
		return posted_ns;
	}
	proxy->completed_ns = now;
	return proxy->previous_ns > posted_ns ? proxy->previous_ns : posted_ns;
}

/*
 * How to submit a record to a ring that is read by polling: its reader comes before half of what one process may fill
 * waits, a sixth of the ring, unless records suddenly come much faster than before, and then it is woken.  The ring is
 * looked at for every 16th record.
 */
#define RECORDS_BETWEEN_LOOKS 16

static __always_inline __u64 completion_events_flag(__u64 number)
{
	if (number % RECORDS_BETWEEN_LOOKS == 0 && bpf_ringbuf_query(&completion_events, BPF_RB_AVAIL_DATA) >
							   COMPLETION_RING_BYTES / 6)
		return BPF_RB_FORCE_WAKEUP;
	return BPF_RB_NO_WAKEUP;
}

static __noinline int complete(struct operation *operation, __u32 tgid)
{
	struct communicator_key key = {.tgid = tgid};
	struct proxy_communicator *proxy;
	struct communicator *communicator;
	struct completion_event *event;
	__u64 now = bpf_ktime_get_ns();
	__u64 duration_ns, started, place;

	if (!operation)
		return 0;
	started = operation->posted_ns;
	key.comm = operation->comm;
	proxy = bpf_map_lookup_elem(&proxy_communicators, &key);
	if (proxy && proxy->instance == operation->instance) {
		started = started_ns(proxy, operation->launch, operation->posted_ns, now);
		__sync_fetch_and_add(&proxy->completed, 1);
		if (proxy->elsewhere)
			return 0;
	}
	duration_ns = now > started ? now - started : 0;
	add_duration(operation->op & (OP_COUNT - 1), duration_ns);
	remember(operation, duration_ns, tgid);
	communicator = bpf_map_lookup_elem(&communicators, &key);
	if (communicator && communicator->instance == operation->instance && communicator->confirmed)
		add_bandwidth(operation->op & (OP_COUNT - 1), operation->payload_bytes, communicator->identity.nranks,
			      duration_ns);
	if (!write_events)
		return 0;
	place = take_place(answerable(), tgid, SHARED_COMPLETION_EVENTS,
			   RING_RECORDS(COMPLETION_RING_BYTES, completion_event));
	event = place ? bpf_ringbuf_reserve(&completion_events, sizeof(*event), 0) : 0;
	if (!event) {
		if (place)
			return_place((__u32)place, tgid, SHARED_COMPLETION_EVENTS);
		count_internal(INTERNAL_RING_FULL);
		return 0;
	}
	__builtin_memset(event, 0, sizeof(*event));
	event->owner.uid = (__u32)place;
	event->owner.tgid = tgid;
	event->time_ns = now;
	event->posted_ns = operation->posted_ns;
	event->comm = operation->comm;
	event->sequence = operation->sequence;
	event->payload_bytes = operation->payload_bytes;
	event->duration_ns = duration_ns;
	event->tgid = tgid;
	event->instance = operation->instance;
	event->net_devices = operation->net_devices;
	event->op = operation->op;
	event->data_type = operation->data_type;
	event->algorithm = operation->algorithm;
	event->protocol = operation->protocol;
	event->channels = operation->channels;
	bpf_ringbuf_submit(event, completion_events_flag(operation->launch));
	return 0;
}

/* ncclProfilerStopProxyOpEvent(part, args): the proxy is done with one part of an operation. */
SEC("uprobe")
int proxy_stop(struct registers *ctx)
{
	__u32 library = COOKIE_LIBRARY(bpf_get_attach_cookie(ctx));
	const struct internals_layout *layout;
	struct connection_key key = {};
	struct operation_key operation_key = {};
	struct connection *connection;
	struct operation *operation;
	struct thread thread;
	struct owner owner;
	__u64 arguments = SECOND_ARGUMENT(ctx);
	__u64 part = FIRST_ARGUMENT(ctx) & 0xff;

	if (!observed_thread(&thread))
		return 0;
	count_internal(INTERNAL_STOPS);
	layout = bpf_map_lookup_elem(&internals_layouts, &library);
	if (!layout || !layout->known)
		return 0;
	part = arguments + part * layout->part_size;
	if (read_user(&key.connection, 8, part + layout->part_connection) ||
	    read_user(&operation_key.operation, 8, arguments + layout->arguments_count)) {
		count_internal(INTERNAL_UNREADABLE);
		return 0;
	}
	key.tgid = thread.tgid;
	connection = bpf_map_lookup_elem(&connections, &key);
	if (!connection) {
		count_internal(INTERNAL_STOPS_UNKNOWN);
		return 0;
	}
	operation_key.group = connection->group;
	operation_key.tgid = thread.tgid;
	if (operation_key.operation & 1) {
		struct part_key part_key = {.connection = key.connection, .operation = operation_key.operation};
		struct part *posted;

		part_key.tgid = thread.tgid;
		posted = bpf_map_lookup_elem(&parts, &part_key);
		if (!posted) {
			count_internal(INTERNAL_STOPS_UNKNOWN);
			return 0;
		}
		operation_key.group = posted->instance;
		operation_key.operation = POINT_TO_POINT | posted->launch;
		owner = posted->owner;
		if (__sync_fetch_and_sub(&posted->posted, 1) == 1)
			drop_shared(&parts, &part_key, &owner, SHARED_PARTS);
	}
	operation = bpf_map_lookup_elem(&operations, &operation_key);
	if (!operation) {
		count_internal(INTERNAL_STOPS_UNKNOWN);
		return 0;
	}
	connection->last_ns = bpf_ktime_get_ns();
	__sync_fetch_and_add(&connection->completed, 1);
	if (__sync_fetch_and_sub(&operation->remaining, 1) == 1) {
		owner = operation->owner;
		complete(operation, thread.tgid);
		drop_shared(&operations, &operation_key, &owner, SHARED_OPERATIONS);
	}
	return 0;
}

#endif
