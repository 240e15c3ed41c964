/* railscope-workload: one rank of a collective job.  See `--help`; rank and size come from RANK and WORLD_SIZE.
 *
 * Ranks end at the same iteration.  Rank 0 proposes how many iterations to make next (as many as fit in some 50 ms),
 * all take the smallest proposal, and a rank that was told to end proposes none.  That agreement is the library's own
 * traffic and no operation of NCCL's, so it is in no count. */
#define _GNU_SOURCE
#include "driver.h"

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { MEET_SECONDS = 60, GRACE_MILLISECONDS = 3000, EXIT_WRONG = 1, EXIT_USAGE = 2, EXIT_INTERRUPTED = 3 };

static const char help[] =
    "usage: railscope-workload --pattern NAME (--seconds N | --iterations N) --id-file FILE [options]\n"
    "\n"
    "One rank of a collective job over TCP, called through NCCL's interface.  Start one process a rank with\n"
    "RANK, WORLD_SIZE, LOCAL_RANK, NCCL_HOSTID and NCCL_SOCKET_IFNAME (the rails, comma list) set.\n"
    "\n"
    "  --pattern NAME        ddp, tensor-parallel, moe, inference, gpt, mixed or idle\n"
    "  --seconds N           end after N seconds (all ranks at the same iteration)\n"
    "  --iterations N        end after N iterations of the pattern\n"
    "  --id-file FILE        where rank 0 puts the unique id and the others wait for it\n"
    "  --report FILE         write what was called there, as JSON, at the end and on SIGTERM\n"
    "  --start-file FILE     make no call before FILE exists\n"
    "  --init-before-start   with --start-file: create the communicator before\n"
    "  --bytes N             inference: payload of every call (default: 1 to 64 KiB, mixed)\n"
    "  --calls N             inference: calls of an iteration (default 64)\n"
    "  --shape P,T,D,L,H,S,V,B,M\n"
    "                        gpt: pipeline stages, tensor ranks, replicas, layers, hidden size, tokens of a sequence,\n"
    "                        vocabulary, sequences of a micro-batch, micro-batches of a replica\n"
    "  --replicas-apart      gpt: count ranks tensor, pipeline, data (default: tensor, data, pipeline)\n"
    "  --seed N              data and random choices (default 1)\n"
    "  --no-verify           do not check results\n"
    "  --die-with PID        end when the starting process, PID, does\n"
    "  --batch N             agree about the end every N iterations (default: every 50 ms or so)\n"
    "  --linger              stay when a call fails, as a job does that nobody watches\n"
    "  --no-destroy          leave without taking the communicator apart\n"
    "\n"
    "moments of a job's life (iterations count from 0):\n"
    "  --pace-us N           pause N microseconds after each iteration\n"
    "  --pause-every N --pause-ms M\n"
    "                        all ranks compute for M ms after every N iterations\n"
    "  --checkpoint-every N --checkpoint-ms M\n"
    "                        rank 0 writes to disk for M ms after every N iterations while the others go on\n"
    "  --slow-rank R --slow-every N --slow-ms M\n"
    "                        rank R computes for M ms longer after every N iterations\n"
    "  --slow-in-turn 1      not only rank R: rank 0 in iteration 0, rank 1 in iteration 1, and so on\n"
    "  --late-ms M           the last rank comes M ms late to the init, the others in between\n"
    "  --checkpoint-by N     0: itself; 1: a child process; 2: it sends to a server; 3: it writes to memory (/dev/shm)\n"
    "  --warm-up-ms M        the last rank comes M ms late to the first iteration, the others in between\n"
    "  --skip-rank R --skip-iteration I\n"
    "                        rank R leaves out one AllReduce of iteration I, and then waits for its peers for ever\n"
    "  --instead N           0: it waits; 1: it executes another program; 2: it takes its communicator apart and\n"
    "                        lives on, and no rank makes another call\n"
    "\n"
    "example: RANK=0 WORLD_SIZE=1 railscope-workload --pattern inference --seconds 1 --id-file /tmp/id\n"
    "status: 0 fine, 1 wrong results or an NCCL error, 2 wrong usage, 3 told to end while waiting for other ranks\n";

static atomic_bool stop_requested, finished;
static struct options options = {.seconds = -1, .iterations = -1, .seed = 1, .verify = true, .nranks = 1,
                                 .moments = {.skip_rank = -1, .skip_iteration = -1}};

