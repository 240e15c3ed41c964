// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * The same probes with a session program (kernel 6.13 and newer): one link serves entry and return, and the entry
 * decides call by call whether the return is trapped at all, so sampling host time costs nothing on other calls.
 */
#include "nccl.bpf.c"

extern __u64 *bpf_session_cookie(void) __ksym;

#define SESSION_NO_RETURN 1 /* the kernel skips the return probe of this call */

/*
 * Never called.  A tracing program that could make a tail call gets no private stack (kernel 6.13), which saves 75 ns
 * at each read of struct ncclInfo: private stacks lie in vmalloc memory, and hardened usercopy looks that up in a tree.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} no_programs SEC(".maps");
#define NEVER (sample_shift > 255)

SEC("uprobe")
int collective_session(struct registers *ctx)
{
	__u64 *start_and_op = bpf_session_cookie();
	struct thread thread;
	struct call call;
	__u64 start_ns;

	if (NEVER)
		bpf_tail_call(ctx, &no_programs, 0);
	/* Zero at entry, and only a sampled call's return comes here: asking which it is would cost another call. */
	if (*start_and_op) {
		count(STAT_RETURNS);
		/* The op rides in the low four bits: 16 ns are below what a sample can tell. */
		add_enqueue_time(*start_and_op & (OP_COUNT - 1), *start_and_op & ~(__u64)(OP_COUNT - 1));
		return 0;
	}
	start_ns = account(ctx, bpf_get_attach_cookie(ctx), &call, &thread);
	if (!start_ns)
		return SESSION_NO_RETURN;
	*start_and_op = (start_ns & ~(__u64)(OP_COUNT - 1)) | (call.op & (OP_COUNT - 1));
	return 0;
}
