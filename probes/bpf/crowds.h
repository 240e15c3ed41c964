/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Fair shares of a crowded ring of calls: included once, before call_slots.h.
 *
 * The last quarter of a ring is shared out, by the rule of shares.h: who floods
 * it loses his own records first.  Only records that come to that quarter are counted by user and process, so that all
 * others cost nothing more; with each reading the counts begin anew.
 */
#ifndef RAILSCOPE_CROWDS_H
#define RAILSCOPE_CROWDS_H

#include "nccl.h"
#include "shares.h"

/* The latest ones: what else is known of an owner is that he has little there. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 8192);
	__type(key, struct crowd_key);
	__type(value, struct crowd);
} crowds SEC(".maps");

static __always_inline struct crowd *crowd_of(struct crowd_key *key, __u64 taken)
{
	struct crowd *known = bpf_map_lookup_elem(&crowds, key);
	struct crowd fresh = {.taken = taken};

	if (!known) {
		bpf_map_update_elem(&crowds, key, &fresh, BPF_NOEXIST);
		known = bpf_map_lookup_elem(&crowds, key);
	}
	if (known && known->taken != taken) {
		known->records = 0;
		known->taken = taken;
	}
	return known;
}

/* Whether the caller may have one of the `free` slots that a crowded ring still has. */
VERIFIED_ONCE int may_crowd(__u32 tgid, __u32 ring, __u64 taken, __u64 free)
{
	struct crowd_key key = {.uid = answerable(), .ring = ring};
	struct crowd *user = crowd_of(&key, taken), *process;
	__u64 of_user;

	if (!user)
		return 1;
	of_user = user->records;
	key.tgid = tgid;
	process = of_user < free ? crowd_of(&key, taken) : 0;
	if (of_user >= free || (process && process->records >= free - of_user)) {
		refuse_record(key.uid, SHARED_CALL_EVENTS);
		return 0;
	}
	__sync_fetch_and_add(&user->records, 1);
	if (process)
		__sync_fetch_and_add(&process->records, 1);
	return 1;
}

#define MAY_CROWD(tgid, ring, taken, free) (ALL_INLINED || may_crowd(tgid, ring, taken, free))

#endif
