/* A captured graph's life: replays, nodes added by hand, objects in its care.
 *
 * A replay puts the nodes one by one into the queue of the stream that it is launched into, in the order
 * of the capture.  A graph lives as long as its handle, its executable copies and the replays under way;
 * then the objects that NCCL gave into its care are destroyed, which is how NCCL learns that its plan is
 * free.
 */
#include <stdlib.h>
#include <string.h>

#include "graph.h"

enum { MOVE = 1 };

struct object {
    void *argument;
    void (*destroy)(void *);
    unsigned references;
};

/* ---- a graph's life ---- */

static void drop_object(struct object *object, unsigned references) {
    pthread_mutex_lock(&capture_lock);
    object->references -= references;
    bool last = object->references == 0;
    pthread_mutex_unlock(&capture_lock);
    if (!last)
        return;
    object->destroy(object->argument);
    free(object);
}

static void free_node(struct node *node) {
    struct task *task = &node->task;
    if (task->kind == TASK_KERNEL)
        kernel_free(task->kernel);
    if (task->kind == TASK_RECORD || task->kind == TASK_WAIT)
        event_drop(task->event);
    free(node);
}

static void drop_graph(void *argument) {
    struct graph *graph = argument;
    pthread_mutex_lock(&capture_lock);
    bool last = --graph->references == 0;
    pthread_mutex_unlock(&capture_lock);
    if (!last)
        return;
    for (size_t i = 0; i < graph->node_count; i++)
        free_node(graph->nodes[i]);
    for (size_t i = 0; i < graph->object_count; i++)
        drop_object(graph->objects[i], 1);
    free(graph->nodes);
    free(graph->objects);
    free(graph);
}

static void keep_graph(struct graph *graph) {
    pthread_mutex_lock(&capture_lock);
    graph->references++;
    pthread_mutex_unlock(&capture_lock);
}

static int do_graph_destroy(struct graph *graph) {
    drop_graph(graph);
    return CUDA_SUCCESS;
}

static void log_node(const struct node *node) {
    static const char *const kinds[] = {"copy", "fill", "host function", "kernel", "record", "wait"};
    const struct task *task = &node->task;
    const char *name = task->kind == TASK_CALL ? symbol_name((const void *)(uintptr_t)task->function) : NULL;
    double_log("graph %llu, node %zu: %s %s", (unsigned long long)node->graph->id, node->index, kinds[task->kind],
               task->kind == TASK_KERNEL ? kernel_name(task->kernel) : name != NULL ? name : "");
}

/* The executable is the graph itself: nothing can be added once its capture has ended. */
static int do_graph_instantiate(struct graph **executable, struct graph *graph, unsigned long long flags) {
    if (flags != 0)
        double_fail("unsupported cudaGraphInstantiate with flags %llu", flags);
    if (graph->streams != NULL)
        return CUDA_INVALID_VALUE;
    for (size_t i = 0; i < graph->node_count; i++)
        log_node(graph->nodes[i]);
    keep_graph(graph);
    *executable = graph;
    return CUDA_SUCCESS;
}

static int do_graph_launch(struct graph *graph, struct stream *stream) {
    if (capture_active(stream_capture(stream)))
        double_fail("unsupported cudaGraphLaunch into a stream that is being captured");
    keep_graph(graph);
    for (size_t i = 0; i < graph->node_count; i++) {
        struct task task = graph->nodes[i]->task;
        switch (task.kind) {
        case TASK_KERNEL:
            stream_launch(stream, kernel_again(task.kernel));
            break;
        case TASK_RECORD:
            event_record(task.event, stream);
            break;
        case TASK_WAIT:
            event_wait(stream, task.event);
            break;
        default:
            stream_submit(stream, task);
        }
    }
    stream_call(stream, drop_graph, graph);
    return CUDA_SUCCESS;
}

/* ---- nodes added by hand ---- */

static int add_event_node(struct node **out, struct graph *graph, enum task_kind kind, struct event *event) {
    struct task task = {.kind = kind, .event = event_keep(event)};
    pthread_mutex_lock(&capture_lock);
    if (graph->streams == NULL)
        double_fail("unsupported node of an event in a graph that is complete");
    *out = graph_add_node(graph, &task);
    pthread_mutex_unlock(&capture_lock);
    return CUDA_SUCCESS;
}

static int do_add_record_node(struct node **out, struct graph *graph, struct node *const *nodes, size_t count,
                              struct event *event) {
    (void)nodes, (void)count; /* they are earlier ones */
    return add_event_node(out, graph, TASK_RECORD, event);
}

static int do_add_wait_node(struct node **out, struct graph *graph, struct node *const *nodes, size_t count,
                            struct event *event) {
    (void)nodes, (void)count;
    return add_event_node(out, graph, TASK_WAIT, event);
}

static int do_add_dependencies(struct graph *graph, struct node *const *from, struct node *const *to, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (from[i]->graph != graph || to[i]->graph != graph || from[i]->index >= to[i]->index)
            double_fail("unsupported cudaGraphAddDependencies: a node would wait for a later one");
    return CUDA_SUCCESS;
}

static int do_add_dependencies_2(struct graph *graph, struct node *const *from, struct node *const *to,
                                 const void *edges, size_t count) {
    (void)edges;
    return do_add_dependencies(graph, from, to, count);
}

/* ---- objects in a graph's care ---- */

static int do_object_create(struct object **out, void *argument, void (*destroy)(void *), unsigned references,
                            unsigned flags) {
    (void)flags;
    struct object *object = malloc(sizeof *object);
    if (object == NULL)
        double_fail("out of memory");
    *object = (struct object){argument, destroy, references};
    *out = object;
    return CUDA_SUCCESS;
}

static int do_object_retain(struct object *object, unsigned references) {
    pthread_mutex_lock(&capture_lock);
    object->references += references;
    pthread_mutex_unlock(&capture_lock);
    return CUDA_SUCCESS;
}

static int do_object_release(struct object *object, unsigned references) {
    drop_object(object, references);
    return CUDA_SUCCESS;
}

static int do_graph_retain_object(struct graph *graph, struct object *object, unsigned references, unsigned flags) {
    pthread_mutex_lock(&capture_lock);
    graph->objects = capture_grown(graph->objects, graph->object_count + references, sizeof *graph->objects);
    for (unsigned i = 0; i < references; i++)
        graph->objects[graph->object_count++] = object;
    if (flags != MOVE)
        object->references += references;
    pthread_mutex_unlock(&capture_lock);
    return CUDA_SUCCESS;
}

#define PLAYED(name, function) {#name, (void *)(function)}

const struct replacement graph_replacements[] = {
    PLAYED(cudaGraphAddEventRecordNode, do_add_record_node),
    PLAYED(cudaGraphAddEventWaitNode, do_add_wait_node),
    PLAYED(cudaGraphAddDependencies, do_add_dependencies),
    PLAYED(cudaGraphAddDependencies_v2, do_add_dependencies_2),
    PLAYED(cudaGraphInstantiate, do_graph_instantiate),
    PLAYED(cudaGraphInstantiateWithFlags, do_graph_instantiate),
    PLAYED(cudaGraphLaunch, do_graph_launch),
    PLAYED(cudaGraphExecDestroy, do_graph_destroy),
    PLAYED(cudaGraphDestroy, do_graph_destroy),
    PLAYED(cudaGraphRetainUserObject, do_graph_retain_object),
    PLAYED(cudaUserObjectCreate, do_object_create),
    PLAYED(cudaUserObjectRetain, do_object_retain),
    PLAYED(cudaUserObjectRelease, do_object_release),
    {NULL, NULL},
};