static void usage(const char *problem) {
    fprintf(stderr, "railscope-workload: %s (see --help)\n", problem);
    exit(EXIT_USAGE);
}

static double number_of(const char *text, const char *option) {
    char *end, problem[128];
    double number = strtod(text, &end);
    if (end != text && *end == '\0' && number >= 0 && number < 1e15)
        return number;
    snprintf(problem, sizeof problem, "%s takes a number, not \"%.40s\"", option, text);
    usage(problem);
    return 0;
}

/* Options that are whole numbers, from the first place behind the letters. */
enum {
    OPTION_CALLS = 256,
    OPTION_BATCH,
    OPTION_PACE_US,
    OPTION_PAUSE_EVERY,
    OPTION_PAUSE_MS,
    OPTION_CHECKPOINT_EVERY,
    OPTION_CHECKPOINT_MS,
    OPTION_LATE_MS,
    OPTION_WARM_UP_MS,
    OPTION_SKIP_RANK,
    OPTION_SKIP_ITERATION,
    OPTION_INSTEAD,
    OPTION_CHECKPOINT_BY,
    OPTION_SLOW_RANK,
    OPTION_SLOW_EVERY,
    OPTION_SLOW_MS,
    OPTION_SLOW_IN_TURN,
    OPTIONS_END,
};
static int64_t *const whole_numbers[OPTIONS_END - OPTION_CALLS] = {
    &options.calls,
    &options.batch,
    &options.moments.pace_us,
    &options.moments.pause_every,
    &options.moments.pause_ms,
    &options.moments.checkpoint_every,
    &options.moments.checkpoint_ms,
    &options.moments.late_ms,
    &options.moments.warm_up_ms,
    &options.moments.skip_rank,
    &options.moments.skip_iteration,
    &options.moments.instead,
    &options.moments.checkpoint_by,
    &options.moments.slow_rank,
    &options.moments.slow_every,
    &options.moments.slow_ms,
    &options.moments.slow_in_turn,
};

static void die_with(pid_t parent) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        exit(EXIT_USAGE); /* it went before we could ask */
}

