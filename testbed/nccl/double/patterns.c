/* Which operations a job calls, in which order.  The first and the last of a kind are verified. */
#include <stdlib.h>
#include <string.h>

#include "driver.h"

void give_buffers(struct job *job, const struct request *request) {
    free(job->send);
    free(job->receive);
    size_t size = buffer_bytes(request, options.ranks) + 4096;
    if (posix_memalign((void **)&job->send, 4096, size) != 0 || posix_memalign((void **)&job->receive, 4096, size) != 0)
        die("out of memory");
}

static bool is_checked(int iteration) {
    return iteration == 0 || iteration == options.iterations - 1;
}

/* Whether a test of the verification wants this: the last element changed, or the second operation left out. */
static bool wants_damage(const char *what) {
    const char *wanted = getenv("NCCL_DRIVER_DAMAGE");
    return wanted != NULL && strcmp(wanted, what) == 0;
}

/* One operation on every communicator; `copies` are the jobs with the buffers of this operation. */
static void once(struct job *copies, const struct request *request, bool checked) {
    static int times;
    bool left_out = ++times == 2 && wants_damage("operation");
    if (checked)
        finish_all();
    for (int i = 0; checked && i < options.communicators; i++)
        fill(&copies[i], request);
    for (int i = 0; i < options.communicators && !left_out; i++) {
        before_operation(i);
        call(&copies[i], request);
        after_operation(i);
    }
    finish_operations();
    if (checked)
        finish_all();
    if (checked && wants_damage("element"))
        damage(&copies[0], request);
    for (int i = 0; checked && i < options.communicators; i++)
        verified &= verify(&copies[i], request);
}

/* Gathers, each after half the pause between iterations, on a communicator of its own. */
static void evaluate(void) {
    static struct job *apart;
    struct request request = request_of(ALLGATHER, NCCL_F32, NCCL_SUM);
    if (apart == NULL) {
        apart = open_job();
        check(ncclCommSplit(jobs[0].comm, 0, options.rank, &apart->comm, NULL), "ncclCommSplit");
        await_child(apart);
        give_buffers(apart, &request);
    }
    for (int number = 0; number < options.evaluate_calls; number++) {
        bool checked = number == 0 || number == options.evaluate_calls - 1;
        pause_ns(options.moments.pace_us * 500);
        if (checked)
            fill(apart, &request);
        call(apart, &request);
        finish(apart);
        if (checked)
            verified &= verify(apart, &request);
    }
}

static void after(int iteration) {
    moments_after(&options.moments, options.rank, options.ranks, (uint64_t)iteration);
    if (options.evaluate_every > 0 && (iteration + 1) % options.evaluate_every == 0)
        evaluate();
}

/* The same operation over and over. */
static void repeat(const struct request *request) {
    for (int i = 0; i < options.communicators; i++)
        give_buffers(&jobs[i], request);
    for (int iteration = 0; iteration < options.iterations; iteration++) {
        if (moments_at(&options.moments, INSTEAD_LEAVE, (uint64_t)iteration)) {
            for (int i = options.communicators - 1; options.rank == options.moments.skip_rank && i >= 0; i--)
                close_job(&jobs[i]);
            compute_for_ever();
        }
        moments_before(&options.moments, options.rank, options.ranks, (uint64_t)iteration);
        if (moments_skip(&options.moments, options.rank, (uint64_t)iteration))
            moments_turn_away(&options.moments);
        if (moments_at(&options.moments, INSTEAD_RECEIVE, (uint64_t)iteration))
            receive_first(request->type);
        once(jobs, request, is_checked(iteration));
        after(iteration);
    }
}

struct request request_of(enum operation operation, int type, int op) {
    struct request request = {operation, type, op, options.ranks - 1, options.bytes / type_bytes(type)};
    return request;
}

/* Every operation with every type, and every reduction where one applies. */
static void everything(void) {
    static const int types[] = {NCCL_F32, NCCL_F16, NCCL_BF16, NCCL_I32, NCCL_F64, NCCL_U8, NCCL_I64};
    for (size_t t = 0; t < sizeof types / sizeof *types; t++)
        for (int operation = 0; operation < OPERATIONS; operation++) {
            bool reduces = operation == ALLREDUCE || operation == REDUCESCATTER || operation == REDUCE;
            for (int op = NCCL_SUM; op <= (reduces ? NCCL_AVG : NCCL_SUM); op++) {
                struct request request = request_of((enum operation)operation, types[t], op);
                repeat(&request);
            }
        }
}

/* Every operation on every communicator, all in one group. */
static void together(struct job copies[OPERATIONS][COMMS_MAX], const struct request *requests, bool checked) {
    finish_all();
    for (int i = 0; checked && i < OPERATIONS * options.communicators; i++)
        fill(&copies[i / options.communicators][i % options.communicators], &requests[i / options.communicators]);
    check(ncclGroupStart(), "ncclGroupStart");
    for (int operation = 0; operation < OPERATIONS; operation++)
        for (int i = 0; i < options.communicators; i++)
            call(&copies[operation][i], &requests[operation]);
    check(ncclGroupEnd(), "ncclGroupEnd");
    for (int i = 0; i < options.communicators; i++)
        finish(&jobs[i]);
    for (int i = 0; checked && i < OPERATIONS * options.communicators; i++)
        verified &=
            verify(&copies[i / options.communicators][i % options.communicators], &requests[i / options.communicators]);
}

