/* What happens in a job's life between its calls: computing, checkpoints, a slow first step, and a call left out. */
#ifndef _GNU_SOURCE /* the driver of the real NCCL is compiled with it */
#define _GNU_SOURCE
#endif
#include "driver_moments.h"

#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { CHECKPOINT_PIECE_BYTES = 1 << 20, CHECKPOINT_FILE_BYTES = 32 << 20 };

static void pause_us(int64_t microseconds) {
    struct timespec left = {microseconds / 1000000, microseconds % 1000000 * 1000};
    if (microseconds > 0)
        nanosleep(&left, NULL);
}

static double now_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Serialise and write a state dictionary: the CPU and the disk are busy, and nothing sleeps. */
static void write_for(FILE *file, int64_t milliseconds) {
    double end = now_seconds() + (double)milliseconds * 1e-3;
    uint64_t *piece = malloc(CHECKPOINT_PIECE_BYTES), value = 1;
    size_t written = 0;
    if (file == NULL || piece == NULL)
        abort();
    while (now_seconds() < end) {
        for (size_t i = 0; i < CHECKPOINT_PIECE_BYTES / sizeof *piece; i++)
            piece[i] = value = value * 0x5851f42d4c957f2dull + 1; /* Knuth's MMIX generator */
        written += fwrite(piece, 1, CHECKPOINT_PIECE_BYTES, file);
        if (written < CHECKPOINT_FILE_BYTES)
            continue;
        fdatasync(fileno(file));
        rewind(file);
        written = 0;
    }
    free(piece);
    fclose(file);
}

/* A child process, as a checkpoint engine forks one: the rank sleeps until it has ended. */
static void in_child(int64_t milliseconds) {
    pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        write_for(tmpfile(), milliseconds);
        _exit(0);
    }
    while (waitpid(child, NULL, 0) < 0 && errno == EINTR)
        ;
}

/* An address of this host that is not the loopback's. */
static struct sockaddr_in own_address(void) {
    struct sockaddr_in found = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct ifaddrs *all = NULL;
    if (getifaddrs(&all) == 0)
        for (const struct ifaddrs *one = all; one != NULL; one = one->ifa_next)
            if (one->ifa_addr != NULL && one->ifa_addr->sa_family == AF_INET && !(one->ifa_flags & IFF_LOOPBACK))
                memcpy(&found, one->ifa_addr, sizeof found);
    freeifaddrs(all);
    return found;
}

/* To a server on this host with a port below those that the kernel gives, as storage has. */
static void upload(int64_t milliseconds) {
    struct sockaddr_in address = own_address();
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), yes = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    int port = 9000;
    do
        address.sin_port = htons((uint16_t)port);
    while (bind(listener, (struct sockaddr *)&address, sizeof address) != 0 && ++port < 9100);
    pid_t server = listen(listener, 1) == 0 ? fork() : -1;
    static char bytes[256 << 10];
    if (server == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        int taken = accept(listener, NULL, NULL);
        while (recv(taken, bytes, sizeof bytes, 0) > 0)
            ;
        _exit(0);
    }
    int sender = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (server < 0 || connect(sender, (struct sockaddr *)&address, sizeof address) != 0)
        abort();
    for (double end = now_seconds() + (double)milliseconds * 1e-3; now_seconds() < end; pause_us(5000))
        if (send(sender, bytes, sizeof bytes, MSG_NOSIGNAL) < 0)
            abort();
    close(sender);
    close(listener);
    while (waitpid(server, NULL, 0) < 0 && errno == EINTR)
        ;
}

/* Where memory is all that is written to, and nothing reaches storage. */
static void to_memory(int64_t milliseconds) {
    int file = open("/dev/shm", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (file < 0)
        abort();
    write_for(fdopen(file, "w"), milliseconds);
}

static void checkpoint(enum writer writer, int64_t milliseconds) {
    switch (writer) {
    case WRITER_CHILD: in_child(milliseconds); break;
    case WRITER_UPLOAD: upload(milliseconds); break;
    case WRITER_MEMORY: to_memory(milliseconds); break;
    default: write_for(tmpfile(), milliseconds);
    }
}

static bool every(int64_t period, uint64_t iteration) {
    return period > 0 && (iteration + 1) % (uint64_t)period == 0;
}

/* The others come in between. */
static void come_late(int64_t milliseconds, int rank, int ranks) {
    if (ranks > 1)
        pause_us(milliseconds * 1000 * rank / (ranks - 1));
}

void moments_before_init(const struct moments *moments, int rank, int ranks) {
    come_late(moments->late_ms, rank, ranks);
}

void moments_before(const struct moments *moments, int rank, int ranks, uint64_t iteration) {
    if (iteration == 0)
        come_late(moments->warm_up_ms, rank, ranks);
}

static bool is_slow(const struct moments *moments, int rank, int ranks, uint64_t iteration) {
    if (!every(moments->slow_every, iteration))
        return false;
    return rank == (moments->slow_in_turn ? (int64_t)(iteration % (uint64_t)ranks) : moments->slow_rank);
}

void moments_after(const struct moments *moments, int rank, int ranks, uint64_t iteration) {
    pause_us(moments->pace_us);
    if (every(moments->pause_every, iteration))
        pause_us(moments->pause_ms * 1000);
    if (rank == 0 && every(moments->checkpoint_every, iteration))
        checkpoint((enum writer)moments->checkpoint_by, moments->checkpoint_ms);
    if (is_slow(moments, rank, ranks, iteration))
        pause_us(moments->slow_ms * 1000);
}

bool moments_skip(const struct moments *moments, int rank, uint64_t iteration) {
    return moments->instead < INSTEAD_LEAVE && moments->skip_rank == rank &&
           moments->skip_iteration == (int64_t)iteration;
}

/* As a rank waits that believes its peers to be elsewhere: for a message outside NCCL that never comes. */
_Noreturn void wait_for_ever(void) {
    for (;;)
        pause();
}

_Noreturn void moments_turn_away(const struct moments *moments) {
    if (moments->instead == INSTEAD_REPLACE)
        execlp("sleep", "sleep", "3600", (char *)NULL);
    wait_for_ever();
}

bool moments_at(const struct moments *moments, enum instead instead, uint64_t iteration) {
    return moments->instead == instead && moments->skip_iteration == (int64_t)iteration;
}

/* Half of a processor's time. */
_Noreturn void compute_for_ever(void) {
    for (;;) {
        for (double end = now_seconds() + 0.005; now_seconds() < end;)
            ;
        pause_us(5000);
    }
}
