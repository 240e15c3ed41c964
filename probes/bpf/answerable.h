/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * In whose share a process takes places (shares.h): included once by each object that has any, where the constants that
 * the loader sets stand.
 *
 * A user's number is not enough.  Whoever has subordinate numbers (subuid(5)) may be 65,536 users at once, in a user
 * namespace that he made; and in containers that root made nearly everybody is number 0.  So a process in a user
 * namespace counts as its maker's, unless that is root; and one of root's in a pid namespace that root made, as
 * container engines make one for each container, counts as that namespace's.  The inode of a namespace is above all
 * users' numbers.  Who may make namespaces of his own below either gets no second share by it.
 *
 * With bcc, and where the kernel has no BTF, a user's number it is.
 */
#ifndef RAILSCOPE_ANSWERABLE_H
#define RAILSCOPE_ANSWERABLE_H

#include <linux/bpf.h>
#include <linux/types.h>

#include <bpf/bpf_helpers.h>

#include "nccl.h"

/* Offsets in the kernel's structures, of the fields of these names; 0: not known. */
const volatile __u32 task_cred = 0;
const volatile __u32 cred_user_ns = 0;
const volatile __u32 user_ns_level = 0;
const volatile __u32 user_ns_parent = 0;
const volatile __u32 user_ns_owner = 0;
const volatile __u32 task_thread_pid = 0;
const volatile __u32 pid_level = 0;
const volatile __u32 pid_numbers = 0;
const volatile __u32 pid_ns_user_ns = 0;
const volatile __u32 pid_ns_inum = 0;

/* User namespaces, one in the other; the kernel allows 32.  Whoever nests more of them shares what is one user's. */
#define MOST_NESTED 6
#define DEEPLY_NESTED 0xfffffffeU
#define UPID_BYTES 16 /* struct upid: a number, and its namespace */
#define UPID_NAMESPACE 8

/* What cannot be read is 0: the helper clears the target, and a branch less is less to verify. */
static __always_inline __u64 kernel_pointer(__u64 structure, __u32 offset)
{
	__u64 value = 0;

	bpf_probe_read_kernel(&value, sizeof(value), (const void *)(structure + offset));
	return value;
}

static __always_inline __u32 kernel_number(__u64 structure, __u32 offset)
{
	__u32 value = 0;

	bpf_probe_read_kernel(&value, sizeof(value), (const void *)(structure + offset));
	return value;
}

/* Who made the outermost user namespace around this one that is not the first; 0: root did, or it is the first. */
VERIFIED_ONCE __u32 maker_of(__u64 user_ns)
{
	__u32 level = kernel_number(user_ns, user_ns_level);

	if (!level)
		return 0;
	for (int i = 0; i < MOST_NESTED && level > 1; i++) {
		user_ns = kernel_pointer(user_ns, user_ns_parent);
		level = kernel_number(user_ns, user_ns_level);
	}
	return level > 1 ? DEEPLY_NESTED : kernel_number(user_ns, user_ns_owner);
}

/* Of the calling process: a user's number, or the inode of a container's pid namespace. */
VERIFIED_ONCE __u32 answerable(void)
{
	__u32 uid = (__u32)bpf_get_current_uid_gid(), maker;
	__u64 task, pid, pid_ns;

	if (ALL_INLINED || !user_ns_level)
		return uid;
	task = bpf_get_current_task();
	maker = maker_of(kernel_pointer(kernel_pointer(task, task_cred), cred_user_ns));
	if (maker || uid)
		return maker ? maker : uid;
	pid = kernel_pointer(task, task_thread_pid);
	if (!kernel_number(pid, pid_level))
		return uid;
	pid_ns = kernel_pointer(pid, pid_numbers + UPID_BYTES + UPID_NAMESPACE);
	maker = maker_of(kernel_pointer(pid_ns, pid_ns_user_ns));
	return maker ? maker : kernel_number(pid_ns, pid_ns_inum);
}

#endif
