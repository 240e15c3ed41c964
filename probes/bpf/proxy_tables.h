/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What the probes below the entry points keep (nccl_internals.bpf.c), and what several of them need. */
#ifndef RAILSCOPE_PROXY_TABLES_H
#define RAILSCOPE_PROXY_TABLES_H

#include "arithmetic.h"
#include "communicators.h"
#include "internals.h"
#include "shared_tables.h"

/* One slot a library. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 256);
	__type(key, __u32);
	__type(value, struct internals_layout);
} internals_layouts SEC(".maps");

/* Of communicators that have an entry in `communicators`, and so a place in their user's share. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 16384);
	__type(key, struct communicator_key);
	__type(value, struct proxy_communicator);
} proxy_communicators SEC(".maps");

#define CONNECTIONS 131072
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, CONNECTIONS);
	__type(key, struct connection_key);
	__type(value, struct connection);
} connections SEC(".maps");

#define OPERATIONS 65536
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, OPERATIONS);
	__type(key, struct operation_key);
	__type(value, struct operation);
} operations SEC(".maps");

#define PARTS 131072
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, PARTS);
	__type(key, struct part_key);
	__type(value, struct part);
} parts SEC(".maps");

/* From launch to completion, by op. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, OP_COUNT);
	__type(key, __u32);
	__type(value, struct distribution);
} durations SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, OP_COUNT);
	__type(key, __u32);
	__type(value, struct distribution);
} bandwidths SEC(".maps");

/* How collectives were launched: algorithm, protocol, channels.  Whoever does so first takes the place, for good. */
#define LAUNCHES 4096
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, LAUNCHES);
	__type(key, struct launch_key);
	__type(value, __u64);
} launches SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, INTERNAL_STAT_COUNT);
	__type(key, __u32);
	__type(value, __u64);
} internal_stats SEC(".maps");

#define COMPLETION_RING_BYTES (2 * 1024 * 1024)
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, COMPLETION_RING_BYTES);
} completion_events SEC(".maps");

static __always_inline void count_internal(__u32 stat)
{
	__u64 *value = bpf_map_lookup_elem(&internal_stats, &stat);

	if (value)
		__sync_fetch_and_add(value, 1);
}

static __always_inline int read_user(void *to, __u32 bytes, __u64 from)
{
	return bpf_probe_read_user(to, bytes, (const void *)from);
}

static __noinline int count_launch(__u8 op, __u8 algorithm, __u8 protocol, __u8 channels)
{
	struct launch_key key = {.op = op, .algorithm = algorithm, .protocol = protocol, .channels = channels};
	__u64 *count = bpf_map_lookup_elem(&launches, &key);

	if (!count) {
		__u64 zero = 0;
		struct owner owner;

		put_shared(&launches, &key, &zero, &owner, 0, 0, SHARED_LAUNCHES, LAUNCHES);
		count = bpf_map_lookup_elem(&launches, &key);
	}
	if (count)
		__sync_fetch_and_add(count, 1);
	else
		count_internal(INTERNAL_FULL);
	return 0;
}

/* Into buckets of powers of two: the first holds up to 2^first, the last has no bound. */
static __always_inline void add_to(struct distribution *distribution, __u64 value, __u32 first)
{
	__u32 bucket = value <= (1ULL << first) ? 0 : log2_floor(value - 1) + 1 - first;

	if (bucket >= DISTRIBUTION_BUCKETS)
		bucket = DISTRIBUTION_BUCKETS - 1;
	__sync_fetch_and_add(&distribution->count, 1);
	__sync_fetch_and_add(&distribution->sum, value);
	__sync_fetch_and_add(&distribution->buckets[bucket & (DISTRIBUTION_BUCKETS - 1)], 1);
}

#endif
