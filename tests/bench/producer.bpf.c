// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Writes call events without a trap for each: a uprobe takes so long that two cores never fill a ring faster than its
 * readers empty it.  One run writes as many as it is told: into slots, as collective_entry() of probes/bpf does, or
 * into a ring buffer of the kernel, for readers of others.
 */
#include <linux/bpf.h>
#include <linux/types.h>

#include <bpf/bpf_helpers.h>

#include "nccl.h"

char _license[] SEC("license") = "Dual BSD/GPL";

const volatile __u32 call_ring_mask = 0;
const volatile __u32 call_slot_bits = 6;

#include "call_slots.h"

/* What the peers' readers can read. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 2 * 1024 * 1024);
} kernel_ring SEC(".maps");

/* Argument and answer of one run; tests/bench/produce.py has the same. */
struct order {
	__u64 sequence; /* of the next event */
	__u32 events;
	__u32 lost;
};

#define ALL_REDUCE 4
#define FLOAT32 7

static __always_inline void fill(struct call_event *event, __u64 sequence)
{
	event->time_ns = bpf_ktime_get_ns();
	event->comm = 0x7f0000001000;
	event->stream = 0x7f0000002000;
	event->payload_bytes = 1024ULL << (sequence & 7); /* eight sizes, as a job's buckets have */
	event->tgid = 1;
	event->tid = 1;
	event->instance = 1;
	event->sequence = sequence;
	event->peer = NO_PEER;
	event->op = ALL_REDUCE;
	event->data_type = FLOAT32;
	event->library = 0;
}

static long write_slot(__u32 at, void *context)
{
	struct order *order = context;
	__u64 stamp;
	struct call_slot *slot = reserve_call_slot(1, &stamp);

	(void)at;
	order->sequence++;
	if (slot) {
		fill(&slot->event, order->sequence);
		finish_call_slot(slot, stamp);
	} else {
		order->lost++;
	}
	return 0;
}

static long write_record(__u32 at, void *context)
{
	struct order *order = context;
	struct call_event *event = bpf_ringbuf_reserve(&kernel_ring, sizeof(*event), 0);

	(void)at;
	order->sequence++;
	if (event) {
		fill(event, order->sequence);
		bpf_ringbuf_submit(event, BPF_RB_NO_WAKEUP);
	} else {
		order->lost++;
	}
	return 0;
}

static __always_inline int write_all(struct order *given, long (*write_one)(__u32, void *))
{
	struct order order = *given;

	order.lost = 0;
	bpf_loop(order.events, write_one, &order, 0);
	*given = order;
	return 0;
}

SEC("syscall")
int produce_slots(struct order *given)
{
	return write_all(given, write_slot);
}

SEC("syscall")
int produce_records(struct order *given)
{
	return write_all(given, write_record);
}
