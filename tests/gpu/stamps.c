/* A profiler plugin for NCCL that asks for kernels' time stamps and does nothing with them.
 *
 * NCCL's kernels write when they began and ended (globaltimer, ns) into memory of the host while a profiler has asked
 * for KernelCh events.  Whether somebody else can read them there is what tests/gpu/checks/questions.py tries.
 * Interface: version 4 of NCCL's profiler plugins (2.27 and newer also take it), written after its documentation.
 */
#include <stdint.h>

enum { COLLECTIVES = 1 << 1, POINT_TO_POINT = 1 << 2, KERNEL_CHANNELS = 1 << 6 };

static int handle; /* NCCL makes no events below one that has no handle */

static int begin(void **context, int *wanted, const char *name, uint64_t hash, int nodes, int ranks, int rank,
                 void *log) {
    (void)name, (void)hash, (void)nodes, (void)ranks, (void)rank, (void)log;
    *context = &handle;
    *wanted = COLLECTIVES | POINT_TO_POINT | KERNEL_CHANNELS;
    return 0;
}

static int start_event(void *context, void **event, void *description) {
    (void)context, (void)description;
    *event = &handle;
    return 0;
}

static int stop_event(void *event) {
    (void)event;
    return 0;
}

static int record_event_state(void *event, int state, void *arguments) {
    (void)event, (void)state, (void)arguments;
    return 0;
}

static int finalize(void *context) {
    (void)context;
    return 0;
}

__attribute__((visibility("default"))) const struct {
    const char *name;
    int (*init)(void **, int *, const char *, uint64_t, int, int, int, void *);
    int (*start_event)(void *, void **, void *);
    int (*stop_event)(void *);
    int (*record_event_state)(void *, int, void *);
    int (*finalize)(void *);
} ncclProfiler_v4 = {"railscope-stamps", begin, start_event, stop_event, record_event_state, finalize};
