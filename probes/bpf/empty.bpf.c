// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* A program that does nothing: what its hit costs is the trap alone (probes/loading/calibration.py). */
#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

char _license[] SEC("license") = "Dual BSD/GPL";

SEC("uprobe")
int empty(void *ctx)
{
	(void)ctx;
	return 0;
}
