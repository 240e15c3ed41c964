// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * The same probes with a session program (kernel 6.13 and newer): one link serves entry and return, and the entry
 * decides call by call whether the return is trapped at all, so sampling host time costs nothing on other calls.
 */
#include "nccl.bpf.c"

extern _Bool bpf_session_is_return(void) __ksym;
extern __u64 *bpf_session_cookie(void) __ksym;

#define SESSION_NO_RETURN 1 /* the kernel skips the return probe of this call */

SEC("uprobe")
int collective_session(struct registers *ctx)
{
	__u64 *start_and_op = bpf_session_cookie();
	struct thread thread;
	struct call call;
	__u64 start_ns;

	if (bpf_session_is_return()) {
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
