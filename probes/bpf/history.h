/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * How long operations of each communicator, kind and size took so far: what a later one is held against.  Sums only:
 * the reader takes differences between its readings.
 */
#ifndef RAILSCOPE_HISTORY_H
#define RAILSCOPE_HISTORY_H

#include "proxy_tables.h"

#define HISTORIES 65536
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, HISTORIES);
	__type(key, struct history_key);
	__type(value, struct history);
} histories SEC(".maps");

static __noinline int remember(const struct operation *operation, __u64 duration_ns, __u32 tgid)
{
	struct history_key key = {};
	struct history *history;
	__u64 payload_bytes;

	if (!operation)
		return 0;
	payload_bytes = operation->payload_bytes;
	key.instance = operation->instance;
	key.op = operation->op;
	key.size_bucket = payload_bytes == UNKNOWN_BYTES ? UNKNOWN_SIZE : size_bucket(payload_bytes);
	history = bpf_map_lookup_elem(&histories, &key);
	if (!history) {
		struct history zero = {};

		put_shared(&histories, &key, &zero, &zero.owner, 0, tgid, SHARED_HISTORIES, HISTORIES);
		history = bpf_map_lookup_elem(&histories, &key);
		if (!history) {
			count_internal(INTERNAL_FULL);
			return 0;
		}
	}
	__sync_fetch_and_add(&history->operations, 1);
	__sync_fetch_and_add(&history->duration_ns, duration_ns);
	if (payload_bytes != UNKNOWN_BYTES)
		__sync_fetch_and_add(&history->payload_bytes, payload_bytes);
	return 0;
}

#endif
