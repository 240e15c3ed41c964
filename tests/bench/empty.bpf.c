// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/* The floor of the bench: what a uprobe costs that does nothing. */
#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

char _license[] SEC("license") = "Dual BSD/GPL";

SEC("uprobe")
int empty(void *ctx)
{
	(void)ctx;
	return 0;
}
