/* Communicators made from others, each with AllReduces of its own; they live until the rank leaves. */
#include <stdlib.h>

#include "driver.h"

enum { AWAIT_NS = 100000 };

static void use(struct job *job, int type) {
    struct request request = request_of(ALLREDUCE, type, NCCL_SUM);
    check(ncclCommCount(job->comm, &job->ranks), "ncclCommCount");
    check(ncclCommUserRank(job->comm, &job->rank), "ncclCommUserRank");
    give_buffers(job, &request);
    for (int iteration = 0; iteration < options.iterations; iteration++) {
        fill(job, &request);
        call(job, &request);
        finish(job);
        verified &= verify(job, &request);
    }
}

void await_child(struct job *job) {
    while (!options.blocking && __atomic_load_n(&job->comm, __ATOMIC_ACQUIRE) == NULL)
        pause_ns(AWAIT_NS);
    check(NCCL_OK, "a new communicator");
}

/* Even and odd ranks apart, each half with a communicator split off, which is destroyed at once. */
void split(int type) {
    struct job *half = open_job();
    check(ncclCommSplit(jobs[0].comm, options.rank % 2, options.rank, &half->comm, NULL), "ncclCommSplit");
    await_child(half);
    use(half, type);
    close_job(half);
}

/* All ranks split off the same once more; the last one comes to it --warm-up-ms late. */
void split_late(int type) {
    struct job *again = open_job();
    moments_before(&options.moments, options.rank, options.ranks, 0);
    check(ncclCommSplit(jobs[0].comm, 0, options.rank, &again->comm, NULL), "ncclCommSplit");
    await_child(again);
    use(again, type);
}

/* All but the last rank: by a split without a colour for it, and by a shrink.  Then the last one joins the split. */
void families(int type) {
    int last = options.ranks - 1, color = options.rank == last ? NCCL_NO_COLOR : 0;
    struct job *part = open_job();
    check(ncclCommSplit(jobs[0].comm, color, options.rank, &part->comm, NULL), "ncclCommSplit");
    if (options.rank != last) {
        await_child(part);
        use(part, type);
    }
    use(&jobs[0], type);
    if (options.rank != last) {
        struct job *shrunk = open_job();
        check(ncclCommShrink(jobs[0].comm, &last, 1, &shrunk->comm, NULL, 0), "ncclCommShrink");
        await_child(shrunk);
        use(shrunk, type);
    }
    if (ncclCommGrow == NULL)
        return;
    ncclUniqueId id;
    if (options.rank == 0) {
        check(ncclCommGetUniqueId(part->comm, &id), "ncclCommGetUniqueId");
        share_id(COMMS_MAX, &id);
    } else if (options.rank == last) {
        id = shared_id(COMMS_MAX);
    }
    bool knows = options.rank == 0 || options.rank == last;
    struct job *grown = open_job();
    check(ncclCommGrow(part->comm, options.ranks, knows ? &id : NULL, options.rank == last ? last : -1, &grown->comm,
                       NULL),
          "ncclCommGrow");
    await_child(grown);
    use(grown, type);
    if (options.rank == last && part->comm != NULL)
        die("ncclCommSplit made a communicator without a colour");
}
