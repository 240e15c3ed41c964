/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What the probes use of libbpf's header and of the compiler, and bcc does not have. */
#ifndef RAILSCOPE_BCC_HELPERS_H
#define RAILSCOPE_BCC_HELPERS_H

#ifndef __always_inline
#define __always_inline inline __attribute__((always_inline))
#endif

/*
 * bcc has no functions that call functions: all are inlined, and the verifier follows each place where one stands in
 * every state that leads there.  What is not needed to count is left out (ALL_INLINED): rings are not shared out, and
 * fewer places are tried for the shapes of a new communicator.
 */
#undef __noinline
#define __noinline
#define VERIFIED_ONCE static
#define ALL_INLINED 1

/*
 * bcc compiles for the first BPF instruction set, which has one atomic instruction, an addition that does not return
 * the old value ("Invalid usage of the XADD return value").  The kernel has the others since 5.12, so their bytes are
 * written here: BPF_STX | BPF_ATOMIC with BPF_DW or BPF_W, source and target register, no offset, the operation.  In
 * such an expression the name of a register is a symbol; its number is given to it first.  Source: Linux
 * Documentation/bpf/standardization/instruction-set.rst.
 */
asm(".set r0, 0; .set r1, 1; .set r2, 2; .set r3, 3; .set r4, 4; .set r5, 5; .set r6, 6; .set r7, 7; .set r8, 8; "
    ".set r9, 9");

#define ATOMIC_FETCH_ADD "0x01"
#define ATOMIC_EXCHANGE "0xe1"
#define ATOMIC_COMPARE_EXCHANGE "0xf1" /* the expected value is in r0, where the old one comes */

#define ATOMIC_BYTES(size_code, operation, target, source) \
	".byte " size_code ", (" source " << 4) | " target ", 0, 0, " operation ", 0, 0, 0"

/* Both operands are evaluated before; the value becomes what was there. */
#define ATOMIC_SWAP_IN(pointer, value, operation)                                                            \
	do {                                                                                                 \
		_Static_assert(sizeof(*(pointer)) == 8 || sizeof(*(pointer)) == 4, "4 or 8 bytes");          \
		if (sizeof(*(pointer)) == 8)                                                                 \
			asm volatile(ATOMIC_BYTES("0xdb", operation, "%1", "%0")                             \
				     : "+r"(value) : "r"(pointer) : "memory");                               \
		else                                                                                         \
			asm volatile(ATOMIC_BYTES("0xc3", operation, "%1", "%0")                             \
				     : "+r"(value) : "r"(pointer) : "memory");                               \
	} while (0)

#define __sync_fetch_and_add(pointer, addend)                                                                \
	({                                                                                                   \
		__typeof__(pointer) pointer_ = (pointer);                                                    \
		__u64 value_ = (addend);                                                                     \
		ATOMIC_SWAP_IN(pointer_, value_, ATOMIC_FETCH_ADD);                                          \
		(__typeof__(*pointer_))value_;                                                               \
	})
#define __sync_fetch_and_sub(pointer, subtrahend) __sync_fetch_and_add(pointer, -(__u64)(subtrahend))

#define __sync_lock_test_and_set(pointer, desired)                                                           \
	({                                                                                                   \
		__typeof__(pointer) pointer_ = (pointer);                                                    \
		__u64 value_ = (desired);                                                                    \
		ATOMIC_SWAP_IN(pointer_, value_, ATOMIC_EXCHANGE);                                           \
		(__typeof__(*pointer_))value_;                                                               \
	})

#define __sync_val_compare_and_swap(pointer, expected, desired)                                              \
	({                                                                                                   \
		__typeof__(pointer) pointer_ = (pointer);                                                    \
		__u64 expected_ = (__typeof__(*pointer_))(expected), desired_ = (desired);                   \
		register __u64 found_ asm("r0") = expected_;                                                 \
		_Static_assert(sizeof(*pointer_) == 8 || sizeof(*pointer_) == 4, "4 or 8 bytes");            \
		if (sizeof(*pointer_) == 8)                                                                  \
			asm volatile(ATOMIC_BYTES("0xdb", ATOMIC_COMPARE_EXCHANGE, "%1", "%2")               \
				     : "+r"(found_) : "r"(pointer_), "r"(desired_) : "memory");              \
		else                                                                                         \
			asm volatile(ATOMIC_BYTES("0xc3", ATOMIC_COMPARE_EXCHANGE, "%1", "%2")               \
				     : "+r"(found_) : "r"(pointer_), "r"(desired_) : "memory");              \
		(__typeof__(*pointer_))found_;                                                               \
	})

#endif
