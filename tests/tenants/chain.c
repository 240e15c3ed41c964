/* A chain of processes, each the child of the one before, each with threads that wait and a communicator that it calls
   for two seconds: chain PROCESSES THREADS HASH.  Whoever looks for the descendants of each has many to look at. */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>

/* As in forged.c, whose library has the function. */
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

int ncclAllReduce(const void *from, void *to, unsigned long count, int type, int op, struct ncclComm *comm, void *stream);

static void *idle(void *unused)
{
	for (;;)
		pause();
	return unused;
}

int main(int count, char **arguments)
{
	long processes = atol(arguments[1]), threads = atol(arguments[2]), at = 0;
	pthread_attr_t small;
	pthread_t thread;
	struct ncclComm comm = {.startMagic = 0x0280028002800280ull, .endMagic = 0x0280028002800280ull};
	int made[2];
	char byte;

	if (count < 4 || pipe(made))
		return 1;
	while (at < processes - 1 && !fork()) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		at++;
	}
	pthread_attr_init(&small);
	pthread_attr_setstacksize(&small, 1 << 14);
	for (long one = 0; one < threads; one++)
		if (pthread_create(&thread, &small, idle, 0))
			break;
	if (write(made[1], "x", 1) != 1)
		return 1;
	if (!at) {
		for (long one = 0; one < processes; one++)
			if (read(made[0], &byte, 1) != 1)
				return 1;
		puts("ready");
		fflush(stdout);
	}
	comm.commHash = strtoull(arguments[3], 0, 16) + at;
	comm.nRanks = comm.nNodes = 2;
	comm.localRanks = 1;
	sleep(3);
	for (int second = 0; second < 2; second++) {
		ncclAllReduce(0, 0, 4, 7, 0, &comm, 0);
		sleep(1);
	}
	for (;;)
		pause();
}
