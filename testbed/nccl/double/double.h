/* The CUDA test double: what its files share.
 *
 * libcuda-double.so lets the real libnccl run on a machine without GPU or driver, so that a tool that
 * observes NCCL can be tested on NCCL itself.  It is no CUDA: device memory is host memory, a stream is
 * a queue with a thread, and a kernel launch of NCCL is played on the CPU.  Everything it does not know
 * it says on stderr, and what it cannot play ends the process with the name of what was asked for.
 *
 *   patch.c    finds libnccl's statically linked CUDA runtime and redirects it here
 *   patience.c threads that ask a socket in vain sleep, where a job need not spin
 *   symbols.c  names and addresses in libnccl's .symtab
 *   runtime.c  the runtime's functions: memory, devices, pointers
 *   streams.c  streams, events, what waits for what
 *   capture.c  capturing a stream's work in a graph
 *   graph.c    a captured graph's life: replays and what it takes care of
 *   driver_api.c  the few driver functions that NCCL asks for by name
 *   kernel.c   takes a launch apart and runs its channels
 *   ring.c     the chunk order of NCCL's ring collectives
 *   tree.c     the chunk order of its tree AllReduce
 *   p2p.c      the chunk order of send and receive
 *   passage.c  a chunk's way through this rank
 *   simple.c   the same by NCCL's Simple protocol
 *   ll.c       the same by its LL protocol
 *   reduce.c   arithmetic on NCCL's data types
 *
 * Struct layouts come from the library's own DWARF (layout.h, made by make-layout.py).
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "layout.h"

/* ---- complaints (patch.c) ---- */

