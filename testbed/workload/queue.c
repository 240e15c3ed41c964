/* Calls only enqueue: one queue and one worker thread per communicator, streams that keep order across
 * communicators, and groups that hold calls back until they are complete.
 *
 * The worker takes tasks in the order of the calls.  Before a task runs it waits for its turn on its stream, so two
 * communicators used on one stream run one after the other, as on a GPU.  When a task fails the communicator keeps
 * the error (ncclCommGetAsyncError) and its later tasks are passed over. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#include "internal.h"

enum { REFILL_AT = QUEUE_TASKS / 2 }; /* a caller that waited for room gets much of it, not one place */

/* ---- streams ---- */

struct stream {
    struct stream *next;
    cudaStream_t key;
    uint64_t issued, completed;
    pthread_cond_t advanced;
    ncclResult_t first_error;
};

static pthread_mutex_t streams_lock = PTHREAD_MUTEX_INITIALIZER;
static struct stream *streams; /* never removed: a job has a handful */

/* The caller holds streams_lock. */
static struct stream *stream_of(cudaStream_t key) {
    struct stream **place = &streams;
    while (*place != NULL && (*place)->key != key)
        place = &(*place)->next;
    if (*place == NULL && (*place = calloc(1, sizeof **place)) != NULL) {
        (*place)->key = key;
        pthread_cond_init(&(*place)->advanced, NULL);
    }
    return *place;
}

static ncclResult_t take_turn(cudaStream_t key, struct turn *turn) {
    pthread_mutex_lock(&streams_lock);
    turn->stream = stream_of(key);
    if (turn->stream != NULL)
        turn->ticket = turn->stream->issued++;
    pthread_mutex_unlock(&streams_lock);
    return turn->stream != NULL ? ncclSuccess : fail(ncclSystemError, "out of memory for a stream");
}

static const struct turn *turns_of(const struct task *task) { return task->turns != NULL ? task->turns : &task->turn; }

static void wait_for_turns(const struct task *task) {
    pthread_mutex_lock(&streams_lock);
    for (int i = 0; i < task->turn_count; i++) {
        const struct turn *turn = &turns_of(task)[i];
        while (turn->stream->completed != turn->ticket)
            pthread_cond_wait(&turn->stream->advanced, &streams_lock);
    }
    pthread_mutex_unlock(&streams_lock);
}

static void end_turns(const struct task *task, ncclResult_t result) {
    pthread_mutex_lock(&streams_lock);
    for (int i = 0; i < task->turn_count; i++) {
        struct stream *stream = turns_of(task)[i].stream;
        stream->completed++;
        if (result != ncclSuccess && stream->first_error == ncclSuccess)
            stream->first_error = result;
        pthread_cond_broadcast(&stream->advanced);
    }
    pthread_mutex_unlock(&streams_lock);
}

/* A stream is a name: an address that is nobody else's. */
cudaStream_t workload_stream_create(void) { return malloc(1); }

ncclResult_t workload_stream_synchronize(cudaStream_t key) {
    ncclResult_t result = ncclSystemError;
    pthread_mutex_lock(&streams_lock);
    struct stream *stream = stream_of(key);
    if (stream != NULL) {
        for (uint64_t until = stream->issued; stream->completed < until;)
            pthread_cond_wait(&stream->advanced, &streams_lock);
        result = stream->first_error;
    }
    pthread_mutex_unlock(&streams_lock);
    return result;
}

/* ---- the worker ---- */

static void *work(void *argument) {
    ncclComm_t comm = argument;
    prctl(PR_SET_NAME, "railscope-ring");
    pthread_mutex_lock(&comm->lock);
    for (;;) {
        while (comm->completed == comm->enqueued && !comm->leaving) {
            comm->worker_sleeps = true;
            pthread_cond_wait(&comm->filled, &comm->lock);
            comm->worker_sleeps = false;
        }
        if (comm->completed == comm->enqueued)
            break;
        struct task task = comm->tasks[comm->completed % QUEUE_TASKS];
        pthread_mutex_unlock(&comm->lock);

        wait_for_turns(&task);
        ncclResult_t result = atomic_load(&comm->asyncResult);
        if (result == ncclSuccess && (result = run_task(comm, &task)) != ncclSuccess) {
            atomic_store(&comm->asyncResult, result);
            peers_shut_down(comm); /* the peers shall not wait for what will not come */
        }
        end_turns(&task, result);
        free(task.batch);
        free(task.turns);

        pthread_mutex_lock(&comm->lock);
        comm->completed++;
        uint64_t waiting = comm->enqueued - comm->completed;
        if (comm->sleeping_callers > 0 && (waiting == 0 || waiting == REFILL_AT))
            pthread_cond_broadcast(&comm->drained);
    }
    pthread_mutex_unlock(&comm->lock);
    return NULL;
}

