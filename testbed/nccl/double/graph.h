/* What capture.c and graph.c share: a graph and its nodes. */
#pragma once

#include <pthread.h>

#include "double.h"

struct node {
    struct graph *graph;
    size_t index;
    struct task task;
};

struct object; /* a cudaUserObject_t */

struct graph {
    uint64_t id;
    int references;
    struct capture *streams; /* those that capture it; NULL once it is complete */
    const struct capture *origin;
    struct node **nodes;
    size_t node_count;
    struct object **objects; /* one entry per reference */
    size_t object_count;
    struct graph *next_active;
};

/* Guards captures, graphs and objects: none of them is in the way of a collective. */
extern pthread_mutex_t capture_lock;

/* Append a node; the lock is held. */
struct node *graph_add_node(struct graph *graph, const struct task *task);
/* realloc for `count` entries; never fails. */
void *capture_grown(void *array, size_t count, size_t size_bytes);
