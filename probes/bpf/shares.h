/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Fair shares of the tables that processes fill, and of the rings that they write to: included once by each object that
 * has any, after observed.h; all have the same maps.
 *
 * A user may hold as many entries of a table as it has free, and a process as many as its user could still take.  So a
 * table is never full: one process that fills it stops at a third of it, all of one user at half, and whoever comes
 * next has room of his own.  Nothing is reserved for users who never come.  The same rule serves buffers of switches
 * (Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches", 1998).
 *
 * A user is who answers for a process (answerable.h).  Control groups stand for nobody: a user may make some of his own
 * where systemd gave him a part of the tree, and processes that he forks take from his own half only.
 *
 * The programs count what was taken, the reader what it took out again (probes/nccl/programs/shares.py): two writers of
 * one number would lose some.  What the programs take out themselves (calls under way, at their return) they count as
 * not taken.  All of this runs when an entry is made or goes, not when it is found.
 */
#ifndef RAILSCOPE_SHARES_H
#define RAILSCOPE_SHARES_H

#include <linux/bpf.h>
#include <linux/types.h>

#include <bpf/bpf_helpers.h>

#include "nccl.h"
#include "observed.h"

/* By user, by user and process, and of everybody. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, struct share_key);
	__type(value, struct share);
} shares SEC(".maps");

/* Written by the reader. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, struct share_key);
	__type(value, struct share_freed);
} shares_freed SEC(".maps");

/* All zero: too large for a program's stack. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct share);
} fresh_share SEC(".maps");

static __always_inline struct share *share_of(__u32 uid, __u32 tgid)
{
	struct share_key key = {.uid = uid, .tgid = tgid};
	struct share *found = bpf_map_lookup_elem(&shares, &key);
	struct share *fresh;
	__u32 zero = 0;

	if (found)
		return found;
	fresh = bpf_map_lookup_elem(&fresh_share, &zero);
	if (!fresh)
		return 0;
	bpf_map_update_elem(&shares, &key, fresh, BPF_NOEXIST);
	return bpf_map_lookup_elem(&shares, &key);
}

/* Entries of a table that somebody holds. */
static __always_inline __s64 held(const struct share *share, __u32 uid, __u32 tgid, __u32 table)
{
	struct share_key key = {.uid = uid, .tgid = tgid};
	struct share_freed *freed;

	if (!share)
		return 0;
	freed = bpf_map_lookup_elem(&shares_freed, &key);
	table &= SHARED_TABLES - 1;
	return (__s64)share->taken[table] - (freed ? (__s64)freed->freed[table] : 0);
}

#define PLACE_TAKEN (1ULL << 32)

/*
 * Whether a process of a user may make one more entry of a table of so many; if so, it is counted as made.  Returns
 * PLACE_TAKEN and in whose share it was counted, NOBODY where there was no room for one more user; else 0.  tgid 0: the
 * user alone counts, of entries that no process's end takes out.
 */
VERIFIED_ONCE __u64 take_place(__u32 uid, __u32 tgid, __u32 table, __u32 entries)
{
	struct share *all, *user, *process;
	__s64 of_user, free;
	__u32 at = table & (SHARED_TABLES - 1);

	all = share_of(NOBODY, 0);
	user = share_of(uid, 0);
	if (!user) {
		/* They share what is one user's. */
		uid = NOBODY;
		user = share_of(NOBODY, 1);
	}
	if (!all || !user)
		return 0;
	of_user = held(user, uid, uid == NOBODY, table);
	free = (__s64)entries - held(all, NOBODY, 0, table);
	if (of_user >= free)
		goto refused;
	if (uid != NOBODY && tgid) {
		process = share_of(uid, tgid);
		if (process && held(process, uid, tgid, table) >= free - of_user)
			goto refused;
		if (process) {
			__sync_fetch_and_add(&process->taken[at], 1);
			__sync_fetch_and_add(&process->entries, 1);
		}
	}
	__sync_fetch_and_add(&user->taken[at], 1);
	__sync_fetch_and_add(&all->taken[at], 1);
	return PLACE_TAKEN | uid;
refused:
	count(STAT_SHARE_USED_UP);
	__sync_fetch_and_add(&user->refused[at], 1);
	return 0;
}

/* A record of a user's that took no place had none to take: count it as refused. */
static __always_inline void refuse_record(__u32 uid, __u32 table)
{
	struct share *user = share_of(uid, 0);

	if (!user)
		user = share_of(NOBODY, 1);
	count(STAT_SHARE_USED_UP);
	if (user)
		__sync_fetch_and_add(&user->refused[table & (SHARED_TABLES - 1)], 1);
}

static __always_inline void return_to(__u32 uid, __u32 tgid, __u32 at)
{
	struct share_key key = {.uid = uid, .tgid = tgid};
	struct share *share = bpf_map_lookup_elem(&shares, &key);

	if (!share)
		return;
	__sync_fetch_and_add(&share->taken[at], -1);
	__sync_fetch_and_add(&share->entries, -1);
}

/* The place that was taken is not needed: another thread made the entry. */
VERIFIED_ONCE int return_place(__u32 uid, __u32 tgid, __u32 table)
{
	__u32 at = table & (SHARED_TABLES - 1);

	return_to(NOBODY, 0, at);
	return_to(uid, uid == NOBODY, at);
	if (uid != NOBODY && tgid)
		return_to(uid, tgid, at);
	return 0;
}

#define RING_HEADER_BYTES 8
/* Records that a ring holds, each of a type whose size is a multiple of eight. */
#define RING_RECORDS(bytes, type) ((bytes) / (RING_HEADER_BYTES + sizeof(struct type)))

/* The entry is gone.  A process that holds nothing any more is forgotten, as nobody else would. */
VERIFIED_ONCE int leave_place(__u32 uid, __u32 tgid, __u32 table)
{
	struct share_key key = {.uid = uid, .tgid = tgid};
	struct share *process;

	return_place(uid, tgid, table);
	process = uid == NOBODY || !tgid ? 0 : bpf_map_lookup_elem(&shares, &key);
	if (process && !process->entries)
		bpf_map_delete_elem(&shares, &key);
	return 0;
}

#endif