ncclResult_t queue_start(ncclComm_t comm) {
    pthread_mutex_init(&comm->lock, NULL);
    pthread_cond_init(&comm->filled, NULL);
    pthread_cond_init(&comm->drained, NULL);
    if (pthread_create(&comm->worker, NULL, work, comm) != 0)
        return fail(ncclSystemError, "cannot start a communicator's thread");
    comm->worker_started = true;
    return ncclSuccess;
}

void queue_leave(ncclComm_t comm) {
    if (!comm->worker_started)
        return;
    pthread_mutex_lock(&comm->lock);
    comm->leaving = true;
    pthread_cond_signal(&comm->filled);
    pthread_mutex_unlock(&comm->lock);
    pthread_join(comm->worker, NULL);
    comm->worker_started = false;
}

static void push(ncclComm_t comm, const struct task *task) {
    pthread_mutex_lock(&comm->lock);
    if (comm->enqueued - comm->completed == QUEUE_TASKS) {
        comm->sleeping_callers++;
        while (comm->enqueued - comm->completed > REFILL_AT)
            pthread_cond_wait(&comm->drained, &comm->lock);
        comm->sleeping_callers--;
    }
    comm->tasks[comm->enqueued++ % QUEUE_TASKS] = *task;
    if (comm->worker_sleeps)
        pthread_cond_signal(&comm->filled);
    pthread_mutex_unlock(&comm->lock);
}

ncclResult_t workload_comm_synchronize(ncclComm_t comm) {
    ncclResult_t result = check_comm(comm, "workload_comm_synchronize");
    if (result != ncclSuccess)
        return result;
    pthread_mutex_lock(&comm->lock);
    comm->sleeping_callers++;
    while (comm->completed != comm->enqueued)
        pthread_cond_wait(&comm->drained, &comm->lock);
    comm->sleeping_callers--;
    pthread_mutex_unlock(&comm->lock);
    return atomic_load(&comm->asyncResult);
}

static ncclResult_t push_operation(ncclComm_t comm, const struct operation *operation) {
    struct task task = {.operation = *operation, .turn_count = 1};
    ncclResult_t result = take_turn(operation->stream, &task.turn);
    if (result == ncclSuccess)
        push(comm, &task);
    return result;
}

/* The library's own traffic: in the queue's order, on a stream of its own, waited for. */
ncclResult_t run_uncounted(ncclComm_t comm, const struct operation *operation) {
    struct task task = {.operation = *operation}; /* no turn: it has no stream */
    push(comm, &task);
    return workload_comm_synchronize(comm);
}

/* ---- groups ---- */

struct grouped {
    struct grouped *next;
    ncclComm_t comm;
    struct operation operation;
};

struct grouped_init {
    struct grouped_init *next;
    pthread_t thread;
    ncclResult_t *result; /* owned */
};

static _Thread_local int group_depth;
static _Thread_local struct grouped *group_first, **group_end;
static _Thread_local struct grouped_init *group_inits;

bool group_open(void) { return group_depth > 0; }

/* A communicator that is being made: ncclGroupEnd waits for its thread. */
ncclResult_t group_add_init(pthread_t thread, ncclResult_t *result) {
    struct grouped_init *init = malloc(sizeof *init);
    if (init == NULL)
        return fail(ncclSystemError, "out of memory");
    *init = (struct grouped_init){group_inits, thread, result};
    group_inits = init;
    return ncclSuccess;
}

