/* Capturing a stream's work in a graph: which streams capture, and where each of them stands.
 *
 * A graph keeps its nodes in the order in which they were captured.  As a node can only depend on earlier
 * ones, that order is one of those that CUDA may choose for a replay.  Edges therefore need not be kept;
 * what is kept is where every capturing stream and captured event stands (its frontier), because NCCL asks
 * for it and moves it.  That work of joined streams leads back to the first stream is not checked.
 */
#include <stdlib.h>
#include <string.h>

#include "graph.h"

enum { EXTERNAL = 1, REPLACE = 1, STATUS_NONE = 0, STATUS_ACTIVE = 1 };

pthread_mutex_t capture_lock = PTHREAD_MUTEX_INITIALIZER;
static struct graph *active;

/* ---- frontiers ---- */

void *capture_grown(void *array, size_t count, size_t size_bytes) {
    void *bigger = realloc(array, (count ? count : 1) * size_bytes);
    if (bigger == NULL)
        double_fail("out of memory");
    return bigger;
}

static void set_frontier(struct capture *place, struct node *const *nodes, size_t count) {
    struct node **copy = capture_grown(NULL, count, sizeof *copy);
    if (count > 0)
        memcpy(copy, nodes, count * sizeof *copy);
    free(place->frontier);
    place->frontier = copy;
    place->frontier_count = count;
}

static void add_to_frontier(struct capture *place, struct node *const *nodes, size_t count) {
    for (size_t i = 0; i < count; i++) {
        size_t at = 0;
        while (at < place->frontier_count && place->frontier[at] != nodes[i])
            at++;
        if (at < place->frontier_count)
            continue;
        place->frontier = capture_grown(place->frontier, place->frontier_count + 1, sizeof *place->frontier);
        place->frontier[place->frontier_count++] = nodes[i];
    }
}

static void clear(struct capture *place) {
    free(place->frontier);
    *place = (struct capture){0};
}

static void join(struct capture *stream, struct graph *graph) {
    *stream = (struct capture){.graph = graph, .id = graph->id, .next = graph->streams};
    graph->streams = stream;
}

/* ---- what streams and events ask ---- */

struct node *graph_add_node(struct graph *graph, const struct task *task) {
    struct node *node = calloc(1, sizeof *node);
    if (node == NULL)
        double_fail("out of memory");
    *node = (struct node){.graph = graph, .index = graph->node_count, .task = *task};
    graph->nodes = capture_grown(graph->nodes, graph->node_count + 1, sizeof *graph->nodes);
    graph->nodes[graph->node_count++] = node;
    return node;
}

bool capture_task(struct capture *stream, const struct task *task) {
    pthread_mutex_lock(&capture_lock);
    struct graph *graph = stream->graph;
    if (graph != NULL) {
        struct node *node = graph_add_node(graph, task);
        set_frontier(stream, &node, 1);
    }
    pthread_mutex_unlock(&capture_lock);
    return graph != NULL;
}

bool capture_active(struct capture *stream) {
    pthread_mutex_lock(&capture_lock);
    bool capturing = stream->graph != NULL;
    pthread_mutex_unlock(&capture_lock);
    return capturing;
}

void capture_leave_event(struct capture *event) {
    pthread_mutex_lock(&capture_lock);
    clear(event);
    pthread_mutex_unlock(&capture_lock);
}

void capture_leave_stream(struct capture *stream) {
    pthread_mutex_lock(&capture_lock);
    if (stream->graph != NULL) {
        struct capture **link = &stream->graph->streams;
        while (*link != stream)
            link = &(*link)->next;
        *link = stream->next;
    }
    clear(stream);
    pthread_mutex_unlock(&capture_lock);
}

void capture_record(struct capture *event, const struct capture *stream) {
    pthread_mutex_lock(&capture_lock);
    clear(event);
    if (stream->graph != NULL) {
        event->graph = stream->graph;
        event->id = stream->id;
        set_frontier(event, stream->frontier, stream->frontier_count);
    }
    pthread_mutex_unlock(&capture_lock);
}

int capture_wait(struct capture *stream, const struct capture *event) {
    int result = CUDA_SUCCESS;
    pthread_mutex_lock(&capture_lock);
    struct graph *graph = active;
    while (graph != NULL && (graph != event->graph || graph->id != event->id))
        graph = graph->next_active;
    if (graph == NULL || (stream->graph != NULL && stream->graph != graph))
        result = CUDA_CAPTURE_ISOLATION;
    else {
        if (stream->graph == NULL)
            join(stream, graph);
        add_to_frontier(stream, event->frontier, event->frontier_count);
    }
    pthread_mutex_unlock(&capture_lock);
    return result;
}

/* ---- capturing ---- */

static int do_begin_capture(struct stream *stream, int mode) {
    static uint64_t graphs;
    (void)mode;
    struct capture *place = stream_capture(stream);
    if ((uintptr_t)stream <= 2 || capture_active(place))
        return CUDA_CAPTURE_UNSUPPORTED;
    struct graph *graph = calloc(1, sizeof *graph);
    if (graph == NULL)
        double_fail("out of memory");
    pthread_mutex_lock(&capture_lock);
    *graph = (struct graph){.id = ++graphs, .references = 1, .origin = place, .next_active = active};
    active = graph;
    join(place, graph);
    pthread_mutex_unlock(&capture_lock);
    return CUDA_SUCCESS;
}

