/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What another rank's proxy does for a communicator: part of posting.h.
 *
 * NCCL may send through the network device of another local rank, by that rank's proxy, mostly in another process
 * (PXN).  It has a list of proxy operations for each such rank from the moment on at which they are connected.  What is
 * handed over there is not seen to end, so of such a communicator it is not known what is complete.  The bytes are
 * counted where they are sent.
 */
#ifndef RAILSCOPE_ELSEWHERE_H
#define RAILSCOPE_ELSEWHERE_H

#include "proxy_tables.h"

#define MOST_LISTS 4096
#define LOOK_AGAIN_MASK 0xff /* launches */

struct search {
	__u64 lists;
	__u64 own;
	__u64 ranks; /* which list each local rank has; 0: they are numbered as they lie */
	__u32 library;
	__u32 found;
};

static long look_at_list(__u64 number, struct search *search)
{
	const struct internals_layout *layout;
	__u32 slot = search->library, index = number;
	__u64 pool = 0, list;

	layout = bpf_map_lookup_elem(&internals_layouts, &slot);
	if (!layout || (search->ranks && read_user(&index, 4, search->ranks + 4 * number)))
		return 1;
	list = search->lists + (__u64)index * layout->list_size;
	if (list == search->own || read_user(&pool, 8, list + layout->list_pool) || !pool)
		return 0;
	search->found = 1;
	return 1;
}

/* Whether such a list is in use; once it is, it stays. */
static __noinline int look_elsewhere(struct communicator_key *key, struct proxy_communicator *proxy, __u32 library)
{
	struct search search = {.library = library};
	const struct internals_layout *layout;
	struct communicator *communicator;
	__u64 state = 0;
	__s32 count = 0;

	if (!key || !proxy || proxy->elsewhere)
		return 0;
	layout = bpf_map_lookup_elem(&internals_layouts, &library);
	communicator = bpf_map_lookup_elem(&communicators, key);
	if (!layout || !communicator || read_user(&state, 8, key->comm + layout->comm_proxy_state) ||
	    read_user(&search.lists, 8, state + layout->state_lists) || !search.lists)
		return 0;
	if (layout->state_list_count != NO_OFFSET) {
		if (read_user(&count, 4, state + layout->state_list_count))
			return 0;
	} else {
		count = communicator->identity.local_ranks;
		if (read_user(&search.ranks, 8, key->comm + layout->comm_top_parent_local_ranks) || !search.ranks)
			return 0;
	}
	if (count < 2)
		return 0;
	search.own = proxy->list;
	bpf_loop(count < MOST_LISTS ? count : MOST_LISTS, look_at_list, &search, 0);
	if (search.found)
		proxy->elsewhere = 1;
	return 0;
}

#endif
