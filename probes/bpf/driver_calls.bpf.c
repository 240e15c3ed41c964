// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Launches of graphs and calls that wait for the GPU, at the entries and returns of CUDA's driver: who is inside, since
 * when, and how many there were.  Work that makes no NCCL call shows in nothing else: graphs, one-node jobs, kernels
 * that inference engines bring along.  An object of its own, loaded and attached for who asks for it.
 *
 * Only processes that the reader put into `driver_processes` are followed: no tenant can fill that table, and whoever else
 * uses the driver passes by after one look-up.  A thread's entry is made at its first call, out of its user's share
 * (shares.h), and stays for the next ones: a call costs two look-ups, and no entry is made or taken out in anybody's
 * way.  The reader takes out what has not been used for long.
 *
 * A call that another one makes in turn on its thread is part of that one.
 */
#include <linux/bpf.h>
#include <linux/types.h>

#include <bpf/bpf_helpers.h>

#include "nccl.h"

char _license[] SEC("license") = "Dual BSD/GPL";

/* Set by the loader before load, as in nccl.bpf.c. */
const volatile __u64 pid_namespace_device = 0;
const volatile __u64 pid_namespace_inode = 0;
const volatile __u32 only_observed_processes = 0;
const volatile __u32 write_events = 1;
const volatile __u32 sample_shift = 4;
const volatile __u32 communicator_entries = 16384;
const volatile __u32 aggregate_entries = 65536;
const volatile __u32 task_nsproxy = 0;
const volatile __u32 nsproxy_net_ns = 0;
const volatile __u32 net_ns_inum = 0;
#include "answerable.h"
const volatile __u32 driver_thread_entries = 4096;

#pragma clang diagnostic ignored "-Wunused-function" /* some are for who takes entries out himself */
#include "arguments.h"
#include "driver_calls.h"
#include "observed.h"
#include "shares.h"

/* Read by probes/nccl/programs/driver_calls.py. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 4096); /* driver_thread_entries */
	__type(key, __u32);
	__type(value, struct driver_thread);
} driver_threads SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, struct driver_process);
} driver_processes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, DRIVER_STAT_COUNT);
	__type(key, __u32);
	__type(value, __u64);
} driver_stats SEC(".maps");

static __always_inline void count_driver(__u32 stat)
{
	__u64 *value = bpf_map_lookup_elem(&driver_stats, &stat);

	if (value)
		__sync_fetch_and_add(value, 1);
}

/* The entry of a thread that makes its first call, or that follows another of the same number. */
static __noinline struct driver_thread *add_driver_thread(struct thread *thread)
{
	struct driver_thread fresh = {};
	__u64 place;
	__u32 tid;

	if (!thread)
		return 0;
	tid = thread->tid;
	place = take_place(answerable(), thread->tgid, SHARED_DRIVER_THREADS,
			   driver_thread_entries);
	if (!place) {
		count_driver(DRIVER_STAT_FULL);
		return 0;
	}
	fresh.tgid = thread->tgid;
	fresh.uid = (__u32)place;
	fresh.task = bpf_get_current_task();
	if (bpf_map_update_elem(&driver_threads, &tid, &fresh, BPF_NOEXIST))
		return_place(fresh.uid, thread->tgid, SHARED_DRIVER_THREADS);
	return bpf_map_lookup_elem(&driver_threads, &tid);
}

/* Entry of a call; returns whether its return matters. */
static __always_inline int enter_driver_call(struct registers *ctx, __u32 kind)
{
	struct driver_process *process;
	struct driver_thread *known;
	struct thread thread;
	__u64 now;

	if (!observed_thread(&thread))
		return 0;
	process = bpf_map_lookup_elem(&driver_processes, &thread.tgid);
	if (!process)
		return 0;
	count_driver(DRIVER_STAT_ENTRIES);
	known = bpf_map_lookup_elem(&driver_threads, &thread.tid);
	if (known && known->tgid != thread.tgid) {
		/* Of a process that has ended: the place stays with whom it was given to, until the reader is through. */
		count_driver(DRIVER_STAT_FULL);
		known = 0;
	} else if (known && known->start_ns && known->task == bpf_get_current_task() &&
		   known->stack > STACK_POINTER(ctx)) {
		return 0;
	} else if (!known) {
		known = add_driver_thread(&thread);
	}
	if (kind == DRIVER_GRAPH_LAUNCH)
		__sync_fetch_and_add(&process->launches, 1);
	else
		__sync_fetch_and_add(&process->waits, 1);
	/* Without an entry the return is counted all the same. */
	if (!known)
		return 1;
	now = bpf_ktime_get_ns();
	known->task = bpf_get_current_task();
	known->stack = STACK_POINTER(ctx);
	known->kind = kind;
	known->last_ns = now;
	known->start_ns = now;
	return 1;
}

static __always_inline int leave_driver_call(struct registers *ctx, __u32 kind)
{
	struct driver_process *process;
	struct driver_thread *known;
	struct thread thread;
	__u64 now, elapsed;

	if (!observed_thread(&thread))
		return 0;
	process = bpf_map_lookup_elem(&driver_processes, &thread.tgid);
	if (!process)
		return 0;
	count_driver(DRIVER_STAT_RETURNS);
	now = bpf_ktime_get_ns();
	known = bpf_map_lookup_elem(&driver_threads, &thread.tid);
	if (known && known->tgid == thread.tgid && known->start_ns) {
		/* Part of another call that goes on. */
		if (known->kind != kind || STACK_POINTER(ctx) < known->stack)
			return 0;
		elapsed = now - known->start_ns;
		known->start_ns = 0;
		known->last_ns = now;
		/* Two threads that write at once leave one of both. */
		if (elapsed > process->longest_ns)
			process->longest_ns = elapsed;
	}
	if (kind == DRIVER_GRAPH_LAUNCH)
		__sync_fetch_and_add(&process->launched, 1);
	else
		__sync_fetch_and_add(&process->waited, 1);
	process->last_return_ns = now;
	return 0;
}

/* Loaded as a session program (kernel 6.13): entry and return; see cuda.h. */
SEC("uprobe")
int driver_call_session(struct registers *ctx)
{
	__u32 kind = (__u32)bpf_get_attach_cookie(ctx);

	if (INSTRUCTION_POINTER(ctx) != bpf_get_func_ip(ctx))
		return leave_driver_call(ctx, kind);
	return !enter_driver_call(ctx, kind);
}

SEC("uprobe")
int driver_call_entry(struct registers *ctx)
{
	enter_driver_call(ctx, (__u32)bpf_get_attach_cookie(ctx));
	return 0;
}

SEC("uretprobe")
int driver_call_return(struct registers *ctx)
{
	return leave_driver_call(ctx, (__u32)bpf_get_attach_cookie(ctx));
}