/* All operations in turn, over and over, as a training step would have them; or in one group. */
static void mixed(int type, bool grouped) {
    static struct job copies[OPERATIONS][COMMS_MAX];
    struct request requests[OPERATIONS];
    for (int operation = 0; operation < OPERATIONS; operation++) {
        requests[operation] = request_of((enum operation)operation, type, NCCL_SUM);
        for (int i = 0; i < options.communicators; i++) {
            copies[operation][i] = jobs[i];
            copies[operation][i].send = copies[operation][i].receive = NULL;
            give_buffers(&copies[operation][i], &requests[operation]);
        }
    }
    for (int iteration = 0; iteration < options.iterations; iteration++) {
        if (grouped)
            together(copies, requests, is_checked(iteration));
        for (int operation = 0; operation < OPERATIONS && !grouped; operation++)
            once(copies[operation], &requests[operation], is_checked(iteration));
        after(iteration);
    }
    finish_all();
}

/* Several collectives of different sizes in one group: they become one launch. */
static void grouped(int type) {
    struct request request = request_of(ALLREDUCE, type, NCCL_SUM);
    enum { PARTS = 4 };
    struct job parts[PARTS];
    struct request requests[PARTS];
    for (int iteration = 0; iteration < options.iterations; iteration++) {
        for (int i = 0; i < PARTS; i++) {
            requests[i] = request;
            requests[i].count = request.count >> i;
            parts[i] = jobs[0];
            parts[i].send = parts[i].receive = NULL;
            give_buffers(&parts[i], &requests[i]);
            fill(&parts[i], &requests[i]);
        }
        check(ncclGroupStart(), "ncclGroupStart");
        for (int i = 0; i < PARTS; i++)
            call(&parts[i], &requests[i]);
        check(ncclGroupEnd(), "ncclGroupEnd");
        finish(&jobs[0]);
        for (int i = 0; i < PARTS; i++) {
            verified &= verify(&parts[i], &requests[i]);
            free(parts[i].send);
            free(parts[i].receive);
        }
    }
}

/* Calls without an element around those that have some; NCCL discards the collectives among them.  Nothing is waited
 * for in between. */
static void empty(int type) {
    struct request none[OPERATIONS], some = request_of(ALLREDUCE, type, NCCL_SUM);
    give_buffers(&jobs[0], &some);
    for (int operation = 0; operation < OPERATIONS; operation++) {
        none[operation] = request_of((enum operation)operation, type, NCCL_SUM);
        none[operation].count = 0;
    }
    for (int iteration = 0; iteration < options.iterations; iteration++) {
        fill(&jobs[0], &some);
        for (int operation = 0; operation < SENDRECV; operation++)
            call(&jobs[0], &none[operation]);
        call(&jobs[0], &some);
        call(&jobs[0], &none[SENDRECV]);
        for (int operation = 0; operation < SENDRECV; operation++)
            call(&jobs[0], &none[operation]);
        finish(&jobs[0]);
        verified &= verify(&jobs[0], &some);
        after(iteration);
    }
}

/* ---- CUDA graphs ---- */

enum { PARTS_MAX = 48 };
enum graph_kind { GRAPH_PLAIN, GRAPH_LIVE, GRAPH_GROUPED };

/* One communicator's collectives in a graph, each with its own buffers. */
struct captured {
    int parts;
    struct job copies[PARTS_MAX];
    struct request requests[PARTS_MAX];
    cudaGraph_t graph, executable;
};

static void capture(struct captured *c, struct job *job, bool grouped) {
    for (int i = 0; i < c->parts; i++) {
        c->copies[i] = *job;
        c->copies[i].send = c->copies[i].receive = NULL;
        give_buffers(&c->copies[i], &c->requests[i]);
    }
    check_cuda(cuda.begin_capture(job->stream, 0), "cudaStreamBeginCapture");
    if (grouped)
        check(ncclGroupStart(), "ncclGroupStart");
    for (int i = 0; i < c->parts; i++)
        call(&c->copies[i], &c->requests[i]);
    if (grouped)
        check(ncclGroupEnd(), "ncclGroupEnd");
    check_cuda(cuda.end_capture(job->stream, &c->graph), "cudaStreamEndCapture");
    check_cuda(cuda.instantiate(&c->executable, c->graph, 0), "cudaGraphInstantiate");
}

static void replay(struct captured *c, struct job *job) {
    check_cuda(cuda.launch(c->executable, job->stream), "cudaGraphLaunch");
    for (int i = 0; i < c->parts; i++) {
        struct tally *tally = &replayed[c->requests[i].operation]; /* for collectives the two numberings agree */
        tally->calls++;
        tally->payload_bytes += c->requests[i].count * type_bytes(c->requests[i].type);
    }
}

static void fill_parts(struct captured *c) {
    for (int i = 0; i < c->parts; i++)
        fill(&c->copies[i], &c->requests[i]);
}

