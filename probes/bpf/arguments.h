/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * A probed function's arguments, by place.  The register structs are written out here because the kernel's own
 * headers give another architecture's when clang compiles for the bpf target.  Sources: System V ABI for x86-64,
 * AAPCS64; layout of the context: arch/x86/include/asm/ptrace.h, arch/arm64/include/uapi/asm/ptrace.h.
 */
#ifndef RAILSCOPE_ARGUMENTS_H
#define RAILSCOPE_ARGUMENTS_H

#include <linux/types.h>

#include <bpf/bpf_helpers.h>

#include "nccl.h"

#if defined(__TARGET_ARCH_x86)

struct registers {
	__u64 r15, r14, r13, r12, rbp, rbx, r11, r10, r9, r8, rax, rcx, rdx, rsi, rdi;
	__u64 orig_rax, rip, cs, eflags, rsp, ss;
};
#define RETURN_VALUE(ctx) ((ctx)->rax)
#define STACK_POINTER(ctx) ((ctx)->rsp)
#define INSTRUCTION_POINTER(ctx) ((ctx)->rip)
#define FIRST_STACK_SLOT 8 /* the return address comes first */

#define FIRST_ARGUMENT(ctx) ((ctx)->rdi)
#define SECOND_ARGUMENT(ctx) ((ctx)->rsi)
#define THIRD_ARGUMENT(ctx) ((ctx)->rdx)

static __always_inline void read_registers(const struct registers *ctx, __u64 values[PLACE_STACK])
{
	values[0] = ctx->rdi;
	values[1] = ctx->rsi;
	values[2] = ctx->rdx;
	values[3] = ctx->rcx;
	values[4] = ctx->r8;
	values[5] = ctx->r9;
	values[6] = 0;
	values[7] = 0;
}

#elif defined(__TARGET_ARCH_arm64)

struct registers {
	__u64 x[31];
	__u64 sp, pc, pstate;
};
#define RETURN_VALUE(ctx) ((ctx)->x[0])
#define STACK_POINTER(ctx) ((ctx)->sp)
#define INSTRUCTION_POINTER(ctx) ((ctx)->pc)
#define FIRST_STACK_SLOT 0

#define FIRST_ARGUMENT(ctx) ((ctx)->x[0])
#define SECOND_ARGUMENT(ctx) ((ctx)->x[1])
#define THIRD_ARGUMENT(ctx) ((ctx)->x[2])

static __always_inline void read_registers(const struct registers *ctx, __u64 values[PLACE_STACK])
{
	values[0] = ctx->x[0];
	values[1] = ctx->x[1];
	values[2] = ctx->x[2];
	values[3] = ctx->x[3];
	values[4] = ctx->x[4];
	values[5] = ctx->x[5];
	values[6] = ctx->x[6];
	values[7] = ctx->x[7];
}

#else
#error "define __TARGET_ARCH_x86 or __TARGET_ARCH_arm64"
#endif

/*
 * Where a probed function's arguments are.  All argument registers are copied first: the verifier allows a variable
 * index into the stack, but none into the context.
 */
struct arguments {
	__u64 registers[PLACE_STACK];
	__u64 stack;
	int failed; /* user memory was not readable */
};

static __always_inline void take_arguments(struct arguments *arguments, const struct registers *ctx, __u64 cookie)
{
	read_registers(ctx, arguments->registers);
	arguments->stack = STACK_POINTER(ctx) + FIRST_STACK_SLOT + COOKIE_STACK_BYTES(cookie);
	arguments->failed = 0;
}

/* Address of the nth stack argument. */
static __always_inline __u64 stack_slot(const struct arguments *arguments, __u32 slot)
{
	return arguments->stack + 8ULL * slot;
}

/* Read the argument at a place; 0 where the function has none. */
static __always_inline __u64 argument(struct arguments *arguments, __u32 place)
{
	__u64 value = 0;

	if (place < PLACE_STACK)
		return arguments->registers[place & (PLACE_STACK - 1)];
	if (place == PLACE_NONE)
		return 0;
	if (bpf_probe_read_user(&value, sizeof(value), (const void *)stack_slot(arguments, place - PLACE_STACK)))
		arguments->failed = 1;
	return value;
}

#endif
