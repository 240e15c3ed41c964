/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Communicators: which there are, who they are, and the number of each of their calls.  Included once, by nccl.bpf.c.
 */
#ifndef RAILSCOPE_COMMUNICATORS_H
#define RAILSCOPE_COMMUNICATORS_H

#include "nccl.h"
#include "observed.h"
#include "shapes.h"
#include "shares.h"

/*
 * Communicators that made a call, by process and address; read through probes/nccl/programs/tables.py.  An entry whose
 * address is used again becomes the next communicator in place: deleting it could take a faster thread's new one away.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 16384);
	__type(key, struct communicator_key);
	__type(value, struct communicator);
} communicators SEC(".maps");

/*
 * Where settled communicators count: found by one multiplication and one comparison, while a look-up in the hash above
 * costs a tenth of the whole probe.  A slot belongs to the communicator that claimed it until that one ends; whoever
 * comes to the same slot meanwhile counts in its entry above.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1 << COMMUNICATOR_SLOT_BITS);
	__type(key, __u32);
	__type(value, struct communicator_slot);
} communicator_slots SEC(".maps");

/* Filled by the loader, one slot a library. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 256);
	__type(key, __u32);
	__type(value, struct comm_layout);
} layouts SEC(".maps");

/* Communicators coming and going: few, never crowded out by calls, and the reader is woken for each. */
#define LIFECYCLE_RING_BYTES (1024 * 1024)
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, LIFECYCLE_RING_BYTES);
} lifecycle_events SEC(".maps");

/* A field that this library has not stays as it is; returns whether one that it has could not be read. */
static __noinline int read_field(__s32 *field, __u64 comm, __u32 offset)
{
	if (!field || offset == NO_OFFSET)
		return 0;
	return bpf_probe_read_user(field, sizeof(*field), (const void *)(comm + offset)) != 0;
}

/* Whether a rank's place, its node and its node's ranks can be those of one communicator; -1 anywhere: they are not. */
static __always_inline int fits_together(const struct identity *identity)
{
	return identity->comm_hash && identity->n_nodes >= 1 && identity->n_nodes <= identity->nranks &&
	       identity->node >= 0 && identity->node < identity->n_nodes && identity->local_ranks >= 1 &&
	       identity->local_ranks <= identity->nranks && identity->local_rank >= 0 &&
	       identity->local_rank < identity->local_ranks && identity->cuda_dev >= 0 && identity->cuda_dev < MOST_GPUS;
}

/*
 * Read a communicator's identity from its struct.  It is confirmed when both magics hold and the rank lies within
 * the number of ranks; a non-blocking init may not have come that far yet.  Up to 2.20 there are no magics: there all
 * that says where a rank stands must fit together.
 */
static __noinline int read_identity(struct communicator *communicator, __u64 comm)
{
	__u32 library;
	struct comm_layout *layout;
	struct identity identity = {.bus_id = -1,
				    .rank = -1,
				    .nranks = -1,
				    .cuda_dev = -1,
				    .nvml_dev = -1,
				    .node = -1,
				    .n_nodes = -1,
				    .local_rank = -1,
				    .local_ranks = -1};
	__u64 magic = 0;

	if (!communicator)
		return 0;
	library = communicator->library;
	layout = bpf_map_lookup_elem(&layouts, &library);
	if (!layout || !layout->known)
		return 0;
	if (layout->start_magic != NO_OFFSET &&
	    (bpf_probe_read_user(&magic, sizeof(magic), (const void *)(comm + layout->start_magic)) ||
	     magic != COMMUNICATOR_MAGIC))
		return 0;
	if (layout->end_magic != NO_OFFSET &&
	    (bpf_probe_read_user(&magic, sizeof(magic), (const void *)(comm + layout->end_magic)) ||
	     magic != COMMUNICATOR_MAGIC))
		return 0;
	if (layout->comm_hash != NO_OFFSET &&
	    bpf_probe_read_user(&identity.comm_hash, sizeof(__u64), (const void *)(comm + layout->comm_hash)))
		return 0;
	if (layout->bus_id != NO_OFFSET &&
	    bpf_probe_read_user(&identity.bus_id, sizeof(__s64), (const void *)(comm + layout->bus_id)))
		return 0;
	/* A page may be away for a while: nothing half read is believed, the next call looks again. */
	if (read_field(&identity.rank, comm, layout->rank) || read_field(&identity.nranks, comm, layout->nranks) ||
	    read_field(&identity.cuda_dev, comm, layout->cuda_dev) ||
	    read_field(&identity.nvml_dev, comm, layout->nvml_dev) || read_field(&identity.node, comm, layout->node) ||
	    read_field(&identity.n_nodes, comm, layout->n_nodes) ||
	    read_field(&identity.local_rank, comm, layout->local_rank) ||
	    read_field(&identity.local_ranks, comm, layout->local_ranks))
		return 0;
	if (identity.nranks < 1 || identity.rank < 0 || identity.rank >= identity.nranks)
		return 0;
	/* The transport phase of init fills these last; before it, zero nodes mean "not yet". */
	if (layout->n_nodes != NO_OFFSET && identity.n_nodes < 1)
		return 0;
	if (layout->start_magic == NO_OFFSET && !fits_together(&identity))
		return 0;
	communicator->identity = identity;
	communicator->confirmed = 1;
	return 1;
}

