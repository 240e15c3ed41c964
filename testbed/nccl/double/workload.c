/* What testbed/workload's driver wants beyond NCCL's interface (workload.h), beside the real NCCL: so the same program
 * is the job of both libraries.
 *
 * Streams are the double's.  The ranks agree through a file that all of them map, which RAILSCOPE_WORKLOAD_AGREEMENT
 * names: nothing of it is on any rail. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "layout.h"
#include "workload.h"

enum { RANKS_MAX = 1024, WAIT_NS = 100000 };

/* A rank that is in round r writes its value to values[r % 2]; it comes to round r + 2, and writes there again, only
 * when all ranks have been in r + 1, and so have read those of r. */
struct agreement {
    _Atomic int64_t values[2][RANKS_MAX];
    _Atomic uint64_t rounds[RANKS_MAX]; /* that a rank has begun */
};

extern void *cuda_double_function(const char *name); /* patch.c */

_Noreturn static void fail(const char *what) {
    perror(what);
    exit(1);
}

cudaStream_t workload_stream_create(void) {
    int (*create)(cudaStream_t *stream) = (int (*)(cudaStream_t *))cuda_double_function("cudaStreamCreate");
    cudaStream_t stream;
    if (create(&stream) != 0)
        fail("cudaStreamCreate");
    return stream;
}

ncclResult_t workload_stream_synchronize(cudaStream_t stream) {
    int (*wait)(cudaStream_t stream) = (int (*)(cudaStream_t))cuda_double_function("cudaStreamSynchronize");
    return wait(stream) == 0 ? ncclSuccess : ncclUnhandledCudaError;
}

static struct agreement *agreement(void) {
    static struct agreement *mapped;
    const char *path = getenv("RAILSCOPE_WORKLOAD_AGREEMENT");
    if (mapped != NULL)
        return mapped;
    int fd = path == NULL ? -1 : open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, sizeof *mapped) != 0)
        fail("RAILSCOPE_WORKLOAD_AGREEMENT");
    mapped = mmap(NULL, sizeof *mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED)
        fail("mmap");
    close(fd);
    return mapped;
}

ncclResult_t workload_agree_minimum(ncclComm_t comm, int64_t *value) {
    struct agreement *all = agreement();
    int rank, ranks;
    if (ncclCommUserRank(comm, &rank) != ncclSuccess || ncclCommCount(comm, &ranks) != ncclSuccess || ranks > RANKS_MAX)
        return ncclInvalidArgument;
    uint64_t round = atomic_load(&all->rounds[rank]);
    atomic_store(&all->values[round % 2][rank], *value);
    atomic_store(&all->rounds[rank], round + 1);
    for (int other = 0; other < ranks; other++) {
        while (atomic_load(&all->rounds[other]) <= round)
            nanosleep(&(struct timespec){.tv_nsec = WAIT_NS}, NULL);
        int64_t theirs = atomic_load(&all->values[round % 2][other]);
        *value = theirs < *value ? theirs : *value;
    }
    return ncclSuccess;
}

uint64_t workload_comm_hash(ncclComm_t comm) { return comm->commHash; }

/* The library does not say: who asks reads what its devices counted. */
int workload_rails(struct workload_rail *rails, int capacity) {
    (void)rails;
    (void)capacity;
    return 0;
}