/* Say why on stderr and abort: a double that guesses would let a test hang or pass for nothing. */
_Noreturn void double_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* A line on stderr when CUDA_DOUBLE_LOG is set. */
void double_log(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* ---- libnccl's symbols (symbols.c) ---- */

/* Read the symbol table of the library in this file, loaded at this address; aborts when it cannot, or
 * when its build-id is not the one that layout.h was made from. */
void symbols_load(const char *path, uintptr_t load_address);
/* The address of a symbol in this process, or NULL. */
void *symbol_address(const char *name);
/* The name of the function at this address, or NULL. */
const char *symbol_name(const void *address);
/* Call back for every local function of the CUDA runtime. */
void symbols_each_cuda(void (*found)(const char *name, void *address, size_t size_bytes));

/* ---- the imaginary GPU (runtime.c) ---- */

/* Which of the host's GPUs this process sees as its only one: CUDA_VISIBLE_DEVICES, or 0. */
int gpu_index(void);

/* ---- replacements ---- */

struct replacement {
    const char *name;
    void *function;
};
extern const struct replacement runtime_replacements[]; /* runtime.c; ends with an empty one */
extern const struct replacement stream_replacements[];  /* streams.c */
extern const struct replacement capture_replacements[]; /* capture.c */
extern const struct replacement graph_replacements[];   /* graph.c */
extern const struct replacement driver_replacements[];  /* driver_api.c: by cudaGetDriverEntryPoint */

enum {
    CUDA_SUCCESS = 0,
    CUDA_INVALID_VALUE = 1,
    CUDA_NOT_READY = 600,
    CUDA_NOT_SUPPORTED = 801,
    CUDA_CAPTURE_UNSUPPORTED = 900,
    CUDA_CAPTURE_ISOLATION = 905,
    CUDA_CAPTURED_EVENT = 907
};

/* ---- streams (streams.c) ---- */

struct stream;
struct event;
struct kernel;
struct capture;

enum task_kind { TASK_COPY, TASK_FILL, TASK_CALL, TASK_KERNEL, TASK_RECORD, TASK_WAIT };

/* One piece of work in a stream's queue, or in a graph. */
struct task {
    struct task *next;
    enum task_kind kind;
    void *to; /* TASK_CALL: the argument */
    const void *from;
    int value;
    size_t size_bytes;
    void (*function)(void *);
    struct kernel *kernel;
    struct event *event;
    uint64_t record;
};

/* Perform the task after everything that the stream already holds, or add it to the graph being captured. */
void stream_submit(struct stream *stream, struct task task);
/* What the stream, or the event's latest record, captures. */
struct capture *stream_capture(struct stream *stream);
struct capture *event_capture(struct event *event);
/* The event's record, and the wait for its latest one, as tasks of the stream. */
int event_record(struct event *event, struct stream *stream);
int event_wait(struct stream *stream, struct event *event);
/* One more who needs the event, and one less. */
struct event *event_keep(struct event *event);
void event_drop(struct event *event);
/* Run function(argument) after everything that the stream already holds. */
void stream_call(struct stream *stream, void (*function)(void *), void *argument);
/* Play the kernel on the stream's thread; the stream owns it from now on. */
void stream_launch(struct stream *stream, struct kernel *kernel);

/* ---- captures (capture.c) ---- */

struct graph;
struct node;

/* A place in a graph that is being captured: where a stream, or the record of an event, has got to. */
struct capture {
    struct graph *graph; /* NULL: nothing is captured here */
    uint64_t id;         /* of the graph: its address may come again */
    struct node **frontier;
    size_t frontier_count;
    struct capture *next; /* streams only: others of the same graph */
};
/* Add the task to the graph that the stream captures; false when it captures none. */
bool capture_task(struct capture *stream, const struct task *task);
/* The event's latest record stands where the stream stands; a stream that captures nothing clears it. */
void capture_record(struct capture *event, const struct capture *stream);
/* The stream waits for the event, whose latest record was captured: it joins that capture. */
int capture_wait(struct capture *stream, const struct capture *event);
bool capture_active(struct capture *stream);
void capture_leave_stream(struct capture *stream);
void capture_leave_event(struct capture *event);

/* ---- kernels (kernel.c) ---- */

/* Take over a launch of libnccl: the mangled name of its kernel and its arguments, which are copied. */
struct kernel *kernel_new(const char *mangled, const void *arguments, size_t size_bytes);
/* Play it until its last channel is done, or until the communicator's abort flag is up. */
void kernel_run(struct kernel *kernel);
void kernel_free(struct kernel *kernel);
const char *kernel_name(const struct kernel *kernel);
/* The same launch once more, from its beginning. */
struct kernel *kernel_again(const struct kernel *kernel);

/* ---- arithmetic (reduce.c) ---- */

enum element { ELEMENT_U8, ELEMENT_U32, ELEMENT_U64, ELEMENT_F16, ELEMENT_F32, ELEMENT_F64, ELEMENT_BF16, ELEMENTS };
enum reduction { REDUCE_NONE, REDUCE_SUM, REDUCE_PROD, REDUCE_MINMAX, REDUCE_PREMULSUM, REDUCE_SUMPOSTDIV };

/* What one device function of NCCL computes; NCCL maps signed sums to unsigned ones of the same width. */
struct arithmetic {
    enum reduction reduction;
    enum element element;
    uint64_t argument; /* NCCL's redOpArg: a scalar, a divisor, or the mask that tells min from max */
};
size_t element_bytes(enum element element);
/* to[i] = the local input from[i] as it enters the reduction (scaled for PREMULSUM). */
void reduce_input(const struct arithmetic *how, void *to, const void *from, size_t count);
/* to[i] = received[i] combined with input[i], which reduce_input has seen already. */
void reduce_pair(const struct arithmetic *how, void *to, const void *received, const void *input, size_t count);
/* The last step of a reduction, in place (the division for SUMPOSTDIV). */
void reduce_finish(const struct arithmetic *how, void *values, size_t count);

/* ---- passages (passage.c) ---- */

enum protocol { PROTOCOL_LL = 0, PROTOCOL_SIMPLE = 2 }; /* as NCCL numbers them: indices of its buffers */
enum { NCCL_STEPS = 8, FAN_MAX = 3 };

/* One chunk's passage through this rank.  The data comes from `input`, from the neighbours before, or
 * from both, which are then reduced; it goes to `output`, to the neighbours behind, or to both. */
struct chunk {
    const void *input; /* NULL: only what is received */
    void *output;      /* NULL: only what is sent */
    size_t count;      /* elements; 0 still moves the step counters */
    bool receive, send;
    bool finish; /* the sum is complete here */
};

/* One end of a connection to another rank. */
struct end {
    struct ncclConnInfo *connection;
    uint64_t step; /* counts the connection's slots used so far */
};

/* The transfers of one channel through this rank, in order: along a ring, up or down a tree, to a peer. */
struct passage {
    enum protocol protocol;
    struct end from[FAN_MAX], to[FAN_MAX];
    int from_count, to_count;
    struct arithmetic how;
    int slices_per_chunk, steps_per_slice; /* Simple only, as is step_elements */
    size_t step_elements;                  /* NCCL's stepSize, from which it derives the slices of a chunk */
    size_t step_lines;                     /* LL only: lines in a slot */
    struct chunk chunk;                    /* the one in flight */
    bool in_chunk;
    int slice;       /* Simple: slices passed */
    size_t position; /* elements passed */
};
void passage_begin(struct passage *passage);
/* Move the chunk in flight as far as the neighbours allow; true when all of it has passed. */
bool passage_chunk(struct passage *passage, const struct chunk *chunk, bool *moved);
/* Keep the step counters in the connections, where the next kernel finds them. */
void passage_end(struct passage *passage);
/* Combine `count` elements at the passage's position, with what each neighbour sent, into the output and
 * into `sent`, of which the first may be NULL when there is an output. */
void passage_combine(const struct passage *passage, char *const *received, char *const *sent, size_t count);
/* The two protocols' part of passage_chunk. */
bool simple_chunk(struct passage *passage, bool *moved);
bool ll_chunk(struct passage *passage, bool *moved);

/* ---- collectives (ring.c, tree.c) ---- */

enum collective { ALLREDUCE, ALLGATHER, REDUCESCATTER, BROADCAST, REDUCE, COLLECTIVES };
enum leg { LEG_RING, LEG_TREE_ROOT, LEG_TREE_UP, LEG_TREE_DOWN };

struct collective_work {
    enum collective collective;
    enum leg leg;
    const char *input;
    char *output;
    size_t element_size;
    size_t count;       /* elements of the whole work */
    size_t part_offset; /* this channel's part, in elements */
    size_t part_count;
    size_t chunk_count;
    const int32_t *ranks; /* ring: user ranks in ring order, this one first */
    int ring_index, rank_count, root;
    int children; /* tree */
};
int ring_slices_per_chunk(enum collective collective);
int ring_steps_per_slice(enum collective collective);
/* The index-th chunk of this rank; false after the last one. */
bool ring_chunk(const struct collective_work *work, size_t index, struct chunk *chunk);
bool tree_chunk(const struct collective_work *work, size_t index, struct chunk *chunk);

/* ---- send and receive (p2p.c) ---- */

struct p2p_work {
    char *buffer;
    size_t bytes, chunk_bytes;
    bool send;
    enum protocol protocol;
};
/* One direction of a point-to-point work on one channel; false when the channel has no share in it.
 * *copy is set when the rank sends to itself: then the bytes have been copied and nothing is left. */
bool p2p_open(const struct ncclDevWorkP2p *work, bool send, int channel, int rank, const char *kernel,
              struct p2p_work *share, bool *copy);
bool p2p_chunk(const struct p2p_work *share, size_t index, struct chunk *chunk);