static ncclResult_t group_add(ncclComm_t comm, const struct operation *operation) {
    struct grouped *entry = malloc(sizeof *entry);
    if (entry == NULL)
        return fail(ncclSystemError, "out of memory");
    *entry = (struct grouped){NULL, comm, *operation};
    if (group_first == NULL)
        group_end = &group_first;
    *group_end = entry;
    group_end = &entry->next;
    return ncclSuccess;
}

static bool is_point_to_point(const struct operation *operation) {
    return operation->kind == OP_SEND || operation->kind == OP_RECV;
}

/* One turn on every stream that the batch uses. */
static ncclResult_t take_turns(struct task *task) {
    ncclResult_t result = ncclSuccess;
    task->turns = malloc((size_t)task->batch_count * sizeof *task->turns);
    if (task->turns == NULL)
        return fail(ncclSystemError, "out of memory");
    for (int i = 0; i < task->batch_count && result == ncclSuccess; i++) {
        bool seen = false;
        for (int j = 0; j < i && !seen; j++)
            seen = task->batch[j].stream == task->batch[i].stream;
        if (!seen)
            result = take_turn(task->batch[i].stream, &task->turns[task->turn_count++]);
    }
    return result;
}

/* All sends and receives on one communicator, from `first` on, as one task. */
static ncclResult_t push_point_to_point(ncclComm_t comm, const struct grouped *first) {
    struct task task = {.operation.kind = OP_POINT_TO_POINT};
    for (const struct grouped *each = first; each != NULL; each = each->next)
        task.batch_count += each->comm == comm && is_point_to_point(&each->operation);
    if (task.batch_count == 0)
        return ncclSuccess;
    task.batch = malloc((size_t)task.batch_count * sizeof *task.batch);
    if (task.batch == NULL)
        return fail(ncclSystemError, "out of memory");
    int filled = 0;
    for (const struct grouped *each = first; each != NULL; each = each->next)
        if (each->comm == comm && is_point_to_point(&each->operation))
            task.batch[filled++] = each->operation;
    ncclResult_t result = take_turns(&task);
    if (result == ncclSuccess)
        push(comm, &task);
    else
        free(task.batch);
    return result;
}

/* Collectives in the order of the calls, then each communicator's sends and receives together. */
static ncclResult_t launch_group(const struct grouped *first) {
    ncclResult_t result = ncclSuccess;
    for (const struct grouped *each = first; each != NULL && result == ncclSuccess; each = each->next)
        if (!is_point_to_point(&each->operation))
            result = push_operation(each->comm, &each->operation);
    for (const struct grouped *each = first; each != NULL && result == ncclSuccess; each = each->next) {
        bool launched = !is_point_to_point(&each->operation);
        for (const struct grouped *before = first; before != each && !launched; before = before->next)
            launched = before->comm == each->comm && is_point_to_point(&before->operation);
        if (!launched)
            result = push_point_to_point(each->comm, each);
    }
    return result;
}

ncclResult_t enqueue(ncclComm_t comm, const struct operation *operation) {
    ncclResult_t result = atomic_load(&comm->asyncResult);
    if (result != ncclSuccess)
        return result;
    comm->opCount++;
    if (group_depth > 0)
        return group_add(comm, operation);
    if (!is_point_to_point(operation))
        return push_operation(comm, operation);
    struct grouped alone = {NULL, comm, *operation};
    return push_point_to_point(comm, &alone);
}

ncclResult_t ncclGroupStart(void) {
    group_depth++;
    return ncclSuccess;
}
STRONG_TWIN(ncclGroupStart);

ncclResult_t ncclGroupEnd(void) {
    if (group_depth == 0)
        return fail(ncclInvalidUsage, "ncclGroupEnd: no group is open");
    if (--group_depth > 0)
        return ncclSuccess;
    ncclResult_t result = ncclSuccess;
    while (group_inits != NULL) {
        struct grouped_init *init = group_inits;
        group_inits = init->next;
        pthread_join(init->thread, NULL);
        if (result == ncclSuccess)
            result = *init->result;
        free(init->result);
        free(init);
    }
    struct grouped *first = group_first;
    group_first = NULL;
    if (result == ncclSuccess)
        result = launch_group(first);
    while (first != NULL) {
        struct grouped *next = first->next;
        free(first);
        first = next;
    }
    return result;
}
STRONG_TWIN(ncclGroupEnd);
