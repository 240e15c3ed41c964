/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Structs of transfers.bpf.c, shared with probes/transfers/records.py. */
#ifndef RAILSCOPE_TRANSFERS_H
#define RAILSCOPE_TRANSFERS_H

#include "nccl.h"

/*
 * Attach cookie of a function.  Places are those of nccl.h: 0-7 argument register, 8-14 stack slot, 15 none; for those
 * whose arguments are in registers alone, bits 48 and up hold where a library's own structure has something.
 */
#define COOKIE_FUNCTION(c) ((__u32)(c) & 0xff) /* its number in probes/transfers/functions.py */
#define PLACE_ELEMENTS 8
#define PLACE_UNIT 12 /* what tells an element's bytes */
#define PLACE_BUFFER 16
#define PLACE_TO 20 /* the peer: an endpoint, or a rank */
#define PLACE_REQUEST 24
#define COOKIE_SIZE(c) ((__u32)((c) >> 28) & 0xf)
#define COOKIE_COMPLETION(c) ((__u32)((c) >> 32) & 0xf)
#define COOKIE_SHIFT(c) ((__u32)((c) >> 36) & 0xf) /* of SIZE_ELEMENTS: the bytes of one, as a power of two; of SIZE_MOONCAKE: the words of a request */
#define COOKIE_COUNTS_ARE_LONG(c) ((__u32)((c) >> 36) & 1) /* of MPI: 64 bits, else int */
#define COOKIE_REQUEST_BYTES(c) ((c) >> 37 & 1 ? 8U : 4U) /* of MPI: Open MPI's are pointers, MPICH's ints */
#define COOKIE_COMPLETE_AT(c) ((__s64)(c) >> 40) /* of Open MPI: from the probe's place to ompi_request_empty, in words */
#define COOKIE_BACK(c) ((__u32)((c) >> 48) & 0xffff) /* of COMPLETION_ENDS_UCX: from a request back to its status; 0: not known */
#define COOKIE_KIND_AT(c) ((__u32)((c) >> 48) & 0x1ff) /* of SIZE_NIXL: in nixlXferReqH, its kind of operation; 0: not known */

/* How a call's bytes follow from its arguments. */
enum transfer_size {
	SIZE_NONE, /* it moves none, or what it moves is not among its arguments */
	SIZE_ELEMENTS, /* elements of a fixed size */
	SIZE_UCX, /* elements of the datatype in a ucp_request_param_t */
	SIZE_MPICH, /* elements of an MPI_Datatype that is a number */
	SIZE_OPEN_MPI, /* elements of an MPI_Datatype that is a pointer */
	SIZE_NIXL, /* what a nixlXferReqH describes; its kind of operation is counted under the next numbers */
	SIZE_MOONCAKE, /* a list of TransferRequest; their kind of operation as with NIXL */
};

/* How it is known that what a call began is complete. */
enum transfer_completion {
	COMPLETION_UNSEEN,
	COMPLETION_RETURN, /* the call blocks; 0 is success */
	COMPLETION_UCX, /* ucs_status_ptr_t: none, an error, or a request */
	COMPLETION_STATUS, /* 0 is complete, 1 in progress, less an error; the request is an argument */
	/* Functions that transfer nothing, and tell of a request. */
	COMPLETION_ENDS_UCX, /* ucp_request_free */
	COMPLETION_ENDS_STATUS, /* asks for the status of one */
	COMPLETION_ENDS_CANCELS, /* gives one up, complete or not */
	/* Of a function that transfers. */
	COMPLETION_ENDED, /* under way from its entry until a function tells of its end; the request is an argument */
	/* Of MPI, whose requests lie where an argument points; 0 is success. */
	COMPLETION_MPI, /* the call leaves a request there */
	COMPLETION_MPI_PREPARES, /* it leaves a persistent one, and transfers nothing yet */
	COMPLETION_MPI_STARTS, /* starts persistent ones */
	/* Functions that wait for requests or ask about them; who asks has a flag among his arguments (PLACE_BUFFER). */
	COMPLETION_MPI_ONE,
	COMPLETION_MPI_ALL,
	COMPLETION_MPI_ANY, /* which one it was is written where PLACE_UNIT points */
	COMPLETION_MPI_SOME, /* how many, and where PLACE_TO points which */
	COMPLETION_MPI_FREES, /* gives one up, complete or not */
};