static void parse_options(int argc, char **argv) {
    static const struct option known[] = {
        {"pattern", 1, NULL, 'p'},     {"seconds", 1, NULL, 's'},           {"iterations", 1, NULL, 'i'},
        {"id-file", 1, NULL, 'u'},     {"report", 1, NULL, 'r'},            {"seed", 1, NULL, 'S'},
        {"start-file", 1, NULL, 'f'},  {"init-before-start", 0, NULL, 'b'}, {"verify", 0, NULL, 'v'},
        {"no-verify", 0, NULL, 'n'},   {"die-with", 1, NULL, 'd'},          {"bytes", 1, NULL, 'B'},
        {"help", 0, NULL, 'h'},        {"no-destroy", 0, NULL, 'D'},
        {"linger", 0, NULL, 'L'},      {"shape", 1, NULL, 'G'},             {"replicas-apart", 0, NULL, 'R'},
        {"calls", 1, NULL, OPTION_CALLS},
        {"batch", 1, NULL, OPTION_BATCH},
        {"pace-us", 1, NULL, OPTION_PACE_US},
        {"pause-every", 1, NULL, OPTION_PAUSE_EVERY},
        {"pause-ms", 1, NULL, OPTION_PAUSE_MS},
        {"checkpoint-every", 1, NULL, OPTION_CHECKPOINT_EVERY},
        {"checkpoint-ms", 1, NULL, OPTION_CHECKPOINT_MS},
        {"late-ms", 1, NULL, OPTION_LATE_MS},
        {"warm-up-ms", 1, NULL, OPTION_WARM_UP_MS},
        {"skip-rank", 1, NULL, OPTION_SKIP_RANK},
        {"skip-iteration", 1, NULL, OPTION_SKIP_ITERATION},
        {"instead", 1, NULL, OPTION_INSTEAD},
        {"checkpoint-by", 1, NULL, OPTION_CHECKPOINT_BY},
        {"slow-rank", 1, NULL, OPTION_SLOW_RANK},
        {"slow-every", 1, NULL, OPTION_SLOW_EVERY},
        {"slow-ms", 1, NULL, OPTION_SLOW_MS},
        {"slow-in-turn", 1, NULL, OPTION_SLOW_IN_TURN},
        {NULL, 0, NULL, 0},
    };
    const char *rank = getenv("RANK"), *size = getenv("WORLD_SIZE");
    for (int each, place = 0; (each = getopt_long(argc, argv, "", known, &place)) != -1;) {
        if (each >= OPTION_CALLS && each < OPTIONS_END) {
            char name[64];
            snprintf(name, sizeof name, "--%s", known[place].name);
            *whole_numbers[each - OPTION_CALLS] = (int64_t)number_of(optarg, name);
            continue;
        }
        switch (each) {
        case 'p': options.pattern = optarg; break;
        case 's': options.seconds = number_of(optarg, "--seconds"); break;
        case 'i': options.iterations = (int64_t)number_of(optarg, "--iterations"); break;
        case 'u': options.id_file = optarg; break;
        case 'r': options.report = optarg; break;
        case 'S': options.seed = (uint64_t)number_of(optarg, "--seed"); break;
        case 'f': options.start_file = optarg; break;
        case 'b': options.init_before_start = true; break;
        case 'v': options.verify = true; break;
        case 'n': options.verify = false; break;
        case 'd': die_with((pid_t)number_of(optarg, "--die-with")); break;
        case 'B': options.bytes = (size_t)number_of(optarg, "--bytes") & ~(size_t)1; break; /* of bfloat16 */
        case 'L': options.linger = true; break;
        case 'D': options.no_destroy = true; break;
        case 'G': options.shape = optarg; break;
        case 'R': options.replicas_apart = true; break;
        case 'h': fputs(help, stdout); exit(0);
        default: exit(EXIT_USAGE);
        }
    }
    if (rank != NULL)
        options.rank = (int)number_of(rank, "RANK");
    if (size != NULL)
        options.nranks = (int)number_of(size, "WORLD_SIZE");
    if (optind != argc)
        usage("unexpected argument");
    if (options.pattern == NULL || pattern_named(options.pattern) == NULL)
        usage("--pattern is one of ddp, tensor-parallel, moe, inference, gpt, mixed, idle");
    if ((options.seconds < 0) == (options.iterations < 0))
        usage("give one of --seconds and --iterations");
    if (options.id_file == NULL)
        usage("--id-file is missing");
    const struct moments *moments = &options.moments;
    if ((moments->skip_rank < 0) != (moments->skip_iteration < 0))
        usage("give both of --skip-rank and --skip-iteration, or neither");
    if (moments->skip_rank >= 0 && !pattern_named(options.pattern)->has_all_reduce)
        usage("--skip-rank leaves out an AllReduce: take a pattern that has one alone, such as ddp");
    if ((moments->pause_every > 0) != (moments->pause_ms > 0))
        usage("give both of --pause-every and --pause-ms, or neither");
    if ((moments->checkpoint_every > 0) != (moments->checkpoint_ms > 0))
        usage("give both of --checkpoint-every and --checkpoint-ms, or neither");
    if (options.rank >= options.nranks)
        usage("RANK must be below WORLD_SIZE");
    const char *problem = strcmp(options.pattern, "gpt") == 0 ? gpt_problem(&options) : NULL;
    if (problem != NULL)
        usage(problem);
}

static double now_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void sleep_milliseconds(long milliseconds) {
    nanosleep(&(struct timespec){.tv_nsec = milliseconds * 1000000}, NULL);
}

/* SIGTERM asks for a common end.  If the other ranks do not answer, the report says what was called so far. */
static void *watch_signals(void *argument) {
    sigset_t *signals = argument;
    int number;
    sigwait(signals, &number);
    atomic_store(&stop_requested, true);
    for (int waited = 0; waited < GRACE_MILLISECONDS && !atomic_load(&finished); waited += 10)
        sleep_milliseconds(10);
    if (atomic_exchange(&finished, true))
        return NULL;
    report_write(&options, true);
    _exit(EXIT_INTERRUPTED);
}

static void end_early(void) {
    if (!atomic_exchange(&finished, true)) {
        report_write(&options, true);
        _exit(EXIT_INTERRUPTED);
    }
    pause(); /* the other thread is about to end the process */
}

static void wait_for_start(void) {
    while (options.start_file != NULL && access(options.start_file, F_OK) != 0) {
        if (atomic_load(&stop_requested))
            end_early();
        sleep_milliseconds(2);
    }
}

static void id_publish(const ncclUniqueId *id) {
    char path[4096];
    snprintf(path, sizeof path, "%s.%d", options.id_file, (int)getpid());
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0 || write(fd, id, sizeof *id) != sizeof *id || close(fd) != 0 || rename(path, options.id_file) != 0) {
        report_error("cannot write %s: %s", options.id_file, strerror(errno));
        exit(EXIT_WRONG);
    }
}

