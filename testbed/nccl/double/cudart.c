/* libcudart.so.12 of the test double: what a job calls by the CUDA runtime's names.
 *
 * NCCL brings a runtime of its own; a program around it has this one as a shared library, and tools that
 * observe programs find it among their mappings.  Every function has a body of its own and goes on to
 * libcuda.so.1 (cuda.c), as NVIDIA's does.
 */
#include <stddef.h>

struct stream;
struct event;
struct graph;

#define FORWARD(name, target, parameters, arguments)                                                                   \
    int target parameters;                                                                                             \
    __attribute__((noinline)) int name parameters {                                                                    \
        return target arguments;                                                                                       \
    }

int cuStreamCreate(struct stream **stream, unsigned flags);
int cuEventCreate(struct event **event, unsigned flags);

int cudaStreamCreate(struct stream **stream) {
    return cuStreamCreate(stream, 0);
}

int cudaStreamCreateWithFlags(struct stream **stream, unsigned flags) {
    return cuStreamCreate(stream, flags);
}

int cudaEventCreate(struct event **event) {
    return cuEventCreate(event, 0);
}

int cudaEventCreateWithFlags(struct event **event, unsigned flags) {
    return cuEventCreate(event, flags);
}

FORWARD(cudaStreamDestroy, cuStreamDestroy_v2, (struct stream * stream), (stream))
FORWARD(cudaStreamSynchronize, cuStreamSynchronize, (struct stream * stream), (stream))
FORWARD(cudaStreamQuery, cuStreamQuery, (struct stream * stream), (stream))
FORWARD(cudaStreamWaitEvent, cuStreamWaitEvent, (struct stream * stream, struct event *event, unsigned flags),
        (stream, event, flags))
FORWARD(cudaEventDestroy, cuEventDestroy_v2, (struct event * event), (event))
FORWARD(cudaEventRecord, cuEventRecord, (struct event * event, struct stream *stream), (event, stream))
FORWARD(cudaEventRecordWithFlags, cuEventRecordWithFlags, (struct event * event, struct stream *stream, unsigned flags),
        (event, stream, flags))
FORWARD(cudaEventQuery, cuEventQuery, (struct event * event), (event))
FORWARD(cudaEventSynchronize, cuEventSynchronize, (struct event * event), (event))
FORWARD(cudaEventElapsedTime, cuEventElapsedTime, (float *milliseconds, struct event *start, struct event *end),
        (milliseconds, start, end))
FORWARD(cudaStreamBeginCapture, cuStreamBeginCapture_v2, (struct stream * stream, int mode), (stream, mode))
FORWARD(cudaStreamEndCapture, cuStreamEndCapture, (struct stream * stream, struct graph **graph), (stream, graph))
FORWARD(cudaGraphInstantiate, cuGraphInstantiateWithFlags,
        (struct graph * *executable, struct graph *graph, unsigned long long flags), (executable, graph, flags))
FORWARD(cudaGraphLaunch, cuGraphLaunch, (struct graph * executable, struct stream *stream), (executable, stream))
FORWARD(cudaLaunchHostFunc, cuLaunchHostFunc, (struct stream * stream, void (*function)(void *), void *argument),
        (stream, function, argument))
FORWARD(cudaGraphExecDestroy, cuGraphExecDestroy, (struct graph * executable), (executable))
FORWARD(cudaGraphDestroy, cuGraphDestroy, (struct graph * graph), (graph))
