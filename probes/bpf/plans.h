/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Kernel plans: part of nccl_internals.bpf.c.
 *
 * plan_launch() at ncclLaunchKernel() tells the algorithm, protocol and channels of collectives that have no network
 * part (those that have one are told by completion.h), and recognises plans that belong to a CUDA graph.  When a graph
 * is replayed NCCL's entry points are not called: plan_replay() at the host callback of a captured plan counts the
 * collectives that ran unseen.
 */
#ifndef RAILSCOPE_PLANS_H
#define RAILSCOPE_PLANS_H

#include "completion.h"

#define MOST_TASKS 128
#define PLAN_BYTES_MOST 512

struct plan_walk {
	__u64 task;
	__u32 library;
	__u32 reserved;
};

static long take_task(__u64 number, struct plan_walk *walk)
{
	const struct internals_layout *layout;
	__u32 slot = walk->library;
	__u64 task = walk->task;
	__u8 function, channels, algorithm, protocol;

	(void)number;
	layout = bpf_map_lookup_elem(&internals_layouts, &slot);
	if (!layout || !task || read_user(&function, 1, task + layout->task_function) ||
	    read_user(&walk->task, 8, task + layout->task_next) ||
	    read_user(&channels, 1, task + layout->task_channels) ||
	    read_user(&algorithm, 1, task + layout->task_algorithm) ||
	    read_user(&protocol, 1, task + layout->task_protocol))
		return 1;
	count_launch(function, algorithm, protocol, channels);
	return 0;
}

/* The counters of the communicator of a plan, made if need be. */
static __always_inline struct proxy_communicator *plan_owner(struct communicator_key *key, __u32 library)
{
	struct communicator *communicator = bpf_map_lookup_elem(&communicators, key);
	struct proxy_communicator *proxy;

	if (!communicator)
		return 0;
	proxy = bpf_map_lookup_elem(&proxy_communicators, key);
	if (proxy && proxy->instance == communicator->instance)
		return proxy;
	learn_proxy(key, communicator->instance, library);
	return bpf_map_lookup_elem(&proxy_communicators, key);
}

static __always_inline __u32 plan_word(__u64 plan, __u32 offset)
{
	__u32 word = 0;

	if (offset == NO_OFFSET || read_user(&word, 4, plan + offset))
		return 0;
	return word;
}

static __always_inline __u8 plan_flag(__u64 plan, __u32 offset)
{
	__u8 flag = 0;

	if (offset == NO_OFFSET || read_user(&flag, 1, plan + offset))
		return 0;
	return flag;
}

/* ncclLaunchKernel(comm, plan). */
SEC("uprobe")
int plan_launch(struct registers *ctx)
{
	struct plan_walk walk = {.library = COOKIE_LIBRARY(bpf_get_attach_cookie(ctx))};
	struct communicator_key key = {.comm = FIRST_ARGUMENT(ctx)};
	struct proxy_communicator *proxy;
	const struct internals_layout *layout;
	__u32 slot = walk.library;
	__u64 plan = SECOND_ARGUMENT(ctx);
	struct thread thread;

	if (!observed_thread(&thread))
		return 0;
	count_internal(INTERNAL_PLANS);
	key.tgid = thread.tgid;
	layout = bpf_map_lookup_elem(&internals_layouts, &slot);
	if (!layout || !layout->known)
		return 0;
	if (plan_flag(plan, layout->plan_persistent)) {
		proxy = plan_owner(&key, slot);
		if (proxy)
			__sync_fetch_and_add(&proxy->captured, plan_word(plan, layout->plan_collectives));
	}
	if (layout->plan_tasks == NO_OFFSET || plan_flag(plan, layout->plan_has_proxy_operations))
		return 0;
	if (!read_user(&walk.task, 8, plan + layout->plan_tasks))
		bpf_loop(MOST_TASKS, take_task, &walk, 0);
	return 0;
}

/* hostStreamPlanCallback(plan): CUDA runs the host part of a plan. */
SEC("uprobe")
int plan_replay(struct registers *ctx)
{
	__u32 library = COOKIE_LIBRARY(bpf_get_attach_cookie(ctx));
	struct communicator_key key = {};
	struct proxy_communicator *proxy;
	const struct internals_layout *layout;
	__u64 plan = FIRST_ARGUMENT(ctx);
	struct thread thread;

	if (!observed_thread(&thread))
		return 0;
	count_internal(INTERNAL_REPLAYS);
	key.tgid = thread.tgid;
	layout = bpf_map_lookup_elem(&internals_layouts, &library);
	if (!layout || !layout->known || !plan_flag(plan, layout->plan_persistent) ||
	    read_user(&key.comm, 8, plan + layout->plan_comm))
		return 0;
	proxy = plan_owner(&key, library);
	if (proxy)
		__sync_fetch_and_add(&proxy->replayed, plan_word(plan, layout->plan_collectives));
	return 0;
}

#endif
