/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The integer types that bcc's headers and the probes use; the same on x86-64 and arm64. */
#ifndef RAILSCOPE_BCC_TYPES_H
#define RAILSCOPE_BCC_TYPES_H

typedef unsigned char __u8, u8;
typedef unsigned short __u16, u16, __be16, __sum16;
typedef unsigned int __u32, u32, __be32, __wsum;
typedef unsigned long long __u64, u64, __be64;
typedef __u64 __aligned_u64 __attribute__((aligned(8)));
typedef signed char __s8, s8;
typedef short __s16, s16;
typedef int __s32, s32;
typedef long long __s64, s64;
typedef unsigned long size_t, uintptr_t;
typedef _Bool bool;

#endif
