// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * When processes that use NCCL were stopped, by SIGSTOP and the terminal's stop signals.  An object of its own: calls
 * are counted where the kernel does not take it, and stopped processes are found by looking.
 *
 * The tracepoint runs for every signal that a process of this host receives; what is no stop signal of a process that
 * the reader named goes no further.  A process with a handler for one of these signals receives it and runs on: whether
 * it stopped is for the reader to see.
 */
#include <linux/bpf.h>
#include <linux/types.h>

#include <bpf/bpf_helpers.h>

char _license[] SEC("license") = "Dual BSD/GPL";

/* Set by the loader before load, as in nccl.bpf.c. */
const volatile __u64 pid_namespace_device = 0;
const volatile __u64 pid_namespace_inode = 0;

#define STOPPED_BY_KILL 19 /* SIGSTOP; 20 to 22: SIGTSTP, SIGTTIN, SIGTTOU; on x86 and arm64 alike */
#define STOPPED_BY_TERMINAL 22
#define WAKE_PAUSE_NS 100000000ULL

/* By process: when it received a stop signal last, 0: never.  The reader adds and deletes entries. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, __u32);
	__type(value, __u64);
} stopped_processes SEC(".maps");

/* By user: when the reader was woken for one of his processes.  Who stops and continues in a loop wakes it seldom. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1024);
	__type(key, __u32);
	__type(value, __u64);
} woken_for SEC(".maps");

/* Wakes the reader, who learns from the map above which processes were stopped. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096);
} stop_wakeups SEC(".maps");

/* TP_PROTO(int sig, struct kernel_siginfo *info, struct k_sigaction *ka), include/trace/events/signal.h */
SEC("raw_tracepoint/signal_deliver")
int stop_delivered(struct bpf_raw_tracepoint_args *ctx)
{
	__u32 signal = (__u32)ctx->args[0], tgid, uid;
	__u64 now_ns, *stopped_ns, *woken_ns;

	if (signal < STOPPED_BY_KILL || signal > STOPPED_BY_TERMINAL)
		return 0;
	if (pid_namespace_inode) {
		struct bpf_pidns_info info = {};

		if (bpf_get_ns_current_pid_tgid(pid_namespace_device, pid_namespace_inode, &info, sizeof(info)))
			return 0;
		tgid = info.tgid;
	} else {
		tgid = bpf_get_current_pid_tgid() >> 32;
	}
	stopped_ns = bpf_map_lookup_elem(&stopped_processes, &tgid);
	if (!stopped_ns)
		return 0;
	now_ns = bpf_ktime_get_ns();
	*stopped_ns = now_ns;
	uid = (__u32)bpf_get_current_uid_gid();
	woken_ns = bpf_map_lookup_elem(&woken_for, &uid);
	if (woken_ns && now_ns - *woken_ns < WAKE_PAUSE_NS)
		return 0;
	bpf_map_update_elem(&woken_for, &uid, &now_ns, BPF_ANY);
	bpf_ringbuf_output(&stop_wakeups, &now_ns, sizeof(now_ns), BPF_RB_FORCE_WAKEUP);
	return 0;
}
