/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Structs of the probes below NCCL's entry points, shared with probes/nccl/records/internals.py, where each stands once
 * more as a numpy dtype.  Words as NCCL uses them: a *plan* is one kernel launch; a *proxy operation* is the part of a
 * collective that one channel has in one direction; a *connection* is a channel's way to one peer in one direction.
 */
#ifndef RAILSCOPE_INTERNALS_H
#define RAILSCOPE_INTERNALS_H

#include <linux/types.h>

#define TRANSPORT_NET 2 /* src/include/transport.h */
#define OP_SEND_RECV 5
#define OP_SEND 6
#define OP_RECV 7
#define UNKNOWN_BYTES (~0ULL)
#define POINT_TO_POINT (1ULL << 63) /* operation_key: all Send and Recv of one launch together */
#define NO_NET_DEVICE (-1)
#define COOKIE_SIZE_IS_INT(c) (((c) >> 28) & 1) /* of a send: its size is an int, not a size_t */

/* Offsets of one library's structs, bytes; filled by the loader from the table of known builds. */
struct internals_layout {
	__u32 known; /* 0: nothing here is read */
	__u32 comm_shared_resources;
	__u32 comm_proxy_state;
	__u32 comm_top_parent_local_ranks;
	__u32 comm_local_rank;
	__u32 state_lists; /* ncclProxyState.proxyOps */
	__u32 state_own_rank; /* tpRank; NO_OFFSET where lists are numbered by local rank (before 2.30) */
	__u32 state_list_count; /* peerArraySize; NO_OFFSET before 2.30 */
	__u32 list_size; /* struct ncclProxyOps */
	__u32 list_pool;
	__u32 list_next;
	__u32 operation_size; /* struct ncclProxyOp */
	__u32 operation_connection;
	__u32 operation_count;
	__u32 operation_next;
	__u32 operation_channel;
	__u32 operation_function;
	__u32 operation_function_called; /* collAPI; NO_OFFSET before 2.28 */
	__u32 operation_protocol;
	__u32 operation_algorithm;
	__u32 operation_peer;
	__u32 operation_task;
	__u32 task_function;
	__u32 task_count;
	__u32 task_data_type;
	__u32 task_channels;
	__u32 task_next;
	__u32 task_algorithm;
	__u32 task_protocol;
	__u32 arguments_count; /* ncclProxyArgs.opCount */
	__u32 part_size; /* struct ncclProxySubArgs */
	__u32 part_connection;
	__u32 connection_send;
	__u32 connection_transport;
	__u32 connection_resources;
	__u32 send_net_device;
	__u32 receive_net_device;
	__u32 plan_comm;
	__u32 plan_persistent;
	__u32 plan_has_proxy_operations;
	__u32 plan_collectives; /* collOpCount */
	__u32 plan_tasks; /* collTaskQueue */
	__u32 socket_device; /* ncclNetSocketComm.dev */
	__u32 ib_device_count;
	__u32 ib_devices;
	__u32 ib_slots; /* ctsFifo, fifo before 2.30: what the receiver is ready for */
	__u32 ib_slot_size;
	__u32 ib_slot_requests; /* ncclIbSendFifo.nreqs */
	__u32 ib_requests; /* sendReqs, fifoReqs before */
	__u32 ib_request_bytes; /* ncclIbRequest.send.size */
	__u32 ib_device_stride;
	__u32 ib_resiliency; /* ncclIbNetCommBase.resiliency; NO_OFFSET before 2.29.7, as all below */
	__u32 resiliency_comm; /* ncclIbResiliency.baseComm */
	__u32 resiliency_count;
	__u32 resiliency_devices;
	__u32 resiliency_device_size; /* struct ncclIbResiliencyDev */
	__u32 resiliency_device_state;
	__u32 send_net_comm; /* sendNetResources.netSendComm: what the network plugin calls the connection */
	__u32 receive_net_comm;
};

/* What a communicator's proxy has been given; by communicator_key. */
struct proxy_communicator {
	__u64 group; /* ncclSharedResources: who shares it shares connections and the numbering of operations */
	__u64 list; /* address of the ncclProxyOps from which this rank's own proxy is fed */
	__u64 posted_sequence; /* calls enqueued when the latest operation was posted */
	__u64 before_sequence; /* the same for the group of calls before */
	__u64 posted; /* operations posted */
	__u64 completed; /* of those, complete */
	__u64 launches;
	__u64 completed_launch; /* the latest launch of which something is complete */
	__u64 completed_ns; /* when that was */
	__u64 previous_ns; /* last completion of the launches before it */
	__u64 captured; /* collectives captured into CUDA graphs */
	__u64 replayed; /* collectives that replayed graphs ran: no call is seen for them */
	__u32 instance;
	__u32 elsewhere; /* 1: parts go to another rank's proxy (PXN), whose end nobody tells here */
};

struct connection_key {
	__u64 connection;
	__u32 tgid;
	__u32 reserved;
};

