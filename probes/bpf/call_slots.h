/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Calls on their way to the reader, one record each, for time lines.
 *
 * The kernel's ring buffer has one lock and one position for all processors.  With two that call at once each record
 * cost 0.26 us, as much as all counting: waiting for lines that the other processor had, at every step an atomic
 * operation.  Here a ring is a processor's own as long as there are enough of them, its slots lie in an array that the
 * reader maps, and a record takes one atomic operation on a line that stays where it is; the record itself is written
 * by stores that nothing waits for.  probes/rings/slots.py reads them.
 *
 * A ring that is read in time takes whoever comes; its last quarter is shared out (crowds.h).
 *
 * Several writers may share a ring: processors, where there are more of them than rings, and a thread that is preempted
 * in here.  So slots are reserved one by one, and each is finished by a stamp of its own.  A record that finds its ring
 * full is lost and counted; an unread one is never written over.
 */
#ifndef RAILSCOPE_CALL_SLOTS_H
#define RAILSCOPE_CALL_SLOTS_H

#include <linux/bpf.h>
#include <linux/types.h>

#include <bpf/bpf_helpers.h>

#include "nccl.h"

/* The loader gives both their sizes. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct call_ring);
} call_rings SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 64);
	__type(key, __u32);
	__type(value, struct call_slot);
} call_slots SEC(".maps");

/* What is written here says nothing; that it is written wakes the reader. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096);
} call_wakeups SEC(".maps");

/* Whether a caller may have one of the `free` slots that a crowded ring still has (crowds.h). */
#ifndef MAY_CROWD
#define MAY_CROWD(tgid, ring, taken, free) ((void)(tgid), (void)(taken), 1)
#endif

#define RESERVE_ATTEMPTS 8 /* each but the last lost to another writer of the same ring */
#define WAKEUPS_BITS 5 /* woken anew after each 32nd part of a ring, until the reader comes */

static __noinline int wake_reader(void)
{
	__u64 *wakeup = bpf_ringbuf_reserve(&call_wakeups, sizeof(*wakeup), 0);

	if (wakeup) {
		*wakeup = 0;
		bpf_ringbuf_submit(wakeup, BPF_RB_FORCE_WAKEUP);
	}
	return 0;
}

/*
 * A slot to write a call into, and the stamp that finishes it; 0: there is no room.  The reader is to come before half
 * of a ring waits, unless calls suddenly come much faster than before: then it is woken.
 */
static __always_inline struct call_slot *reserve_call_slot(__u32 tgid, __u64 *stamp)
{
	__u32 at = bpf_get_smp_processor_id() & call_ring_mask;
	struct call_ring *ring = bpf_map_lookup_elem(&call_rings, &at);
	__u64 slots = 1ULL << call_slot_bits;
	__u64 taken;
	__s64 free;

	if (!ring)
		return 0;
	taken = *(volatile __u64 *)&ring->taken;
	free = slots - (*(volatile __u64 *)&ring->reserved - taken);
	if (free > 0 && free <= (__s64)(slots / 4) && !MAY_CROWD(tgid, at, taken, free))
		return 0;
#pragma unroll
	for (int attempt = 0; attempt < RESERVE_ATTEMPTS; attempt++) {
		__u64 reserved = *(volatile __u64 *)&ring->reserved;
		/* Negative when the reader came in between, and both are seen in the other order. */
		__s64 waiting = reserved - *(volatile __u64 *)&ring->taken;

		if (waiting >= (__s64)slots)
			return 0;
		if (__sync_val_compare_and_swap(&ring->reserved, reserved, reserved + 1) != reserved)
			continue;
		if (waiting >= (__s64)(slots / 2) && !(waiting & ((slots >> WAKEUPS_BITS) - 1)))
			wake_reader();
		at = at << call_slot_bits | (reserved & (slots - 1));
		*stamp = reserved + 1;
		return bpf_map_lookup_elem(&call_slots, &at);
	}
	return 0;
}

/* The reader takes a record whose stamp it sees, so the stamp must come last. */
static __always_inline void finish_call_slot(struct call_slot *slot, __u64 stamp)
{
#if defined(__TARGET_ARCH_x86)
	/* This architecture lets other processors see stores in their order. */
	asm volatile("" ::: "memory");
	*(volatile __u64 *)&slot->stamp = stamp;
#else
	__sync_lock_test_and_set(&slot->stamp, stamp);
#endif
}

#endif
