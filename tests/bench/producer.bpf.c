// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Writes call events without a trap for each: a uprobe takes so long that two cores never fill a ring faster than its
 * readers empty it.  One run writes as many as it is told, as collective_entry() of probes/bpf does.
 */
#include <linux/bpf.h>
#include <linux/types.h>

#include <bpf/bpf_helpers.h>

#include "nccl.h"

char _license[] SEC("license") = "Dual BSD/GPL";

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 2 * 1024 * 1024);
} call_events SEC(".maps");

/* Argument and answer of one run; tests/bench/produce.py has the same. */
struct order {
	__u64 sequence; /* of the next event */
	__u32 events;
	__u32 lost;
};

#define ALL_REDUCE 4
#define FLOAT32 7

static long write_event(__u32 at, void *context)
{
	struct order *order = context;
	struct call_event *event = bpf_ringbuf_reserve(&call_events, sizeof(*event), 0);

	(void)at;
	order->sequence++;
	if (!event) {
		order->lost++;
		return 0;
	}
	event->time_ns = bpf_ktime_get_ns();
	event->comm = 0x7f0000001000;
	event->stream = 0x7f0000002000;
	event->payload_bytes = 1024ULL << (order->sequence & 7); /* eight sizes, as a job's buckets have */
	event->tgid = 1;
	event->tid = 1;
	event->instance = 1;
	event->sequence = order->sequence;
	event->peer = NO_PEER;
	event->op = ALL_REDUCE;
	event->data_type = FLOAT32;
	event->library = 0;
	bpf_ringbuf_submit(event, BPF_RB_NO_WAKEUP);
	return 0;
}

SEC("syscall")
int produce(struct order *given)
{
	struct order order = *given;

	order.lost = 0;
	bpf_loop(order.events, write_event, &order, 0);
	*given = order;
	return 0;
}