static int do_end_capture(struct stream *stream, struct graph **out) {
    struct capture *place = stream_capture(stream);
    pthread_mutex_lock(&capture_lock);
    struct graph *graph = place->graph;
    if (graph == NULL || graph->origin != place) {
        pthread_mutex_unlock(&capture_lock);
        return CUDA_INVALID_VALUE;
    }
    while (graph->streams != NULL) {
        struct capture *joined = graph->streams;
        graph->streams = joined->next;
        clear(joined);
    }
    struct graph **link = &active;
    while (*link != graph)
        link = &(*link)->next_active;
    *link = graph->next_active;
    pthread_mutex_unlock(&capture_lock);
    *out = graph;
    return CUDA_SUCCESS;
}

static int do_get_capture_info(struct stream *stream, int *status, unsigned long long *id, struct graph **graph,
                               struct node *const **nodes, size_t *count) {
    struct capture *place = stream_capture(stream);
    pthread_mutex_lock(&capture_lock);
    *status = place->graph != NULL ? STATUS_ACTIVE : STATUS_NONE;
    if (place->graph != NULL) {
        if (id != NULL)
            *id = place->id;
        if (graph != NULL)
            *graph = place->graph;
        if (nodes != NULL)
            *nodes = place->frontier;
        if (count != NULL)
            *count = place->frontier_count;
    }
    pthread_mutex_unlock(&capture_lock);
    return CUDA_SUCCESS;
}

static int do_get_capture_info_3(struct stream *stream, int *status, unsigned long long *id, struct graph **graph,
                                 struct node *const **nodes, const void **edges, size_t *count) {
    if (edges != NULL)
        *edges = NULL;
    return do_get_capture_info(stream, status, id, graph, nodes, count);
}

static int do_is_capturing(struct stream *stream, int *status) {
    return do_get_capture_info(stream, status, NULL, NULL, NULL, NULL);
}

static int do_update_dependencies(struct stream *stream, struct node *const *nodes, size_t count, unsigned flags) {
    struct capture *place = stream_capture(stream);
    pthread_mutex_lock(&capture_lock);
    bool capturing = place->graph != NULL;
    if (capturing && (flags & REPLACE) != 0)
        set_frontier(place, nodes, count);
    else if (capturing)
        add_to_frontier(place, nodes, count);
    pthread_mutex_unlock(&capture_lock);
    return capturing ? CUDA_SUCCESS : CUDA_INVALID_VALUE;
}

static int do_update_dependencies_2(struct stream *stream, struct node *const *nodes, const void *edges, size_t count,
                                    unsigned flags) {
    if (edges != NULL)
        double_fail("unsupported cudaStreamUpdateCaptureDependencies_v2 with annotated edges");
    return do_update_dependencies(stream, nodes, count, flags);
}

/* Modes forbid calls while another thread captures; the double forbids none. */
static int do_exchange_mode(int *mode) {
    static _Thread_local int current;
    int before = current;
    current = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

/* ---- events in a capture ---- */

static int do_event_record_with_flags(struct event *event, struct stream *stream, unsigned flags) {
    struct capture *place = stream_capture(stream);
    bool capturing = capture_active(place);
    if (capturing && flags == EXTERNAL) {
        stream_submit(stream, (struct task){.kind = TASK_RECORD, .event = event_keep(event)});
        return CUDA_SUCCESS;
    }
    capture_record(event_capture(event), place);
    return capturing ? CUDA_SUCCESS : event_record(event, stream);
}

static int do_event_record(struct event *event, struct stream *stream) {
    return do_event_record_with_flags(event, stream, 0);
}

static int do_stream_wait_event(struct stream *stream, struct event *event, unsigned flags) {
    struct capture *place = stream_capture(stream);
    if (event_capture(event)->graph != NULL && flags != EXTERNAL)
        return capture_wait(place, event_capture(event));
    if (!capture_active(place))
        return event_wait(stream, event);
    if (flags != EXTERNAL)
        return CUDA_CAPTURE_ISOLATION;
    stream_submit(stream, (struct task){.kind = TASK_WAIT, .event = event_keep(event)});
    return CUDA_SUCCESS;
}

#define PLAYED(name, function) {#name, (void *)(function)}

const struct replacement capture_replacements[] = {
    PLAYED(cudaStreamBeginCapture, do_begin_capture),
    PLAYED(cudaStreamEndCapture, do_end_capture),
    PLAYED(cudaStreamIsCapturing, do_is_capturing),
    PLAYED(cudaStreamGetCaptureInfo_v2, do_get_capture_info),
    PLAYED(cudaStreamGetCaptureInfo_v3, do_get_capture_info_3),
    PLAYED(cudaStreamUpdateCaptureDependencies, do_update_dependencies),
    PLAYED(cudaStreamUpdateCaptureDependencies_v2, do_update_dependencies_2),
    PLAYED(cudaThreadExchangeStreamCaptureMode, do_exchange_mode),
    PLAYED(cudaStreamWaitEvent, do_stream_wait_event),
    PLAYED(cudaEventRecord, do_event_record),
    PLAYED(cudaEventRecordWithFlags, do_event_record_with_flags),
    {NULL, NULL},
};
