/* Patterns in which a peer is missing, and what NCCL's functions about errors return then. */
#include <stdio.h>

#include "driver.h"

enum { ABANDON_NS = 300000000, POLL_NS = 1000000, POLLS_MAX = 60000 };

struct result results[RESULTS_MAX];

static ncclResult_t note(const char *function, ncclResult_t result) {
    int at = 0;
    while (at < RESULTS_MAX - 1 && results[at].function != NULL)
        at++;
    results[at] = (struct result){function, result};
    return result;
}

static ncclResult_t asynchronous_error(ncclComm_t comm) {
    ncclResult_t error = NCCL_OK;
    check(ncclCommGetAsyncError(comm, &error), "ncclCommGetAsyncError");
    return error;
}

/* Revoke the communicator and wait until NCCL says that it is quiet. */
static void revoke(ncclComm_t comm) {
    note("ncclCommRevoke", ncclCommRevoke(comm, 0));
    ncclResult_t state = NCCL_IN_PROGRESS;
    for (int polls = 0; polls < POLLS_MAX && state == NCCL_IN_PROGRESS; polls++) {
        state = asynchronous_error(comm);
        pause_ns(POLL_NS);
    }
    note("ncclCommGetAsyncError after ncclCommRevoke", state);
}

static void leave_alone(int type) {
    struct request request = request_of(ALLREDUCE, type, NCCL_SUM);
    give_buffers(&jobs[0], &request);
    fill(&jobs[0], &request);
    if (options.rank != 0)
        call(&jobs[0], &request);
    pause_ns(ABANDON_NS);
    note("ncclCommGetAsyncError", asynchronous_error(jobs[0].comm));
}

/* Rank 0 never comes: the others wait in their kernel until the communicator is aborted. */
void abandoned(int type) {
    leave_alone(type);
    check(note("ncclCommAbort", ncclCommAbort(jobs[0].comm)), "ncclCommAbort");
    finish(&jobs[0]);
    jobs[0].comm = NULL;
}

/* The same, but the communicator is revoked, and then destroyed like a healthy one. */
void revoked(int type) {
    leave_alone(type);
    revoke(jobs[0].comm);
    finish(&jobs[0]);
    check(note("ncclCommDestroy", ncclCommDestroy(jobs[0].comm)), "ncclCommDestroy");
    jobs[0].comm = NULL;
}

/* True when the operation in flight is over, false when the communicator has an error instead. */
static bool survives(struct job *job) {
    for (int polls = 0; polls < POLLS_MAX; polls++) {
        ncclResult_t error = asynchronous_error(job->comm);
        if (error != NCCL_OK && error != NCCL_IN_PROGRESS) {
            note("ncclCommGetAsyncError", error);
            return false;
        }
        int state = cuda.stream_query(job->stream);
        if (state == CUDA_SUCCESS)
            return true;
        if (state != CUDA_NOT_READY)
            check_cuda(state, "cudaStreamQuery");
        pause_ns(POLL_NS);
    }
    die("neither a result nor an error");
}

/* AllReduce over and over until a peer dies; NCCL says so, and the communicator is aborted. */
void bereaved(int type, bool revoke_first) {
    struct job *job = &jobs[0];
    struct request request = request_of(ALLREDUCE, type, NCCL_SUM);
    give_buffers(job, &request);
    for (int iteration = 0; iteration < options.iterations; iteration++) {
        fill(job, &request);
        call(job, &request);
        if (!survives(job)) {
            if (revoke_first)
                revoke(job->comm);
            check(note("ncclCommAbort", ncclCommAbort(job->comm)), "ncclCommAbort");
            finish(job);
            job->comm = NULL;
            return;
        }
        verified &= verify(job, &request);
        if (iteration == 0 && options.progress != NULL)
            write_file(options.progress, "under way\n", 10);
        moments_after(&options.moments, options.rank, options.ranks, (uint64_t)iteration);
    }
}

/* Two ranks that each receive first: connecting them takes both, so that neither comes to its send. */
void receive_first(int type) {
    struct job *job = &jobs[0];
    struct request request = request_of(SENDRECV, type, NCCL_SUM);
    int peer = options.rank ^ 1;
    give_buffers(job, &request);
    check(ncclRecv(job->receive, request.count, type, peer, job->comm, job->stream), "ncclRecv");
    check(ncclSend(job->send, request.count, type, peer, job->comm, job->stream), "ncclSend");
    finish(job);
}

enum { DISAGREES_EVERY = 300 };

/* Two collectives over and over; now and then one rank makes another one, or both in the other order. */
void disagree(int type, enum disagreement how) {
    struct job *job = &jobs[0];
    struct request usual[2] = {request_of(ALLREDUCE, type, NCCL_SUM), request_of(ALLGATHER, type, NCCL_SUM)};
    give_buffers(job, &usual[0]);
    fill(job, &usual[0]);
    for (int iteration = 1; iteration <= options.iterations; iteration++) {
        struct request made[2] = {usual[0], usual[1]};
        if (options.rank == options.ranks / 2 && iteration % DISAGREES_EVERY == 0) {
            if (how != ANOTHER_COUNT)
                made[0] = usual[1];
            else
                made[0].count /= 2;
            if (how == ANOTHER_ORDER)
                made[1] = usual[0];
        }
        for (int i = 0; i < 2; i++) {
            call(job, &made[i]);
            finish(job);
        }
        moments_after(&options.moments, options.rank, options.ranks, (uint64_t)iteration);
    }
}
