// SPDX-License-Identifier: Apache-2.0
/*
 * Calls the bench's ncclAllReduce: target-loop LIBRARY.  Each line of standard input asks for that many
 * calls; the answer is the CPU time they took, ns, on a line: a probe's time is the caller's own, and what others on a
 * shared machine take in between is not.  Ends at the end of its input.
 */
#include <dlfcn.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <time.h>

typedef int all_reduce(const void *send, void *receive, size_t count, int data_type, int reduction, void *comm,
		       void *stream);

#define FLOAT32 7

static uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
	return (uint64_t)now.tv_sec * 1000000000U + (uint64_t)now.tv_nsec;
}

int main(int argument_count, char **arguments)
{
	/* A communicator without NCCL's magic numbers: known by its address, never by its identity. */
	static uint64_t communicator[1024];
	static char stream[64];
	uint64_t calls;
	all_reduce *function;
	void *library;

	if (argument_count != 2)
		return 2;
	library = dlopen(arguments[1], RTLD_NOW);
	function = library ? (all_reduce *)dlsym(library, "ncclAllReduce") : NULL;
	if (!function) {
		fprintf(stderr, "%s\n", dlerror());
		return 1;
	}
	printf("ready\n");
	fflush(stdout);
	while (scanf("%" SCNu64, &calls) == 1) {
		uint64_t start = now_ns();

		/* Eight sizes, as a job's buckets have: 1 KiB to 128 KiB. */
		for (uint64_t call = 0; call < calls; call++)
			function(NULL, NULL, (size_t)256 << (call & 7), FLOAT32, 0, communicator, stream);
		printf("%" PRIu64 "\n", now_ns() - start);
		fflush(stdout);
	}
	return 0;
}
