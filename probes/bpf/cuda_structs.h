/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Structs of the probes on CUDA (cuda.h), shared with probes/nccl/records/cuda.py. */
#ifndef RAILSCOPE_CUDA_STRUCTS_H
#define RAILSCOPE_CUDA_STRUCTS_H

#include "nccl.h"

#define CUDA_SUCCESS 0
#define CUDA_LEGACY_STREAM 1 /* cudaStreamLegacy */
#define CUDA_PER_THREAD_STREAM 2
#define CUDA_CALL_BITS 9 /* calls of one communicator that are followed at once */
#define CUDA_RANGE_BITS 8 /* communicators whose calls are followed */
#define CUDA_BEHIND 8 /* communicators followed on one stream */

/* Attach cookie of a CUDA function: what it does, and whether stream 0 is the thread's own there (*_ptsz). */
#define CUDA_KIND(cookie) ((__u32)(cookie) & 0xff)
#define CUDA_PER_THREAD(cookie) (((cookie) >> 8) & 1)

enum cuda_kind {
	CUDA_RECORD = 0, /* (event, stream) */
	CUDA_RECORD_FLAGS = 1, /* (event, stream, flags) */
	CUDA_ASK_EVENT = 2, /* (event): query, or wait */
	CUDA_ASK_STREAM = 3, /* (stream) */
	CUDA_DROP_EVENT = 4,
	CUDA_DROP_STREAM = 5,
};

/* By communicator_key.  Calls are numbered here from 1, as far as these probes saw them. */
struct cuda_communicator {
	__u64 stream; /* of the latest call */
	__u64 noted;
	__u64 finished; /* noted when the latest group ended */
	__u64 launched; /* known to stand on a stream that is followed */
	__u64 completed;
	__u64 completed_sequence; /* the communicator's own number of that call */
	__u64 completed_ns; /* when it was proved */
	__u32 instance; /* 0: not known yet */
	__u32 number; /* of this entry's present communicator: no other has it */
	__u32 several_streams; /* calls of the present group went to different streams */
	__u32 captured; /* they are captured */
	__u32 range; /* of cuda_calls, and 1; 0: its calls are not followed one by one */
	__u32 reserved;
	struct owner owner;
};

/* A call that is not proved complete. */
struct cuda_call {
	__u64 owner; /* number of the communicator, and the low half of that of the call; 0: free */
	__u64 time_and_op; /* enqueue time, ns, the op in the low 4 bits; 0: it never ran */
};

struct cuda_behind {
	__u64 comm; /* 0: free */
	__u64 launched;
	__u64 sequence;
	__u32 number;
	__u32 reserved;
};

/* What was launched on a stream; copied whole into the mark of an event that is recorded there. */
struct cuda_stream {
	__u64 launches;
	__u64 proved; /* launches of which completion was proved */
	__u64 stream;
	__u64 generation; /* of a mark: which record it belongs to */
	__s32 device; /* of the legacy stream: where NCCL uses it, from 1; 0: nowhere yet */
	__u32 ambiguous;
	__u32 armed; /* of a mark: the call that records has returned */
	__u32 number; /* no other stream has it: handles are used again */
	struct cuda_behind behind[CUDA_BEHIND];
	struct owner owner;
};

enum cuda_handle {
	CUDA_HANDLE_EVENT = 0,
	CUDA_HANDLE_THREAD = 1, /* a thread that waits for a stream */
};

struct cuda_handle_key {
	__u64 handle;
	__u32 tgid;
	__u32 kind;
};

struct cuda_stream_key {
	__u64 stream;
	__u32 tgid;
	__u32 reserved;
};

enum cuda_stat {
	CUDA_STAT_NOTES, /* runs at a call of NCCL */
	CUDA_STAT_PLANS, /* runs at a launch */
	CUDA_STAT_FINISHES, /* runs at the end of launching */
	CUDA_STAT_CALLS, /* runs at entries of CUDA's functions */
	CUDA_STAT_RETURNS, /* runs at their returns */
	CUDA_STAT_PROOFS, /* events and streams that proved something */
	CUDA_STAT_FORGOTTEN, /* calls without a duration: too many were not complete at once */
	CUDA_STAT_FULL, /* not followed: a table was full */
	CUDA_STAT_UNREADABLE,
	CUDA_STAT_COUNT,
};

ASSERT_SIZE(cuda_communicator, 88);
ASSERT_SIZE(cuda_call, 16);
ASSERT_SIZE(cuda_behind, 32);
ASSERT_SIZE(cuda_stream, 312);
ASSERT_SIZE(cuda_handle_key, 16);
ASSERT_SIZE(cuda_stream_key, 16);

#endif
