/* A library that looks like NCCL, with communicators that look like NCCL's (layout in its debug information). */
#include <stdint.h>

struct ncclComm {
	uint64_t startMagic;
	char before[64];
	uint64_t commHash;
	int rank, nRanks, cudaDev, nvmlDev;
	int64_t busId;
	int node, nNodes, localRank, localRanks;
	uint64_t opCount;
	int asyncResult;
	uint64_t endMagic;
};

__attribute__((noinline)) int ncclAllReduce(const void *from, void *to, unsigned long count, int type, int op,
					    struct ncclComm *comm, void *stream)
{
	__asm__ volatile("" ::: "memory");
	return 0;
}

struct uniqueId {
	char internal[128];
};

/* The communicator is there already. */
__attribute__((noinline)) int ncclCommInitRank(struct ncclComm **comm, int ranks, struct uniqueId id, int rank)
{
	__asm__ volatile("" ::: "memory");
	return 0;
}

int pause(void);

/* It never returns. */
__attribute__((noinline)) int ncclCommFinalize(struct ncclComm *comm)
{
	for (;;)
		pause();
	return comm != 0;
}

#ifdef PROGRAM
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static void *finalize(void *comm)
{
	ncclCommFinalize(comm);
	return 0;
}

/* So many threads that stay inside a call each. */
static void enter(struct ncclComm *comms, long number, long threads)
{
	pthread_attr_t small;
	pthread_t thread;

	pthread_attr_init(&small);
	pthread_attr_setstacksize(&small, 1 << 16);
	for (long at = 0; at < threads; at++)
		if (pthread_create(&thread, &small, finalize, &comms[at % number]))
			abort();
}

/* forged NUMBER HASH [THREADS [LOCAL]]: so many communicators, a call on each every second until it is ended; with LOCAL
 * they are made by a call, and so many of the two ranks of each are on this host */
int main(int count, char **arguments)
{
	long number = atol(arguments[1]);
	uint64_t hash = strtoull(arguments[2], 0, 16);
	struct ncclComm *comms = calloc(number, sizeof *comms);

	for (long at = 0; at < number; at++) {
		comms[at].startMagic = comms[at].endMagic = 0x0280028002800280ull;
		comms[at].commHash = hash + at;
		comms[at].nRanks = comms[at].nNodes = 2;
		comms[at].localRanks = count > 4 ? atoi(arguments[4]) : 1;
	}
	puts("ready");
	fflush(stdout);
	sleep(2);
	for (long at = 0; count > 4 && at < number; at++) {
		struct ncclComm *made = &comms[at];
		struct uniqueId id = {{0}};

		ncclCommInitRank(&made, 2, id, 0);
	}
	for (;;) {
		for (long at = 0; at < number; at++)
			ncclAllReduce(0, 0, 4, 7, 0, &comms[at], 0);
		if (count > 3)
			enter(comms, number, atol(arguments[3]));
		count = 0;
		sleep(1);
	}
}
#endif
