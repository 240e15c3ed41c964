/* What happens in a job's life between its calls: computing, checkpoints, a slow first step, and a call left out. */
#include "driver_moments.h"

#include <stdio.h>
#include <stdlib.h>
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
static void checkpoint(int64_t milliseconds) {
    double end = now_seconds() + (double)milliseconds * 1e-3;
    FILE *file = tmpfile();
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

void moments_after(const struct moments *moments, int rank, uint64_t iteration) {
    pause_us(moments->pace_us);
    if (every(moments->pause_every, iteration))
        pause_us(moments->pause_ms * 1000);
    if (rank == 0 && every(moments->checkpoint_every, iteration))
        checkpoint(moments->checkpoint_ms);
}

bool moments_skip(const struct moments *moments, int rank, uint64_t iteration) {
    return moments->skip_rank == rank && moments->skip_iteration == (int64_t)iteration;
}

/* As a rank waits that believes its peers to be elsewhere: for a message outside NCCL that never comes. */
_Noreturn void wait_for_ever(void) {
    for (;;)
        pause();
}