#define NO_OPERATION 255 /* number of a function that transfers nothing */

#define TRANSFER_BUCKETS 28 /* i: up to 2^(10+i) ns; the last one has no bound */

struct transfer_key {
	__u64 peer; /* an endpoint's address, a rank, the hash of an agent's name; 0: not known, or one of too many */
	__u32 tgid;
	__u32 function;
};

/* What a process did with one function and one peer. */
struct transfer_total {
	__u64 operations; /* entries */
	__u64 bytes;
	__u64 unsized; /* operations whose bytes are not known */
	__u64 completed; /* failures among them */
	__u64 failed;
	__u64 lost; /* operations whose completion cannot be seen any more, or never could */
	__u64 last_ns; /* the last entry */
	__u64 sum_ns; /* from entry to completion, of those that completed without failure */
	__u64 buckets[TRANSFER_BUCKETS];
	__u32 uid; /* in whose share the entry is */
	__u32 reserved;
};

struct transfer_request_key {
	__u64 request; /* its address */
	__u32 tgid;
	__u32 reserved;
};

/* An operation that goes on after its call. */
struct transfer_request {
	__u64 start_ns; /* 0: a persistent one that is not started */
	__u64 bytes;
	__u64 peer;
	__u64 next; /* another request that the same call waits for; 0: none */
	__u64 asked_ns; /* since when its program has asked for it again and again; 0: it did not */
	__u64 asked_last_ns;
	__u32 function;
	__u32 tid;
	__u32 uid;
	__u32 let_go; /* its program will not ask again: from the request back to its status, which tells; else 0 */
	__u16 persistent;
	__u16 unsized; /* its bytes are not known */
	__u32 reserved;
};


/* By thread that called such a function: written by the programs, taken out by the reader. */
struct transfer_thread {
	__u64 start_ns; /* of the call that it is in; 0: in none */
	__u64 last_ns;
	__u64 bytes;
	__u64 peer;
	__u64 request;
	__u64 stack; /* the stack pointer at entry */
	__u64 task; /* the thread, as the kernel addresses it: numbers are used again */
	__u32 tgid;
	__u32 uid;
	__u32 function; /* under which it is counted */
	__u16 probed; /* the number of the function that was called */
	__u16 followed; /* its completion can be seen */
	/* Of a call that waits for requests of MPI: where it will write; of one that makes one: `which` is a complete one. */
	__u64 flag;
	__u64 which;
	__u64 list;
	__u16 waited; /* requests in its `transfer_waited`; 0: they begin with `request` */
	__u16 unsized;
	__u32 request_bytes; /* of each */
	/* Places of requests that ended on this thread, for its next ones: in whose share they are, and how many. */
	__u32 spare_uid;
	__u32 spare;
};

#define MOST_SPARE 4

#define TRANSFER_WAITED 120

/* The requests that a thread's call waits for, as it was given them.  It goes with the thread's entry. */
struct transfer_waited {
	__u64 requests[TRANSFER_WAITED]; /* of MPICH two in a word */
};

#define PEER_NAME_BYTES 64

/* A peer that has a name. */
struct transfer_peer_key {
	__u64 peer;
	__u32 tgid;
	__u32 reserved;
};

struct transfer_peer {
	__u8 name[PEER_NAME_BYTES]; /* its first bytes, zeros behind it */
	__u32 uid;
	__u32 reserved;
};

enum transfer_stat {
	TRANSFER_STAT_ENTRIES, /* runs at entries of functions that transfer */
	TRANSFER_STAT_RETURNS,
	TRANSFER_STAT_ENDS, /* runs at functions that tell of a request */
	TRANSFER_STAT_FULL, /* operations that could not be followed: a table was full, or a share of it used up */
	TRANSFER_STAT_UNREADABLE, /* arguments in memory that could not be read */
	TRANSFER_STAT_COUNT,
};

ASSERT_SIZE(transfer_key, 16);
ASSERT_SIZE(transfer_total, 296);
ASSERT_SIZE(transfer_request_key, 16);
ASSERT_SIZE(transfer_request, 72);
ASSERT_SIZE(transfer_thread, 112);
ASSERT_SIZE(transfer_waited, 960);
ASSERT_SIZE(transfer_peer_key, 16);
ASSERT_SIZE(transfer_peer, 72);

#endif