static bool verify_parts(const struct captured *c) {
    bool right = true;
    for (int i = 0; i < c->parts; i++)
        right &= verify(&c->copies[i], &c->requests[i]);
    return right;
}

/* Collectives captured once in a CUDA graph, which is then replayed: an AllReduce and an AllGather, or so
 * many in one group that NCCL keeps their description outside the kernel's arguments.  GRAPH_LIVE puts an
 * AllReduce that is not captured behind each replay.  The graph is gone at the end: NCCL waits for that. */
static void graph(int type, enum graph_kind kind) {
    static struct captured captured[COMMS_MAX];
    struct request live = request_of(ALLREDUCE, type, NCCL_SUM), gather = request_of(ALLGATHER, type, NCCL_SUM);
    for (int c = 0; c < options.communicators; c++) {
        captured[c].parts = kind == GRAPH_GROUPED ? PARTS_MAX : 2;
        for (int i = 0; i < captured[c].parts; i++)
            captured[c].requests[i] = kind == GRAPH_GROUPED || i == 0 ? live : gather;
        capture(&captured[c], &jobs[c], kind == GRAPH_GROUPED);
        give_buffers(&jobs[c], &live);
    }
    for (int iteration = 0; iteration < options.iterations; iteration++) {
        bool checked = is_checked(iteration);
        if (checked)
            finish_all();
        for (int c = 0; checked && c < options.communicators; c++) {
            fill_parts(&captured[c]);
            fill(&jobs[c], &live);
        }
        for (int c = 0; c < options.communicators; c++) {
            before_operation(c);
            replay(&captured[c], &jobs[c]);
            if (kind == GRAPH_LIVE)
                call(&jobs[c], &live);
            after_operation(c);
        }
        finish_operations();
        if (checked)
            finish_all();
        for (int c = 0; checked && c < options.communicators; c++)
            verified &= verify_parts(&captured[c]) && (kind != GRAPH_LIVE || verify(&jobs[c], &live));
        after(iteration);
    }
    for (int c = 0; c < options.communicators; c++) {
        check_cuda(cuda.destroy_executable(captured[c].executable), "cudaGraphExecDestroy");
        check_cuda(cuda.destroy_graph(captured[c].graph), "cudaGraphDestroy");
    }
}

void run_pattern(void) {
    static const char *const types[] = {"i8", "u8", "i32", "u32", "i64", "u64", "f16", "f32", "f64", "bf16"};
    static const char *const ops[] = {"sum", "prod", "max", "min", "avg"};
    enum {
        EVERYTHING = OPERATIONS,
        MIXED,
        MIXED_GROUP,
        GROUPED,
        EMPTY,
        SPLIT,
        FAMILIES,
        GPT,
        GRAPH,
        GRAPH_AND_LIVE,
        GRAPH_OF_GROUP,
        ABANDONED,
        REVOKED,
        BEREAVED,
        BEREAVED_REVOKE,
        SPLIT_LATE,
        RECEIVE_FIRST,
        DISAGREE_OPERATION,
        DISAGREE_COUNT,
        DISAGREE_ORDER,
        INFERENCE,
        PATTERNS
    };
    static const char *const patterns[PATTERNS] = {
        "allreduce",      "allgather",   "reducescatter", "broadcast", "reduce",
        "alltoall",       "sendrecv",    "everything",    "mixed",
        "mixed-group",    "grouped",     "empty",         "split",     "families",
        "gpt",            "graph",       "graph-and-live", "graph-of-group", "abandoned", "revoked",
        "bereaved",       "bereaved-revoke", "split-late", "receive-first",
        "disagree-operation", "disagree-count", "disagree-order",
        "inference"};
    int type = index_of(options.type, types, 10, "type"), op = index_of(options.op, ops, 5, "op");
    int pattern = index_of(options.pattern, patterns, PATTERNS, "pattern");
    struct request request;
    switch (pattern) {
    case EVERYTHING:
        return everything();
    case MIXED:
    case MIXED_GROUP:
        return mixed(type, pattern == MIXED_GROUP);
    case GROUPED:
        return grouped(type);
    case EMPTY:
        return empty(type);
    case SPLIT:
        return split(type);
    case FAMILIES:
        return families(type);
    case GPT:
        return gpt();
    case GRAPH:
    case GRAPH_AND_LIVE:
    case GRAPH_OF_GROUP:
        return graph(type, (enum graph_kind)(pattern - GRAPH));
    case ABANDONED:
        return abandoned(type);
    case REVOKED:
        return revoked(type);
    case BEREAVED:
    case BEREAVED_REVOKE:
        return bereaved(type, pattern == BEREAVED_REVOKE);
    case SPLIT_LATE:
        return split_late(type);
    case RECEIVE_FIRST:
        return receive_first(type);
    case DISAGREE_OPERATION:
    case DISAGREE_COUNT:
    case DISAGREE_ORDER:
        return disagree(type, (enum disagreement)(pattern - DISAGREE_OPERATION));
    case INFERENCE:
        return inference();
    default:
        request = request_of((enum operation)pattern, type, op);
        return repeat(&request);
    }
}
