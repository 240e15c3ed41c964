/* What patterns share: buffers, communicators that come and go, and results that are checked once the stream has come
 * so far. */
#include "driver.h"

#include <stdlib.h>
#include <string.h>

/* ---- results to check ---- */

static struct {
    const void *received, *expected;
    size_t bytes;
    const char *what;
} pending[PENDING];
static int pending_count;

void expect(const struct job *job, const void *received, const void *expected, size_t bytes, const char *what) {
    if (!job->options->verify || bytes == 0)
        return;
    if (pending_count == PENDING)
        abort(); /* a pattern that settles too rarely */
    pending[pending_count].received = received;
    pending[pending_count].expected = expected;
    pending[pending_count].bytes = bytes;
    pending[pending_count++].what = what;
}

void settle(const struct job *job) {
    must(workload_stream_synchronize(job->stream), "waiting for the stream");
    must(workload_stream_synchronize(job->other_stream), "waiting for the other stream");
    for (int i = 0; i < pending_count; i++) {
        if (memcmp(pending[i].received, pending[i].expected, pending[i].bytes) == 0)
            continue;
        size_t at = 0;
        while (((const char *)pending[i].received)[at] == ((const char *)pending[i].expected)[at])
            at++;
        report_error("wrong result of %s: first at byte %zu of %zu", pending[i].what, at, pending[i].bytes);
    }
    pending_count = 0;
}

/* ---- buffers and communicators ---- */

void buffers_make(struct job *job, int count, size_t bytes) {
    job->buffers = calloc((size_t)count, sizeof *job->buffers);
    for (int i = 0; i < count; i++)
        if (job->buffers == NULL || (job->buffers[i] = calloc(1, bytes)) == NULL)
            abort();
    job->buffer_count = count;
}

void finish_buffers(struct job *job) {
    for (int i = 0; i < job->buffer_count; i++)
        free(job->buffers[i]);
    free(job->buffers);
    data_free(job->data);
}

struct party *split(const struct party *parent, int color, int key) {
    ncclComm_t comm;
    must(ncclCommSplit(parent->comm, color, key, &comm, NULL), "ncclCommSplit");
    return comm == NULL ? NULL : party_make(comm);
}

void destroy(struct party *party) {
    must(ncclCommFinalize(party->comm), "ncclCommFinalize");
    must(ncclCommDestroy(party->comm), "ncclCommDestroy");
    party->comm = NULL;
}

void all_reduce(struct job *job, struct party *party, const struct data *data, char *target, size_t count,
                ncclDataType_t type, ncclRedOp_t reduction, uint64_t iteration, cudaStream_t stream) {
    if (moments_skip(&job->options->moments, job->options->rank, job->iteration))
        moments_turn_away(&job->options->moments);
    CALL(party, COUNT_ALL_REDUCE, count, type,
         ncclAllReduce(data_of(data, party->rank, iteration), target, count, type, reduction, party->comm, stream));
    expect(job, target, data_combined(data, iteration), count * element_bytes(type), "AllReduce");
}
