/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What NCCL hands to its proxy thread: the first half of completion.h, which tells the story.
 */
#ifndef RAILSCOPE_POSTING_H
#define RAILSCOPE_POSTING_H

#include "elsewhere.h"
#include "proxy_tables.h"

/* The leading bytes of a ncclProxyOp; everything read of it for each one lies there (2.20 to 2.32). */
#define OPERATION_HEAD 96
#define MOST_OPERATIONS 65536

static __always_inline __u64 head_word(const __u8 *head, __u32 offset)
{
	return offset <= OPERATION_HEAD - 8 ? *(const __u64 *)(head + (offset & ~7U)) : 0;
}

static __always_inline __u32 head_half(const __u8 *head, __u32 offset)
{
	return offset <= OPERATION_HEAD - 4 ? *(const __u32 *)(head + (offset & ~3U)) : 0;
}

static __always_inline __u8 head_byte(const __u8 *head, __u32 offset)
{
	return offset < OPERATION_HEAD ? head[offset] : 0xff;
}

/* One walk over the operations handed over by one call of ncclProxyStart(). */
struct walk {
	__u64 comm;
	__u64 group;
	__u64 pool; /* address of the array of ncclProxyOp */
	__u64 now;
	__u64 launch;
	__u64 sequence;
	__u64 before_sequence;
	__u64 current; /* opCount of the collective being gathered */
	__u64 task; /* its ncclTaskColl */
	__u32 index; /* of the next operation in the pool; all ones at the list's end */
	__u32 tgid;
	__u32 library;
	__u32 instance;
	__u32 remaining;
	__u32 net_devices;
	__u32 point_to_point; /* parts of Send and Recv so far */
	__u32 point_to_point_devices;
	__u32 posted;
	__u8 op;
	__u8 algorithm;
	__u8 protocol;
	__u8 point_to_point_op;
	__u8 learned; /* 1: of a connection that was not known */
	__u8 lost; /* 1: something of this launch is not followed */
	__u8 reserved[2];
};

/* Something of this launch could not be read or kept: its calls are not known to be complete before later ones are. */
static __always_inline void lose(struct walk *walk, __u32 stat)
{
	walk->lost = 1;
	count_internal(stat);
}

/* What NCCL's struct tells of a connection; returns whether it could be read. */
static __noinline int read_connection(struct connection *connection, __u64 address, __u32 library)
{
	const struct internals_layout *layout = bpf_map_lookup_elem(&internals_layouts, &library);
	__u32 word = 0, offset;
	__u64 resources = 0;

	if (!connection || !layout || read_user(&word, 4, address + layout->connection_transport))
		return 0;
	connection->network = word == TRANSPORT_NET;
	if (read_user(&word, 4, address + layout->connection_send))
		return 0;
	connection->send = word == 1;
	if (!connection->network || read_user(&resources, 8, address + layout->connection_resources) || !resources)
		return 1;
	offset = connection->send ? layout->send_net_device : layout->receive_net_device;
	if (offset != NO_OFFSET && !read_user(&word, 4, resources + offset))
		connection->net_device = word;
	offset = connection->send ? layout->send_net_comm : layout->receive_net_comm;
	if (offset != NO_OFFSET)
		read_user(&connection->net_comm, 8, resources + offset);
	return 1;
}

static __noinline int keep_connection(const struct connection_key *key, struct connection *fresh)
{
	struct connection *known;

	if (!key || !fresh)
		return 0;
	known = bpf_map_lookup_elem(&connections, key);
	if (known)
		fresh->owner = known->owner;
	return !put_shared(&connections, key, fresh, &fresh->owner, known != 0, key->tgid, SHARED_CONNECTIONS, CONNECTIONS);
}

static __noinline int drop_connection(const struct connection_key *key)
{
	struct connection *known = key ? bpf_map_lookup_elem(&connections, key) : 0;
	struct owner owner;

	if (!known)
		return 0;
	owner = known->owner;
	drop_shared(&connections, key, &owner, SHARED_CONNECTIONS);
	return 0;
}

/*
 * Learn of a connection, or that its address serves another communicator now.  In several functions, as many lie on the
 * stack above this one.
 */
