/* What an inference engine does on one host: a graph of kernels that are not NCCL's, launched and waited for again and
 * again, without a call of NCCL.
 *
 * The double has no GPU that could run them: a function of the host, captured into the graph, takes a kernel's time.
 * In the rank and from the iteration that --skip-rank and --skip-iteration say, it never ends. */
#include "driver.h"

enum { KERNEL_NS = 1000000, NEVER_NS = 100000000 };

static int64_t iteration;

static void kernel(void *unused) {
    (void)unused;
    pause_ns(KERNEL_NS);
    bool stuck = options.rank == options.moments.skip_rank && options.moments.skip_iteration >= 0 &&
                 __atomic_load_n(&iteration, __ATOMIC_RELAXED) >= options.moments.skip_iteration;
    while (stuck)
        pause_ns(NEVER_NS);
}

void inference(void) {
    struct job *job = &jobs[0];
    cudaGraph_t graph, executable;
    check_cuda(cuda.begin_capture(job->stream, 0), "cudaStreamBeginCapture");
    check_cuda(cuda.launch_host_function(job->stream, kernel, NULL), "cudaLaunchHostFunc");
    check_cuda(cuda.end_capture(job->stream, &graph), "cudaStreamEndCapture");
    check_cuda(cuda.instantiate(&executable, graph, 0), "cudaGraphInstantiate");
    for (int64_t i = 0; i < options.iterations; i++) {
        __atomic_store_n(&iteration, i, __ATOMIC_RELAXED);
        check_cuda(cuda.launch(executable, job->stream), "cudaGraphLaunch");
        finish(job);
        moments_after(&options.moments, options.rank, options.ranks, (uint64_t)i);
    }
    check_cuda(cuda.destroy_executable(executable), "cudaGraphExecDestroy");
    check_cuda(cuda.destroy_graph(graph), "cudaGraphDestroy");
}
