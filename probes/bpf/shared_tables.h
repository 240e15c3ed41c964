/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Entries of tables that are shared out (shares.h), whose values say in whose share they are: part of
 * nccl_internals.bpf.c.
 */
#ifndef RAILSCOPE_SHARED_TABLES_H
#define RAILSCOPE_SHARED_TABLES_H

#include "shares.h"

/*
 * Write an entry.  `owner`, which mostly lies in `value`, is that of the entry which is there where there is one
 * (`known`); else it is set here.  tgid 0: see take_place().  Returns 0, or 1: there is no room in the caller's share,
 * or another thread was faster.
 */
static __always_inline int put_shared(void *map, const void *key, void *value, struct owner *owner, int known,
				      __u32 tgid, __u32 table, __u32 entries)
{
	__u64 place;

	if (known)
		return bpf_map_update_elem(map, key, value, BPF_EXIST) != 0;
	place = take_place(answerable(), tgid, table, entries);
	if (!place)
		return 1;
	owner->uid = (__u32)place;
	owner->tgid = tgid;
	if (!bpf_map_update_elem(map, key, value, BPF_NOEXIST))
		return 0;
	return_place(owner->uid, tgid, table);
	return 1;
}

/* Take an entry out; only who does so gives its place back. */
static __always_inline void drop_shared(void *map, const void *key, const struct owner *owner, __u32 table)
{
	if (!bpf_map_delete_elem(map, key))
		leave_place(owner->uid, owner->tgid, table);
}

#endif
