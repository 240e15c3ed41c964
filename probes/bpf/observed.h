/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Who is calling, whether it is to be counted, and what the programs count about themselves.  Included once, after the
 * constants that the loader sets.
 */
#ifndef RAILSCOPE_OBSERVED_H
#define RAILSCOPE_OBSERVED_H

#include <linux/bpf.h>
#include <linux/types.h>

#include <bpf/bpf_helpers.h>

#include "nccl.h"

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, __u8);
} observed_processes SEC(".maps");

/* By inode: network namespaces whose processes are observed.  Filled by the loader. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 256);
	__type(key, __u32);
	__type(value, __u8);
} observed_namespaces SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, STAT_COUNT);
	__type(key, __u32);
	__type(value, __u64);
} stats SEC(".maps");

static __always_inline void count(__u32 stat)
{
	__u64 *value = bpf_map_lookup_elem(&stats, &stat);

	if (value)
		__sync_fetch_and_add(value, 1);
}

struct thread {
	__u32 tgid;
	__u32 tid;
};

/*
 * Whether the calling process, which nobody has named yet, is in a network namespace that is observed.  A process that
 * was forked calls before the reader can know of it.
 */
static __noinline int in_observed_namespace(void)
{
	__u64 task = bpf_get_current_task(), nsproxy = 0, net = 0;
	__u32 inode = 0;

	if (!net_ns_inum || bpf_probe_read_kernel(&nsproxy, sizeof(nsproxy), (const void *)(task + task_nsproxy)) ||
	    !nsproxy || bpf_probe_read_kernel(&net, sizeof(net), (const void *)(nsproxy + nsproxy_net_ns)) || !net ||
	    bpf_probe_read_kernel(&inode, sizeof(inode), (const void *)(net + net_ns_inum)))
		return 0;
	return bpf_map_lookup_elem(&observed_namespaces, &inode) != 0;
}

/* The calling thread as the reader sees it; false when this process is not to be observed. */
static __always_inline int observed_thread(struct thread *thread)
{
	if (pid_namespace_inode) {
		struct bpf_pidns_info info = {};

		if (bpf_get_ns_current_pid_tgid(pid_namespace_device, pid_namespace_inode, &info, sizeof(info))) {
			count(STAT_FOREIGN_PID_NAMESPACE);
			return 0;
		}
		thread->tgid = info.tgid;
		thread->tid = info.pid;
	} else {
		__u64 both = bpf_get_current_pid_tgid();

		thread->tgid = both >> 32;
		thread->tid = (__u32)both;
	}
	if (only_observed_processes && !bpf_map_lookup_elem(&observed_processes, &thread->tgid) && !in_observed_namespace()) {
		count(STAT_FILTERED);
		return 0;
	}
	return 1;
}

#endif
