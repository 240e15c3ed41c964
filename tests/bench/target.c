// SPDX-License-Identifier: Apache-2.0
/*
 * The probed function of the bench: NCCL's name and signature, a push as its first instruction and almost nothing
 * behind it, so that a call's time is the probe's time.  Build with -fno-omit-frame-pointer and without control-flow
 * protection: the kernel emulates a push, but would single-step an endbr64.
 *
 * With THROUGH_ENQUEUE_CHECK it passes its arguments on in a struct as NCCL does; railscope then probes the function
 * that takes it, as it does in every library that still has its symbol table.
 */
#include <stddef.h>
#include <stdint.h>

#define EXPORTED __attribute__((visibility("default"), noinline))

#ifdef THROUGH_ENQUEUE_CHECK

#define ALL_REDUCE 4

/* The beginning of NCCL's struct ncclInfo. */
struct info {
	uint32_t coll;
	const char *name;
	const void *send;
	void *receive;
	size_t count;
	int data_type;
	int reduction;
	int root;
	void *comm;
	void *stream;
};

EXPORTED int enqueue_check(struct info *info) __asm__("_Z16ncclEnqueueCheckP8ncclInfo");
EXPORTED int enqueue_check(struct info *info)
{
	/* Asking for the frame's address makes the compiler begin with pushing it. */
	__asm__ volatile("" : : "r"(info), "r"(__builtin_frame_address(0)) : "memory");
	return 0;
}

EXPORTED int ncclAllReduce(const void *send, void *receive, size_t count, int data_type, int reduction, void *comm,
			   void *stream)
{
	struct info info = {ALL_REDUCE, "AllReduce", send, receive, count, data_type, reduction, 0, comm, stream};

	return enqueue_check(&info);
}

#else

EXPORTED int ncclAllReduce(const void *send, void *receive, size_t count, int data_type, int reduction, void *comm,
			   void *stream)
{
	/* The compiler must believe that the arguments matter. */
	__asm__ volatile("" : : "r"(send), "r"(receive), "r"(count), "r"(data_type), "r"(reduction), "r"(comm),
			 "r"(stream) : "memory");
	return 0;
}

#endif
