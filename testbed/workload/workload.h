/* What the workload library offers beyond NCCL's interface: CUDA's part in waiting, and numbers to check against.
 * testbed/nccl/double/workload.c offers the same beside the real NCCL. */
#ifndef RAILSCOPE_WORKLOAD_H
#define RAILSCOPE_WORKLOAD_H

#include "nccl_abi.h"

#define WORKLOAD_EXPORT __attribute__((visibility("default")))

/* A new stream; it lives as long as the process. */
WORKLOAD_EXPORT cudaStream_t workload_stream_create(void);

/* Wait until everything enqueued on a stream so far is done.  Returns the first error of those operations' work. */
WORKLOAD_EXPORT ncclResult_t workload_stream_synchronize(cudaStream_t stream);

/* Wait until everything enqueued on a communicator so far is done.  Returns its asynchronous error. */
WORKLOAD_EXPORT ncclResult_t workload_comm_synchronize(ncclComm_t comm);

/* The smallest of all ranks' values, known to all ranks on return: how ranks agree when to end.  Collective, but no
 * operation of NCCL's: it enters through no NCCL function and moves 16 bytes a step. */
WORKLOAD_EXPORT ncclResult_t workload_agree_minimum(ncclComm_t comm, int64_t *value);

/* The identity that NCCL keeps in its communicator. */
WORKLOAD_EXPORT uint64_t workload_comm_hash(ncclComm_t comm);

struct workload_rail {
    char name[16]; /* network device, IFNAMSIZ */
    uint64_t transmit_bytes;
    uint64_t receive_bytes;
};

/* Bytes given to and taken from each rail's sockets by this process: payload and message headers.  Fills at most
 * `capacity` entries and returns how many rails there are; 0 before the first communicator. */
WORKLOAD_EXPORT int workload_rails(struct workload_rail *rails, int capacity);

#endif