/* A record of the calling process, all zero but for whose it is; 0: it is lost. */
static __always_inline struct lifecycle_event *new_lifecycle_event(struct thread *thread)
{
	__u64 place = PLACE_TAKEN | NOBODY;
	struct lifecycle_event *event;

	if (!ALL_INLINED)
		place = take_place(answerable(), thread->tgid, SHARED_LIFECYCLE_EVENTS,
				   RING_RECORDS(LIFECYCLE_RING_BYTES, lifecycle_event));
	if (!place)
		goto lost;
	event = bpf_ringbuf_reserve(&lifecycle_events, sizeof(*event), 0);
	if (!event) {
		if (!ALL_INLINED)
			return_place((__u32)place, thread->tgid, SHARED_LIFECYCLE_EVENTS);
		goto lost;
	}
	__builtin_memset(event, 0, sizeof(*event));
	event->owner.uid = (__u32)place;
	event->owner.tgid = thread->tgid;
	return event;
lost:
	count(STAT_LIFECYCLE_RING_FULL);
	return 0;
}

/* Tell the reader that a communicator came, was confirmed or went. */
static __noinline int write_lifecycle(struct communicator *communicator, __u64 comm, __u32 kind,
				      struct thread *thread)
{
	struct lifecycle_event *event;

	if (!communicator || !thread)
		return 0;
	event = new_lifecycle_event(thread);
	if (!event)
		return 0;
	event->time_ns = bpf_ktime_get_ns();
	event->comm = comm;
	event->tgid = thread->tgid;
	event->tid = thread->tid;
	event->instance = communicator->instance;
	event->kind = kind;
	event->nranks = -1;
	event->rank = -1;
	event->library = communicator->library;
	event->confirmed = communicator->confirmed;
	event->identity = communicator->identity;
	bpf_ringbuf_submit(event, BPF_RB_FORCE_WAKEUP);
	return 0;
}

static __always_inline struct communicator_slot *slot_of(__u64 comm, __u32 tgid)
{
	__u32 at = (comm ^ (__u64)tgid << 32) * HASH_FACTOR >> (64 - COMMUNICATOR_SLOT_BITS);

	return bpf_map_lookup_elem(&communicator_slots, &at);
}

/* Give a new communicator its slot, if nobody has it.  It is not found there before it is settled. */
static __always_inline void claim_slot(struct communicator_key *key, __u32 instance)
{
	struct communicator_slot *slot = slot_of(key->comm, key->tgid);

	if (!slot || __sync_val_compare_and_swap(&slot->instance, 0, instance))
		return;
	slot->comm = 0;
	slot->tgid = key->tgid;
	slot->sequence = 0;
	slot->last_ns = 0;
}

/* Take a communicator that ends out of its slot; its entry keeps the numbers. */
static __always_inline void leave_slot(struct communicator_key *key, struct communicator *communicator)
{
	struct communicator_slot *slot = slot_of(key->comm, key->tgid);

	if (!slot || slot->instance != communicator->instance)
		return;
	slot->comm = 0;
	communicator->sequence = slot->sequence;
	communicator->last_ns = slot->last_ns;
	__sync_val_compare_and_swap(&slot->instance, communicator->instance, 0);
}

/* Take a communicator that ends out of its slot and its place. */
static __always_inline void leave_places(struct communicator_key *key, struct communicator *communicator)
{
	leave_shapes(communicator->instance);
	leave_slot(key, communicator);
}

/* Write the entry of a new communicator; returns whether no other thread was faster. */
static __noinline int write_communicator(struct communicator_key *key, __u32 library, __u32 uid, __u32 instance)
{
	struct communicator fresh = {};
	struct communicator *found;

	if (!key)
		return 0;
	fresh.uid = uid;
	fresh.first_ns = bpf_ktime_get_ns();
	fresh.instance = instance;
	fresh.library = library;
	fresh.identity.rank = -1;
	fresh.identity.nranks = -1;
	claim_slot(key, fresh.instance);
	bpf_map_update_elem(&communicators, key, &fresh, BPF_NOEXIST);
	found = bpf_map_lookup_elem(&communicators, key);
	if (found && found->instance == instance)
		return 1;
	leave_slot(key, &fresh);
	return 0;
}