/* One channel's way to one peer.  A stalled one has posted more than completed. */
struct connection {
	__u64 group;
	__u64 comm;
	__u64 posted;
	__u64 completed;
	__u64 last_ns; /* last completion */
	__u64 net_comm; /* what the network plugin calls it: an address; 0 unknown */
	__s32 net_device; /* as NCCL numbers network devices; NO_NET_DEVICE unknown */
	__s32 peer;
	__u32 instance;
	__u8 network; /* 1: the only kind whose completion can be seen */
	__u8 send;
	__u8 channel;
	__u8 reserved;
	struct owner owner;
};

struct operation_key {
	__u64 group; /* the instance, for POINT_TO_POINT */
	__u64 operation; /* NCCL's opCount, or POINT_TO_POINT | launch */
	__u32 tgid;
	__u32 reserved;
};

/* An operation handed to the proxy and not complete. */
struct operation {
	__u64 posted_ns;
	__u64 comm;
	__u64 launch;
	__u64 sequence; /* the communicator's calls when this was posted, itself included */
	__u64 before_sequence; /* calls that are complete when this one is the oldest that is not */
	__u64 payload_bytes; /* UNKNOWN_BYTES where it cannot be told */
	__u32 instance;
	__u32 remaining; /* proxy operations not stopped yet */
	__u32 parts;
	__u32 net_devices; /* bit n: sends through network device n */
	__u8 op;
	__u8 data_type;
	__u8 algorithm;
	__u8 protocol;
	__u8 channels;
	__u8 reserved[3];
	struct owner owner;
};

/* Which launch the parts of Send and Recv belong to, from posting to stop; a batch of them has one number. */
struct part_key {
	__u64 connection;
	__u64 operation;
	__u32 tgid;
	__u32 reserved;
};

struct part {
	__u64 launch;
	__u32 posted;
	__u32 instance;
	struct owner owner;
};

/* One completed operation, as written to the ring. */
struct completion_event {
	__u64 time_ns;
	__u64 posted_ns;
	__u64 comm;
	__u64 sequence;
	__u64 payload_bytes;
	__u64 duration_ns;
	__u32 tgid;
	__u32 instance;
	__u32 net_devices;
	__u8 op;
	__u8 data_type;
	__u8 algorithm;
	__u8 protocol;
	__u8 channels;
	__u8 reserved[3];
	__u32 reserved2;
	struct owner owner;
};

/* Durations in ns, bucket i up to 2^(10+i); bandwidths in bytes per second, up to 2^(16+i).  The last has no bound. */
#define DISTRIBUTION_BUCKETS 32
#define FIRST_DURATION 10
#define FIRST_BANDWIDTH 16
struct distribution {
	__u64 count;
	__u64 sum;
	__u64 buckets[DISTRIBUTION_BUCKETS];
};

/* Operations of one communicator, kind and size (as size_bucket() has it, UNKNOWN_SIZE where it cannot be told). */
#define UNKNOWN_SIZE 255
struct history_key {
	__u32 instance;
	__u8 op;
	__u8 size_bucket;
	__u8 reserved[2];
};

struct history {
	__u64 operations; /* complete */
	__u64 duration_ns; /* sum, from hand-over to completion */
	__u64 payload_bytes; /* sum */
	struct owner owner;
};

struct launch_key {
	__u8 op;
	__u8 algorithm;
	__u8 protocol;
	__u8 channels;
};

enum network_kind {
	NETWORK_SOCKET = 0,
	NETWORK_IB = 1,
};

struct sent_key {
	__u32 tgid;
	__s16 device; /* as NCCL numbers them */
	__u8 network;
	__u8 library;
};

struct sent {
	__u64 last_ns; /* when the latest was handed over */
	__u64 messages;
	__u64 bytes;
	struct owner owner; /* on other CPUs than the one that made the entry 0 */
};

enum internal_stat {
	INTERNAL_POSTS, /* runs at ncclProxyStart */
	INTERNAL_STOPS, /* runs at the stop of a proxy operation */
	INTERNAL_PLANS, /* runs at ncclLaunchKernel */
	INTERNAL_REPLAYS, /* runs at the host callback of a plan */
	INTERNAL_SENDS, /* runs at a send */
	INTERNAL_STOPS_UNKNOWN, /* stops of what was posted before the probes came */
	INTERNAL_FULL, /* entries not made: a table was full, or the share of the user */
	INTERNAL_RING_FULL,
	INTERNAL_UNREADABLE,
	INTERNAL_STAT_COUNT,
};

ASSERT_SIZE(internals_layout, 236);
ASSERT_SIZE(proxy_communicator, 104);
ASSERT_SIZE(connection_key, 16);
ASSERT_SIZE(connection, 72);
ASSERT_SIZE(operation_key, 24);
ASSERT_SIZE(operation, 80);
ASSERT_SIZE(part_key, 24);
ASSERT_SIZE(part, 24);
ASSERT_SIZE(completion_event, 80);
ASSERT_SIZE(distribution, 272);
ASSERT_SIZE(history_key, 8);
ASSERT_SIZE(history, 32);
ASSERT_SIZE(launch_key, 4);
ASSERT_SIZE(sent_key, 8);
ASSERT_SIZE(sent, 32);

#endif