VERIFIED_ONCE int learn_connection(struct walk *walk, __u64 address, __u32 peer_and_channel)
{
	struct connection_key key = {.connection = address};
	struct connection fresh = {.net_device = NO_NET_DEVICE};

	if (!walk)
		return 0;
	key.tgid = walk->tgid;
	fresh.group = walk->group;
	fresh.comm = walk->comm;
	fresh.instance = walk->instance;
	fresh.peer = peer_and_channel & 0xffffff;
	fresh.channel = peer_and_channel >> 24;
	if (!read_connection(&fresh, address, walk->library)) {
		/* Nor is it what it was to whoever used this address before. */
		drop_connection(&key);
		lose(walk, INTERNAL_UNREADABLE);
		return 0;
	}
	if (!keep_connection(&key, &fresh))
		lose(walk, INTERNAL_FULL);
	walk->learned = 1;
	return 0;
}

static __always_inline void keep_operation(struct walk *walk, struct operation_key *key, struct operation *fresh)
{
	struct operation *known = bpf_map_lookup_elem(&operations, key);

	if (known)
		fresh->owner = known->owner;
	if (put_shared(&operations, key, fresh, &fresh->owner, known != 0, walk->tgid, SHARED_OPERATIONS, OPERATIONS))
		lose(walk, INTERNAL_FULL);
	else
		walk->posted++;
}

/* Keep the collective that was gathered last. */
static __noinline int keep_collective(struct walk *walk)
{
	struct operation_key key = {};
	struct operation fresh = {};
	const struct internals_layout *layout;
	__u64 elements = 0;
	__u32 data_type = DATA_TYPE_UNKNOWN;
	__u8 byte = 0;

	if (!walk || !walk->remaining)
		return 0;
	layout = bpf_map_lookup_elem(&internals_layouts, &walk->library);
	if (!layout)
		return 0;
	fresh.payload_bytes = UNKNOWN_BYTES;
	fresh.data_type = DATA_TYPE_UNKNOWN;
	if (walk->task && layout->task_count != NO_OFFSET &&
	    !read_user(&byte, 1, walk->task + layout->task_function) && byte == walk->op &&
	    !read_user(&elements, 8, walk->task + layout->task_count) &&
	    !read_user(&data_type, 4, walk->task + layout->task_data_type) && data_type < DATA_TYPES) {
		fresh.data_type = data_type;
		fresh.payload_bytes = elements << ((DATA_TYPE_SHIFTS >> (4 * data_type)) & 0xf);
		if (!read_user(&byte, 1, walk->task + layout->task_channels))
			fresh.channels = byte;
	}
	key.group = walk->group;
	key.operation = walk->current;
	key.tgid = walk->tgid;
	fresh.posted_ns = walk->now;
	fresh.comm = walk->comm;
	fresh.launch = walk->launch;
	fresh.sequence = walk->sequence;
	fresh.before_sequence = walk->before_sequence;
	fresh.instance = walk->instance;
	fresh.remaining = walk->remaining;
	fresh.parts = walk->remaining;
	fresh.net_devices = walk->net_devices;
	fresh.op = walk->op;
	fresh.algorithm = walk->algorithm;
	fresh.protocol = walk->protocol;
	keep_operation(walk, &key, &fresh);
	count_launch(fresh.op, fresh.algorithm, fresh.protocol, fresh.channels);
	walk->remaining = 0;
	walk->net_devices = 0;
	return 0;
}

/* Keep all Send and Recv of this launch as one operation. */
static __noinline int keep_point_to_point(struct walk *walk)
{
	struct operation_key key = {};
	struct operation fresh = {};

	if (!walk || !walk->point_to_point)
		return 0;
	key.group = walk->instance; /* launches are numbered by communicator, and no address is that low */
	key.operation = POINT_TO_POINT | walk->launch;
	key.tgid = walk->tgid;
	fresh.posted_ns = walk->now;
	fresh.comm = walk->comm;
	fresh.launch = walk->launch;
	fresh.sequence = walk->sequence;
	fresh.before_sequence = walk->before_sequence;
	fresh.payload_bytes = UNKNOWN_BYTES;
	fresh.instance = walk->instance;
	fresh.remaining = walk->point_to_point;
	fresh.parts = walk->point_to_point;
	fresh.net_devices = walk->point_to_point_devices;
	fresh.op = walk->point_to_point_op;
	fresh.data_type = DATA_TYPE_UNKNOWN;
	fresh.algorithm = 0xff;
	fresh.protocol = 0xff;
	keep_operation(walk, &key, &fresh);
	return 0;
}

