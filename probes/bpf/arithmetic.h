/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Logarithms for buckets, and the sizes of NCCL's data types. */
#ifndef RAILSCOPE_ARITHMETIC_H
#define RAILSCOPE_ARITHMETIC_H

#include <linux/types.h>

#include <bpf/bpf_helpers.h>

static __always_inline __u32 log2_floor(__u64 value)
{
	__u32 result = 0;

	if (value >> 32) { value >>= 32; result += 32; }
	if (value >> 16) { value >>= 16; result += 16; }
	if (value >> 8) { value >>= 8; result += 8; }
	if (value >> 4) { value >>= 4; result += 4; }
	if (value >> 2) { value >>= 2; result += 2; }
	if (value >> 1) result += 1;
	return result;
}

/* Bucket b holds (2^(b-1), 2^b]. */
static __always_inline __u8 size_bucket(__u64 bytes)
{
	return bytes <= 1 ? 0 : log2_floor(bytes - 1) + 1;
}

/* log2 of an element's bytes, four bits a ncclDataType_t from Int8 (0) to Float8e5m2 (11). */
#define DATA_TYPE_SHIFTS 0x001321332200ULL
#define DATA_TYPES 12

#endif
