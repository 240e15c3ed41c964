/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Bytes that NCCL hands to each network device: part of nccl_internals.bpf.c.
 *
 * ncclNetSocketIsend() takes every message it is given (it fails where it cannot), so its entry is exact.
 * ncclIbIsend() is called again and again until the receiver is ready; ncclIbMultiSend() is what it then calls, once
 * for all messages that the receiver asked for together, so that is what is counted.  Several devices of one
 * connection share each message equally (src/transport/net_ib, 2.21 to 2.32); after a failover the next device carries
 * the share of the one that failed, too.
 */
#ifndef RAILSCOPE_SENDS_H
#define RAILSCOPE_SENDS_H

#include "completion.h"
#include "failover.h"

#define SENT 16384
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, SENT);
	__type(key, struct sent_key);
	__type(value, struct sent);
} sent_bytes SEC(".maps");

#define IB_MOST_REQUESTS 8 /* NCCL_NET_IB_MAX_RECVS */

VERIFIED_ONCE int add_sent(__u32 tgid, __u32 library, __s32 device, __u64 bytes)
{
	struct sent_key key = {.tgid = tgid, .device = device, .library = library};
	struct sent *sent;

	key.network = library >> 16;
	sent = bpf_map_lookup_elem(&sent_bytes, &key);
	if (!sent) {
		struct sent zero = {};

		put_shared(&sent_bytes, &key, &zero, &zero.owner, 0, tgid, SHARED_SENT, SENT);
		sent = bpf_map_lookup_elem(&sent_bytes, &key);
		if (!sent) {
			count_internal(INTERNAL_FULL);
			return 0;
		}
	}
	sent->last_ns = bpf_ktime_get_ns();
	__sync_fetch_and_add(&sent->messages, 1);
	__sync_fetch_and_add(&sent->bytes, bytes);
	return 0;
}

static __always_inline __s32 net_device(__u64 address)
{
	__s32 device;

	if (!read_user(&device, 4, address))
		return device;
	count_internal(INTERNAL_UNREADABLE);
	return NO_NET_DEVICE; /* a read that fails leaves zeros, which is a device */
}

/* ncclNetSocketIsend(sendComm, data, size, ...); size is an int before 2.24. */
SEC("uprobe")
int socket_send(struct registers *ctx)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	__u32 library = COOKIE_LIBRARY(cookie);
	const struct internals_layout *layout;
	__u64 bytes = THIRD_ARGUMENT(ctx);
	struct thread thread;
	__s32 device;

	if (!observed_thread(&thread))
		return 0;
	count_internal(INTERNAL_SENDS);
	layout = bpf_map_lookup_elem(&internals_layouts, &library);
	if (!layout || !layout->known)
		return 0;
	if (COOKIE_SIZE_IS_INT(cookie))
		bytes = (__u32)bytes;
	device = net_device(FIRST_ARGUMENT(ctx) + layout->socket_device);
	add_sent(thread.tgid, library | NETWORK_SOCKET << 16, device, bytes);
	return 0;
}

/* ncclIbMultiSend(comm, slot). */
SEC("uprobe")
int ib_send(struct registers *ctx)
{
	__u32 library = COOKIE_LIBRARY(bpf_get_attach_cookie(ctx));
	const struct internals_layout *layout;
	__u64 requests[IB_MOST_REQUESTS] = {};
	__u64 comm = FIRST_ARGUMENT(ctx);
	__u64 slot = (__u32)SECOND_ARGUMENT(ctx);
	__u64 total = 0, rest;
	__u32 failed, first = 0;
	__u32 *any;
	struct thread thread;
	__s32 wanted = 0, used = 0;

	if (!observed_thread(&thread))
		return 0;
	count_internal(INTERNAL_SENDS);
	layout = bpf_map_lookup_elem(&internals_layouts, &library);
	if (!layout || !layout->known || layout->ib_requests == NO_OFFSET)
		return 0;
	if (read_user(&wanted, 4,
		      comm + layout->ib_slots + slot * IB_MOST_REQUESTS * layout->ib_slot_size + layout->ib_slot_requests) ||
	    read_user(requests, sizeof(requests), comm + layout->ib_requests + slot * sizeof(requests)) ||
	    read_user(&used, 4, comm + layout->ib_device_count) || used < 1 || used > IB_MOST_DEVICES) {
		count_internal(INTERNAL_UNREADABLE);
		return 0;
	}
	for (int i = 0; i < IB_MOST_REQUESTS; i++) {
		__u32 bytes = 0;

		if (i >= wanted)
			break;
		if (read_user(&bytes, 4, requests[i] + layout->ib_request_bytes))
			count_internal(INTERNAL_UNREADABLE);
		total += bytes;
	}
	any = bpf_map_lookup_elem(&any_failed_over, &first);
	failed = any && *any ? failed_port(comm, thread.tgid, library, used) : (__u32)used;
	rest = total;
	for (int i = 0; i < IB_MOST_DEVICES; i++) {
		__u64 share = i == used - 1 ? rest : total / (__u32)used;
		__u32 place = i;

		if (i >= used)
			break;
		rest -= share;
		if (place == failed)
			place = place + 1 < (__u32)used ? place + 1 : 0;
		add_sent(thread.tgid, library | NETWORK_IB << 16,
			 net_device(comm + layout->ib_devices + place * layout->ib_device_stride), share);
	}
	return 0;
}

#endif