static __noinline int keep_part(struct walk *walk, __u64 connection, __u64 operation)
{
	struct part_key key = {.connection = connection, .operation = operation};
	struct part fresh = {.posted = 1};
	struct part *part;

	if (!walk)
		return 0;
	key.tgid = walk->tgid;
	part = bpf_map_lookup_elem(&parts, &key);
	if (part && part->launch == walk->launch && part->instance == walk->instance) {
		part->posted++;
		return 0;
	}
	fresh.launch = walk->launch;
	fresh.instance = walk->instance;
	if (part)
		fresh.owner = part->owner;
	return put_shared(&parts, &key, &fresh, &fresh.owner, part != 0, walk->tgid, SHARED_PARTS, PARTS);
}

/*
 * Whether what is known of a connection still holds.  Communicators that share resources share connections, so that
 * another one may have been here first; it must live, else the address may be another connection's by now.
 */
static __noinline int serves(const struct connection *connection, const struct walk *walk)
{
	struct communicator_key key = {};
	struct communicator *owner;

	if (!connection || !walk || connection->group != walk->group)
		return 0;
	if (connection->instance == walk->instance)
		return 1;
	key.comm = connection->comm;
	key.tgid = walk->tgid;
	owner = bpf_map_lookup_elem(&communicators, &key);
	return owner && owner->instance == connection->instance && !owner->destroyed_ns;
}

/* The entry of a connection, if what is known of it still holds. */
static __noinline struct connection *known_connection(const struct walk *walk, __u64 address)
{
	struct connection_key key = {.connection = address};
	struct connection *connection;

	if (!walk)
		return 0;
	key.tgid = walk->tgid;
	connection = bpf_map_lookup_elem(&connections, &key);
	return connection && serves(connection, walk) ? connection : 0;
}

/* One operation of the list; returns 1 at its end. */
static long take_operation(__u64 number, struct walk *walk)
{
	const struct internals_layout *layout;
	struct connection *connection;
	__u8 head[OPERATION_HEAD] __attribute__((aligned(8)));
	__u64 address, at, operation;
	__u32 channel;
	__u8 function;

	(void)number;
	layout = bpf_map_lookup_elem(&internals_layouts, &walk->library);
	if (!layout || walk->index == 0xffffffff)
		return 1;
	address = walk->pool + (__u64)walk->index * layout->operation_size;
	if (read_user(head, sizeof(head), address)) {
		lose(walk, INTERNAL_UNREADABLE);
		return 1;
	}
	walk->index = head_half(head, layout->operation_next);
	at = head_word(head, layout->operation_connection);
	connection = known_connection(walk, at);
	if (!connection) {
		__u32 peer = 0;

		if (layout->operation_peer == NO_OFFSET || read_user(&peer, 4, address + layout->operation_peer))
			peer = 0xffffff;
		channel = head_byte(head, layout->operation_channel);
		learn_connection(walk, at, (peer & 0xffffff) | channel << 24);
		connection = known_connection(walk, at);
		if (!connection)
			return 0;
	}
	if (!connection->network)
		return 0;
	operation = head_word(head, layout->operation_count);
	function = head_byte(head, layout->operation_function);
	if (operation & 1) {
		__u8 called = function;

		if (keep_part(walk, at, operation)) {
			lose(walk, INTERNAL_FULL);
			return 0;
		}
		if (layout->operation_function_called != NO_OFFSET)
			called = head_byte(head, layout->operation_function_called);
		if (!walk->point_to_point)
			walk->point_to_point_op = called;
		else if (walk->point_to_point_op != called)
			walk->point_to_point_op = OP_SEND_RECV;
		walk->point_to_point++;
		if (connection->send && connection->net_device >= 0)
			walk->point_to_point_devices |= 1U << (connection->net_device & 31);
	} else {
		if (walk->remaining && operation != walk->current)
			keep_collective(walk);
		if (!walk->remaining) {
			walk->current = operation;
			walk->op = function;
			walk->algorithm = head_byte(head, layout->operation_algorithm);
			walk->protocol = head_byte(head, layout->operation_protocol);
			walk->task = 0;
			if (layout->operation_task != NO_OFFSET)
				read_user(&walk->task, 8, address + layout->operation_task);
		}
		walk->remaining++;
		if (connection->send && connection->net_device >= 0)
			walk->net_devices |= 1U << (connection->net_device & 31);
	}
	__sync_fetch_and_add(&connection->posted, 1);
	return 0;
}

