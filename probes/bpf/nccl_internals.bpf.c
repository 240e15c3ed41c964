// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Probes below NCCL's entry points: what completed and when, how it was launched, and what was handed to each network
 * device.  An object of its own, loaded beside nccl.bpf.c when a level above *counts* is wanted; the tables of
 * processes and communicators are shared with it (probes/nccl/programs/internals.py hands them over).
 *
 * Everything here is read with the offsets of one known build.  Without them nothing is read.
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

#pragma clang diagnostic ignored "-Wunused-function" /* some are for the entry points only */
#include "arguments.h"
#include "arithmetic.h"
#include "communicators.h"
#include "observed.h"

#include "completion.h"
#include "cuda.h"
#include "errors.h"
#include "failover.h"
#include "plans.h"
#include "sends.h"
