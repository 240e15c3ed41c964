/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Structs of driver_calls.bpf.c, shared with probes/nccl/records/driver_calls.py. */
#ifndef RAILSCOPE_DRIVER_CALLS_H
#define RAILSCOPE_DRIVER_CALLS_H

#include "nccl.h"

/* Attach cookie of a function of the driver. */
enum driver_call_kind {
	DRIVER_GRAPH_LAUNCH, /* cuGraphLaunch(graph, stream) */
	DRIVER_STREAM_SYNC, /* cuStreamSynchronize(stream) */
	DRIVER_EVENT_SYNC, /* cuEventSynchronize(event) */
	DRIVER_CONTEXT_SYNC, /* cuCtxSynchronize() */
};

/* By thread that made such a call: written by the programs, taken out by the reader. */
struct driver_thread {
	__u64 start_ns; /* of the call that it is in; 0: in none */
	__u64 last_ns; /* when its latest call began or returned */
	__u64 stack; /* the stack pointer at entry */
	__u64 task; /* the thread, as the kernel addresses it: numbers are used again */
	__u32 tgid;
	__u32 uid; /* in whose share the entry is */
	__u32 kind;
	__u32 reserved;
};

/* By process: made by the reader, for those that are to be followed; written by the programs. */
struct driver_process {
	__u64 launches; /* of graphs: entries */
	__u64 launched; /* returns */
	__u64 waits; /* calls that synchronize: entries */
	__u64 waited; /* returns */
	__u64 last_return_ns;
	__u64 longest_ns; /* the longest of the calls that returned */
};

enum driver_stat {
	DRIVER_STAT_ENTRIES, /* runs at entries, in processes that are followed */
	DRIVER_STAT_RETURNS,
	DRIVER_STAT_FULL, /* calls that are not followed: the table was full, or a share of it used up */
	DRIVER_STAT_COUNT,
};

ASSERT_SIZE(driver_thread, 48);
ASSERT_SIZE(driver_process, 48);

#endif
