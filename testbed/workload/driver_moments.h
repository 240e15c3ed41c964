/* What happens in a job's life between its calls; shared with the driver of the real NCCL (testbed/nccl/double). */
#ifndef RAILSCOPE_DRIVER_MOMENTS_H
#define RAILSCOPE_DRIVER_MOMENTS_H

#include <stdbool.h>
#include <stdint.h>

/* What a rank does instead of the call that it leaves out. */
enum instead {
    INSTEAD_WAIT,    /* waits for ever, as for a message outside NCCL */
    INSTEAD_REPLACE, /* executes another program, which knows nothing of the job */
    INSTEAD_LEAVE,   /* takes its communicator apart and lives on; the others compute and call nothing more */
    INSTEAD_RECEIVE, /* each rank receives from another and sends to it afterwards: with the real NCCL only */
};

/* Who writes a checkpoint, and where to. */
enum writer { WRITER_SELF, WRITER_CHILD, WRITER_UPLOAD, WRITER_MEMORY };

/* All zero (but skip_rank and skip_iteration: negative) for a job that does nothing but calls. */
struct moments {
    int64_t pace_us;                         /* pause after each iteration */
    int64_t pause_every, pause_ms;           /* all ranks compute */
    int64_t checkpoint_every, checkpoint_ms; /* rank 0 computes and writes to disk */
    int64_t late_ms;                         /* how late the last rank comes to the init */
    int64_t checkpoint_by;                   /* enum writer */
    int64_t warm_up_ms;                      /* how late the last rank comes to the first iteration */
    int64_t skip_rank, skip_iteration;       /* who leaves out one call, and when */
    int64_t instead;                         /* enum instead */
    int64_t slow_rank, slow_every, slow_ms;  /* who computes for longer */
    int64_t slow_in_turn;                    /* not slow_rank alone, but each in its iteration */
};

void moments_before_init(const struct moments *moments, int rank, int ranks);
void moments_before(const struct moments *moments, int rank, int ranks, uint64_t iteration);
void moments_after(const struct moments *moments, int rank, int ranks, uint64_t iteration);
/* Whether this rank is to leave out its next call; it then turns away. */
bool moments_skip(const struct moments *moments, int rank, uint64_t iteration);
_Noreturn void wait_for_ever(void);
_Noreturn void moments_turn_away(const struct moments *moments);
/* Whether something else comes before this iteration, of any rank. */
bool moments_at(const struct moments *moments, enum instead instead, uint64_t iteration);
_Noreturn void compute_for_ever(void);

#endif
