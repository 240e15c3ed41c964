/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Programs for the calls that make and end communicators: few, and never in anybody's way.  Included once, by
 * nccl.bpf.c.
 */
#ifndef RAILSCOPE_LIFECYCLE_H
#define RAILSCOPE_LIFECYCLE_H

#include "arguments.h"
#include "communicators.h"
#include "nccl.h"
#include "observed.h"

/* Init calls under way, by thread, between entry and return. */
struct init_under_way {
	__u64 start_ns;
	__u64 new_comm; /* where the pointer will be stored */
	__u64 parent;
	__s32 nranks;
	__s32 rank;
	__u32 has_unique_id;
	__u32 reserved;
	__u8 unique_id[UNIQUE_ID_BYTES];
};
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, struct init_under_way);
} inits_under_way SEC(".maps");

/* Entry of a call that makes communicators. */
SEC("uprobe")
int init_entry(struct registers *ctx)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	__u32 id_place = COOKIE_PLACE(cookie, PLACE_UNIQUE_ID);
	struct init_under_way init = {};
	struct arguments arguments;
	struct thread thread;
	__u64 id;

	if (!observed_thread(&thread))
		return 0;
	count(STAT_LIFECYCLE);
	take_arguments(&arguments, ctx, cookie);
	init.start_ns = bpf_ktime_get_ns();
	init.new_comm = argument(&arguments, COOKIE_PLACE(cookie, PLACE_NEW_COMM));
	init.parent = argument(&arguments, COOKIE_PLACE(cookie, PLACE_PARENT));
	init.nranks = -1;
	init.rank = -1;
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
	bpf_map_update_elem(&inits_under_way, &thread.tid, &init, BPF_ANY);
	return 0;
}

/* One new communicator at the return of an init call. */
VERIFIED_ONCE int settle_init(struct init_under_way *init, __u64 comm, __u64 cookie, __s32 result,
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
	event = bpf_ringbuf_reserve(&lifecycle_events, sizeof(*event), 0);
	if (!event) {
		count(STAT_LIFECYCLE_RING_FULL);
		return 0;
	}
	__builtin_memset(event, 0, sizeof(*event));
	event->time_ns = bpf_ktime_get_ns();
	event->comm = comm;
	event->parent = init->parent;
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
	struct init_under_way *init;
	struct thread thread;
	__u64 comm = 0;
	__s32 result = (__s32)RETURN_VALUE(ctx);

	if (!observed_thread(&thread))
		return 0;
	count(STAT_LIFECYCLE);
	init = bpf_map_lookup_elem(&inits_under_way, &thread.tid);
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
	bpf_map_delete_elem(&inits_under_way, &thread.tid);
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
	struct thread thread;

	if (!observed_thread(&thread))
		return 0;
	count(STAT_LIFECYCLE);
	key.comm = FIRST_ARGUMENT(ctx);
	key.tgid = thread.tgid;
	communicator = bpf_map_lookup_elem(&communicators, &key);
	if (!communicator)
		return 0;
	if (kind == LIFECYCLE_DESTROY || kind == LIFECYCLE_ABORT) {
		leave_slot(&key, communicator);
		communicator->destroyed_ns = bpf_ktime_get_ns();
	}
	write_lifecycle(communicator, key.comm, kind, &thread);
	return 0;
}

#endif