static void id_await(ncclUniqueId *id) {
    for (double give_up = now_seconds() + MEET_SECONDS; now_seconds() < give_up; sleep_milliseconds(2)) {
        int fd = open(options.id_file, O_RDONLY | O_CLOEXEC);
        if (atomic_load(&stop_requested))
            end_early();
        if (fd < 0)
            continue;
        ssize_t got = read(fd, id, sizeof *id);
        close(fd);
        if (got == sizeof *id)
            return;
    }
    report_error("rank 0 did not write %s within %d s", options.id_file, MEET_SECONDS);
    exit(EXIT_WRONG);
}

static struct party *meet(void) {
    ncclUniqueId id;
    ncclComm_t comm;
    if (options.rank == 0) {
        must(ncclGetUniqueId(&id), "ncclGetUniqueId");
        id_publish(&id);
    } else {
        id_await(&id);
    }
    moments_before_init(&options.moments, options.rank, options.nranks);
    must(ncclCommInitRank(&comm, options.nranks, id, options.rank), "ncclCommInitRank");
    return party_make(comm);
}

/* Iterations to make next; all ranks get the same answer. */
static int64_t agree(const struct job *job, int64_t proposal) {
    if (atomic_load(&stop_requested))
        proposal = 0;
    must(workload_agree_minimum(job->world->comm, &proposal), "agreeing with the other ranks");
    return proposal;
}

static void run_together(struct job *job, const struct pattern *pattern) {
    double end = options.seconds >= 0 ? now_seconds() + options.seconds : 0;
    int64_t left = options.iterations >= 0 ? options.iterations : INT64_MAX;
    int64_t batch = options.batch > 0 ? options.batch : 1;
    for (;;) {
        bool over = left == 0 || (options.seconds >= 0 && now_seconds() >= end);
        int64_t proposal = over ? 0 : batch < left ? batch : left;
        int64_t now = agree(job, options.rank == 0 ? proposal : INT64_MAX);
        if (now == 0)
            return;
        double began = now_seconds();
        for (int64_t i = 0; i < now; i++, job->iteration++) {
            if (moments_at(&options.moments, INSTEAD_LEAVE, job->iteration)) {
                if (options.rank == options.moments.skip_rank)
                    destroy(job->world);
                compute_for_ever();
            }
            moments_before(&options.moments, options.rank, options.nranks, job->iteration);
            pattern->iterate(job, job->iteration);
            moments_after(&options.moments, options.rank, options.nranks, job->iteration);
        }
        double took = now_seconds() - began;
        left -= now;
        if (options.batch > 0)
            continue;
        if (took < 0.025)
            batch *= 2;
        else if (took > 0.1 && batch > 1)
            batch /= 2;
    }
}

/* Without any traffic, not even about the end. */
static void run_idle(struct job *job, const struct pattern *pattern) {
    double end = now_seconds() + options.seconds;
    for (uint64_t i = 0; !atomic_load(&stop_requested); i++) {
        if (options.seconds >= 0 ? now_seconds() >= end : i >= (uint64_t)options.iterations)
            return;
        pattern->iterate(job, i);
    }
}

int main(int argc, char **argv) {
    sigset_t signals;
    pthread_t watcher;
    parse_options(argc, argv);
    report_options(&options);
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    pthread_sigmask(SIG_BLOCK, &signals, NULL);
    if (pthread_create(&watcher, NULL, watch_signals, &signals) != 0) {
        report_error("cannot start a thread");
        return EXIT_WRONG;
    }

    const struct pattern *pattern = pattern_named(options.pattern);
    struct job job = {.options = &options, .stream = workload_stream_create(),
                      .other_stream = workload_stream_create()};
    if (options.init_before_start) {
        job.world = meet();
        wait_for_start();
    } else {
        wait_for_start();
        job.world = meet();
    }
    pattern->prepare(&job);
    report_began();
    if (strcmp(options.pattern, "idle") == 0)
        run_idle(&job, pattern);
    else
        run_together(&job, pattern);
    report_ended();
    pattern->finish(&job);
    if (!options.no_destroy) {
        must(ncclCommFinalize(job.world->comm), "ncclCommFinalize");
        must(ncclCommDestroy(job.world->comm), "ncclCommDestroy");
    }
    if (atomic_exchange(&finished, true))
        pause();
    report_write(&options, false);
    return report_has_errors() ? EXIT_WRONG : 0;
}