/* Find the list from which this rank's own proxy is fed. */
static __noinline int learn_proxy(struct communicator_key *key, __u32 instance, __u32 library)
{
	struct proxy_communicator fresh = {};
	const struct internals_layout *layout;
	__u64 state = 0, lists = 0, ranks = 0;
	__u32 own = 0, own_local = 0;
	int failed;

	if (!key)
		return 0;
	layout = bpf_map_lookup_elem(&internals_layouts, &library);
	if (!layout || !layout->known)
		return 0;
	if (read_user(&fresh.group, 8, key->comm + layout->comm_shared_resources) ||
	    read_user(&state, 8, key->comm + layout->comm_proxy_state) ||
	    read_user(&lists, 8, state + layout->state_lists)) {
		count_internal(INTERNAL_UNREADABLE);
		return 0;
	}
	if (!lists) /* nothing was ever handed to a proxy: a communicator of one rank, say */
		return 0;
	if (layout->state_own_rank != NO_OFFSET)
		failed = read_user(&own, 4, state + layout->state_own_rank);
	else
		failed = read_user(&ranks, 8, key->comm + layout->comm_top_parent_local_ranks) ||
			 read_user(&own_local, 4, key->comm + layout->comm_local_rank) ||
			 read_user(&own, 4, ranks + 4ULL * own_local);
	if (failed) {
		count_internal(INTERNAL_UNREADABLE);
		return 0;
	}
	fresh.list = lists + (__u64)own * layout->list_size;
	fresh.instance = instance;
	return !bpf_map_update_elem(&proxy_communicators, key, &fresh, BPF_ANY);
}

/* Calls that are complete when the first `number` are: NCCL has discarded those behind it that have no element. */
static __always_inline __u64 with_discarded(const struct communicator *communicator, __u64 number)
{
	__u64 last = communicator->empty_last;

	return last > number && communicator->empty_first <= number + 1 ? last : number;
}

/* ncclProxyStart(comm): a plan's proxy operations are about to be handed over. */
SEC("uprobe")
int proxy_post(struct registers *ctx)
{
	__u32 library = COOKIE_LIBRARY(bpf_get_attach_cookie(ctx));
	struct communicator_key key = {.comm = FIRST_ARGUMENT(ctx)};
	struct proxy_communicator *proxy;
	struct communicator *communicator;
	const struct internals_layout *layout;
	struct thread thread;
	struct walk walk = {};

	if (!observed_thread(&thread))
		return 0;
	count_internal(INTERNAL_POSTS);
	key.tgid = thread.tgid;
	layout = bpf_map_lookup_elem(&internals_layouts, &library);
	communicator = bpf_map_lookup_elem(&communicators, &key);
	if (!layout || !layout->known || !communicator)
		return 0;
	walk.instance = communicator->instance;
	walk.sequence = calls_so_far(&key, communicator);
	proxy = bpf_map_lookup_elem(&proxy_communicators, &key);
	if (!proxy || proxy->instance != walk.instance) {
		if (!learn_proxy(&key, walk.instance, library))
			return 0;
		proxy = bpf_map_lookup_elem(&proxy_communicators, &key);
		if (!proxy)
			return 0;
	}
	if (read_user(&walk.index, 4, proxy->list + layout->list_next) ||
	    read_user(&walk.pool, 8, proxy->list + layout->list_pool)) {
		count_internal(INTERNAL_UNREADABLE);
		return 0;
	}
	if (walk.index == 0xffffffff || !walk.pool)
		return look_elsewhere(&key, proxy, library);
	if (proxy->posted_sequence != walk.sequence)
		proxy->before_sequence = with_discarded(communicator, proxy->posted_sequence);
	walk.comm = key.comm;
	walk.group = proxy->group;
	walk.now = bpf_ktime_get_ns();
	walk.launch = ++proxy->launches;
	walk.before_sequence = proxy->before_sequence;
	walk.tgid = thread.tgid;
	walk.library = library;
	bpf_loop(MOST_OPERATIONS, take_operation, &walk, 0);
	keep_collective(&walk);
	keep_point_to_point(&walk);
	if (walk.learned || !(walk.launch & LOOK_AGAIN_MASK))
		look_elsewhere(&key, proxy, library);
	__sync_fetch_and_add(&proxy->posted, walk.posted);
	/* Last: the reader takes all of it for complete of which it finds no operation. */
	if (!walk.lost)
		proxy->posted_sequence = walk.sequence;
	return 0;
}

#endif
