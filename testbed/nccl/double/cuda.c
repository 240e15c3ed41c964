/* libcuda.so.1 of the test double: the driver's names for the functions of streams, events and graphs.
 *
 * Each has a body of its own, which calls the double's function for the same thing, so that both act on
 * the streams that NCCL's kernels are played on.
 */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

struct stream;
struct event;
struct graph;

extern void *cuda_double_function(const char *name); /* patch.c */

static void *find(const char *name) {
    void *function = cuda_double_function(name);
    if (function == NULL) {
        fprintf(stderr, "cuda-double: libcuda.so.1: the double has no %s\n", name);
        abort();
    }
    return function;
}

#define FORWARD(name, target, parameters, arguments)                                                                   \
    __attribute__((noinline)) int name parameters {                                                                    \
        static int(*function) parameters;                                                                              \
        if (function == NULL)                                                                                          \
            function = (int(*) parameters)find(target);                                                                \
        return function arguments;                                                                                     \
    }

FORWARD(cuStreamCreate, "cudaStreamCreateWithFlags", (struct stream * *stream, unsigned flags), (stream, flags))
FORWARD(cuStreamDestroy_v2, "cudaStreamDestroy", (struct stream * stream), (stream))
FORWARD(cuStreamSynchronize, "cudaStreamSynchronize", (struct stream * stream), (stream))
FORWARD(cuStreamQuery, "cudaStreamQuery", (struct stream * stream), (stream))
FORWARD(cuStreamWaitEvent, "cudaStreamWaitEvent", (struct stream * stream, struct event *event, unsigned flags),
        (stream, event, flags))
FORWARD(cuEventCreate, "cudaEventCreateWithFlags", (struct event * *event, unsigned flags), (event, flags))
FORWARD(cuEventDestroy_v2, "cudaEventDestroy", (struct event * event), (event))
FORWARD(cuEventRecord, "cudaEventRecord", (struct event * event, struct stream *stream), (event, stream))
FORWARD(cuEventRecordWithFlags, "cudaEventRecordWithFlags",
        (struct event * event, struct stream *stream, unsigned flags), (event, stream, flags))
FORWARD(cuEventQuery, "cudaEventQuery", (struct event * event), (event))
FORWARD(cuEventSynchronize, "cudaEventSynchronize", (struct event * event), (event))
FORWARD(cuEventElapsedTime, "cudaEventElapsedTime",
        (float *milliseconds, struct event *start, struct event *end), (milliseconds, start, end))
FORWARD(cuStreamBeginCapture_v2, "cudaStreamBeginCapture", (struct stream * stream, int mode), (stream, mode))
FORWARD(cuStreamEndCapture, "cudaStreamEndCapture", (struct stream * stream, struct graph **graph), (stream, graph))
FORWARD(cuGraphInstantiateWithFlags, "cudaGraphInstantiate",
        (struct graph * *executable, struct graph *graph, unsigned long long flags), (executable, graph, flags))
FORWARD(cuGraphLaunch, "cudaGraphLaunch", (struct graph * executable, struct stream *stream), (executable, stream))
FORWARD(cuLaunchHostFunc, "cudaLaunchHostFunc", (struct stream * stream, void (*called)(void *), void *argument),
        (stream, called, argument))
FORWARD(cuGraphExecDestroy, "cudaGraphExecDestroy", (struct graph * executable), (executable))
FORWARD(cuGraphDestroy, "cudaGraphDestroy", (struct graph * graph), (graph))