/* Make the entry of a communicator that was not known.  `made`: no other thread was faster. */
static __noinline struct communicator *add_communicator(struct communicator_key *key, __u32 library, __u32 *made)
{
	__u32 instance;
	__u64 place;

	if (!key || !made)
		return 0;
	place = take_place(answerable(), key->tgid, SHARED_COMMUNICATORS, communicator_entries);
	if (!place)
		return 0;
	instance = new_instance(key->tgid);
	*made = write_communicator(key, library, (__u32)place, instance);
	if (!*made) {
		leave_shapes(instance);
		return_place((__u32)place, key->tgid, SHARED_COMMUNICATORS);
	}
	return bpf_map_lookup_elem(&communicators, key);
}

#define IDENTITY_ATTEMPTS 200
#define RENEWING 1 /* in destroyed_ns: one thread is making this entry the next communicator */

/*
 * Make the entry of a communicator that ended at `ended_ns` (0: nobody saw it end) the one of the next at its address;
 * returns whether this thread did.  The reader may look at any moment: a number goes with "alive" only, and others
 * leave the identity alone until the number is there.
 */
static __noinline int renew_communicator(struct communicator_key *key, struct communicator *communicator,
					 __u32 library, __u64 ended_ns)
{
	struct identity unknown = {.rank = -1, .nranks = -1};
	__u32 instance;

	if (!key || !communicator)
		return 0;
	/* Whoever was faster has changed it since. */
	if (ended_ns == RENEWING ||
	    __sync_val_compare_and_swap(&communicator->destroyed_ns, ended_ns, RENEWING) != ended_ns)
		return 0;
	leave_places(key, communicator);
	communicator->attempts = IDENTITY_ATTEMPTS;
	communicator->confirmed = 0;
	communicator->identity = unknown;
	communicator->library = library;
	communicator->sequence = 0;
	communicator->last_ns = 0;
	communicator->empty_first = 0;
	communicator->empty_last = 0;
	communicator->first_ns = bpf_ktime_get_ns();
	instance = new_instance(key->tgid);
	claim_slot(key, instance);
	__sync_val_compare_and_swap(&communicator->destroyed_ns, RENEWING, 0);
	__sync_val_compare_and_swap(&communicator->instance, communicator->instance, instance);
	communicator->attempts = 0;
	return 1;
}

/* How many calls a communicator has seen. */
static __always_inline __u64 calls_so_far(struct communicator_key *key, struct communicator *communicator)
{
	struct communicator_slot *slot = slot_of(key->comm, key->tgid);

	return slot && slot->instance == communicator->instance ? slot->sequence : communicator->sequence;
}

static __always_inline int settled(const struct communicator *communicator)
{
	return !communicator->destroyed_ns && (communicator->confirmed || communicator->attempts >= IDENTITY_ATTEMPTS);
}

/* The communicator of a call that is new, unconfirmed or used again. */
static __noinline struct communicator *settle_communicator(struct communicator_key *key, __u32 library,
							     struct thread *thread)
{
	struct communicator *communicator;
	__u32 kind = LIFECYCLE_CONFIRMED;
	__u64 ended_ns;
	__u32 made = 0;

	if (!key || !thread)
		return 0;
	communicator = bpf_map_lookup_elem(&communicators, key);
	if (!communicator) {
		communicator = add_communicator(key, library, &made);
		if (!communicator) {
			count(STAT_COMMUNICATORS_FULL);
			return 0;
		}
	} else {
		ended_ns = communicator->destroyed_ns;
		if (ended_ns)
			made = renew_communicator(key, communicator, library, ended_ns);
	}
	if (made)
		kind = LIFECYCLE_SEEN;
	if (!communicator->confirmed && communicator->attempts < IDENTITY_ATTEMPTS) {
		communicator->attempts++;
		read_identity(communicator, key->comm);
	} else if (!made) {
		return communicator; /* another thread was faster */
	}
	if (made || communicator->confirmed)
		write_lifecycle(communicator, key->comm, kind, thread);
	return communicator;
}

/*
 * Number a call that its communicator's slot did not serve: the communicator is new, not settled, or without a slot.
 * Returns its instance in the upper half and the low 32 bits of the call's number in the lower; 0: there is no room.
 */
static __noinline __u64 number_call(struct communicator_key *key, __u32 library, struct thread *thread, __u64 now)
{
	struct communicator *communicator;
	struct communicator_slot *slot;
	__u64 instance;

	if (!key)
		return 0;
	communicator = bpf_map_lookup_elem(&communicators, key);
	if (!communicator || !settled(communicator))
		communicator = settle_communicator(key, library, thread);
	if (!communicator)
		return 0;
	instance = communicator->instance;
	slot = slot_of(key->comm, key->tgid);
	if (slot && slot->instance == instance) {
		if (settled(communicator))
			slot->comm = key->comm;
		slot->last_ns = now;
		return instance << 32 | (__u32)(__sync_fetch_and_add(&slot->sequence, 1) + 1);
	}
	communicator->last_ns = now;
	return instance << 32 | (__u32)(__sync_fetch_and_add(&communicator->sequence, 1) + 1);
}

#endif
