/* Moves a set of messages at once: all sends and receives progress together, so that ranks that send to each other
 * never wait in a circle.
 *
 * A message is cut into stripes, one a link: evenly over all rails if it is large, whole on the first if it is small.
 * A stripe is a 16-byte header and its bytes.  Each link does its stripes in the order of the messages, in both
 * directions; both ends make the same list, so a header only serves to notice when they did not.
 *
 * A receive may carry a reduction.  Its bytes then arrive in a piece small enough for the processor's cache and are
 * combined at once, instead of going out to memory and coming back. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "internal.h"

enum {
    HEADER_MAGIC = 0x5253, /* "RS" */
    STRIPE_ALIGNMENT = 64, /* a stripe boundary never cuts an element */
    PIECE_BYTES = 128 << 10,
    SEND_AT_ONCE_BYTES = 512 << 10, /* then look at the receives again */
};

struct header {
    uint16_t magic, kind;
    uint32_t reserved;
    uint64_t bytes;
};

struct stripe {
    struct stripe *next; /* on the same link, same direction */
    struct header header; /* sending: to send; receiving: the peer's */
    const char *send;
    char *target;
    size_t bytes;
    size_t moved;  /* header and data */
    bool reduce;
    char *piece;   /* reduce: bytes received and not combined yet */
    size_t in_piece, combined;
};

struct exchange_memory {
    struct stripe *stripes;
    struct link **active;
    struct pollfd *polled;
    size_t stripe_capacity;
    char *pieces[MAXIMUM_RAILS]; /* one a link: an exchange has at most one message with a reduction */
};

struct state {
    ncclComm_t comm;
    const struct operation *reduction;
    enum operation_kind kind;
    struct exchange_memory *memory;
    int active_count;
    int remaining; /* stripes */
};

void exchange_memory_free(struct exchange_memory *memory) {
    if (memory == NULL)
        return;
    for (int rail = 0; rail < MAXIMUM_RAILS; rail++)
        free(memory->pieces[rail]);
    free(memory->stripes);
    free(memory->active);
    free(memory->polled);
    free(memory);
}

static ncclResult_t reserve(ncclComm_t comm, size_t stripes) {
    if (comm->memory == NULL && (comm->memory = calloc(1, sizeof *comm->memory)) == NULL)
        return fail(ncclSystemError, "out of memory");
    struct exchange_memory *memory = comm->memory;
    if (stripes <= memory->stripe_capacity)
        return ncclSuccess;
    free(memory->stripes);
    free(memory->active);
    free(memory->polled);
    memory->stripes = malloc(stripes * sizeof *memory->stripes);
    memory->active = malloc(stripes * sizeof(struct link *));
    memory->polled = malloc(stripes * sizeof *memory->polled);
    memory->stripe_capacity = stripes;
    if (memory->stripes == NULL || memory->active == NULL || memory->polled == NULL) {
        memory->stripe_capacity = 0;
        return fail(ncclSystemError, "out of memory for %zu stripes", stripes);
    }
    return ncclSuccess;
}

static void add_stripe(struct state *state, struct link *link, const struct message *message, size_t offset,
                       size_t bytes) {
    struct stripe *stripe = &state->memory->stripes[state->remaining++];
    *stripe = (struct stripe){
        .header = {HEADER_MAGIC, (uint16_t)state->kind, 0, bytes},
        .send = message->send != NULL ? message->send + offset : NULL,
        .target = message->target != NULL ? message->target + offset : NULL,
        .bytes = bytes,
        .reduce = message->reduce,
    };
    if (link->sends_end == NULL) {
        state->memory->active[state->active_count++] = link;
        link->sends_end = &link->sends;
        link->receives_end = &link->receives;
    }
    struct stripe ***end = message->receive ? &link->receives_end : &link->sends_end;
    **end = stripe;
    *end = &stripe->next;
}

static void add_message(struct state *state, const struct message *message) {
    struct peer *peer = &state->comm->peers[message->peer];
    if (message->bytes == 0)
        return;
    if (!message->striped || peer->link_count == 1) {
        add_stripe(state, &peer->links[0], message, 0, message->bytes);
        return;
    }
    size_t unit = STRIPE_ALIGNMENT * (size_t)peer->link_count;
    size_t part = (message->bytes + unit - 1) / unit * STRIPE_ALIGNMENT, offset = 0;
    for (int rail = 0; rail < peer->link_count && offset < message->bytes; rail++, offset += part)
        add_stripe(state, &peer->links[rail], message, offset,
                   message->bytes - offset < part ? message->bytes - offset : part);
}

/* What is left of header and data, as one vector: a small message is one system call. */
static int remaining_vector(const struct stripe *stripe, void *data, size_t data_left, struct iovec *vector) {
    int parts = 0;
    if (stripe->moved < sizeof stripe->header)
        vector[parts++] = (struct iovec){(char *)&stripe->header + stripe->moved, sizeof stripe->header - stripe->moved};
    vector[parts++] = (struct iovec){data, data_left};
    return parts;
}

static size_t data_moved(const struct stripe *stripe) {
    return stripe->moved > sizeof stripe->header ? stripe->moved - sizeof stripe->header : 0;
}

static ncclResult_t lost_peer(const struct state *state) {
    if (atomic_load(&state->comm->aborted))
        return fail(ncclInternalError, "the communicator was aborted");
    return fail(ncclRemoteError, "rank %d lost a peer of communicator %016llx: %s", state->comm->rank,
                (unsigned long long)state->comm->commHash, errno == 0 ? "it closed the connection" : strerror(errno));
}

/* Each returns with *progress set if bytes moved. */
static ncclResult_t progress_send(struct state *state, struct link *link, int flags, bool *progress) {
    struct stripe *stripe = link->sends;
    struct iovec vector[2];
    size_t done = data_moved(stripe), left = stripe->bytes - done;
    struct msghdr message = {.msg_iov = vector};
    message.msg_iovlen = (size_t)remaining_vector(
        stripe, (char *)stripe->send + done, left < SEND_AT_ONCE_BYTES ? left : SEND_AT_ONCE_BYTES, vector);
    ssize_t moved = sendmsg(link->fd, &message, flags | MSG_NOSIGNAL);
    if (moved < 0)
        return errno == EAGAIN || errno == EINTR ? ncclSuccess : lost_peer(state);
    *progress = true;
    stripe->moved += (size_t)moved;
    rails_add_bytes(link->rail, (size_t)moved, 0);
    if (data_moved(stripe) == stripe->bytes && stripe->moved >= sizeof stripe->header) {
        link->sends = stripe->next;
        state->remaining--;
    }
    return ncclSuccess;
}

static ncclResult_t check_header(const struct state *state, const struct stripe *stripe) {
    const struct header *got = &stripe->header;
    if (got->magic == HEADER_MAGIC && got->kind == state->kind && got->bytes == stripe->bytes)
        return ncclSuccess;
    return fail(ncclInvalidUsage,
                "ranks disagree on communicator %016llx: expected operation %d with %zu bytes, a peer sent operation "
                "%d with %llu",
                (unsigned long long)state->comm->commHash, (int)state->kind, stripe->bytes, got->kind,
                (unsigned long long)got->bytes);
}

/* Combine the whole elements that have arrived; keep the part of one that is cut. */
static void combine(const struct state *state, struct stripe *stripe) {
    const struct operation *reduction = state->reduction;
    size_t size = element_bytes(reduction->type), elements = stripe->in_piece / size, bytes = elements * size;
    reduce_elements(stripe->target + stripe->combined, stripe->send + stripe->combined, stripe->piece, elements,
                    reduction->type, reduction->reduction);
    stripe->combined += bytes;
    stripe->in_piece -= bytes;
    memmove(stripe->piece, stripe->piece + bytes, stripe->in_piece);
}

static ncclResult_t start_piece(struct state *state, const struct link *link, struct stripe *stripe) {
    char **piece = &state->memory->pieces[link->rail < 0 ? 0 : link->rail];
    if (*piece == NULL && (*piece = malloc(PIECE_BYTES)) == NULL)
        return fail(ncclSystemError, "out of memory");
    stripe->piece = *piece;
    return ncclSuccess;
}

static ncclResult_t progress_receive(struct state *state, struct link *link, int flags, bool *progress) {
    struct stripe *stripe = link->receives;
    struct iovec vector[2];
    size_t done = data_moved(stripe), left = stripe->bytes - done;
    char *target = stripe->target + done;
    ncclResult_t result = ncclSuccess;
    if (stripe->reduce) {
        if (stripe->piece == NULL && (result = start_piece(state, link, stripe)) != ncclSuccess)
            return result;
        target = stripe->piece + stripe->in_piece;
        left = left < PIECE_BYTES - stripe->in_piece ? left : PIECE_BYTES - stripe->in_piece;
    }
    struct msghdr message = {.msg_iov = vector};
    message.msg_iovlen = (size_t)remaining_vector(stripe, target, left, vector);
    bool in_header = stripe->moved < sizeof stripe->header;
    errno = 0;
    ssize_t moved = recvmsg(link->fd, &message, flags);
    if (moved < 0 && (errno == EAGAIN || errno == EINTR))
        return ncclSuccess;
    if (moved <= 0)
        return lost_peer(state);
    *progress = true;
    stripe->moved += (size_t)moved;
    rails_add_bytes(link->rail, 0, (size_t)moved);
    if (in_header && stripe->moved >= sizeof stripe->header) {
        if ((result = check_header(state, stripe)) != ncclSuccess)
            return result;
    }
    if (stripe->reduce) {
        stripe->in_piece += data_moved(stripe) - done;
        combine(state, stripe);
    }
    if (data_moved(stripe) == stripe->bytes && stripe->moved >= sizeof stripe->header) {
        link->receives = stripe->next;
        state->remaining--;
    }
    return ncclSuccess;
}

static ncclResult_t progress_all(struct state *state, int flags, bool *progress) {
    for (int i = 0; i < state->active_count; i++) {
        struct link *link = state->memory->active[i];
        ncclResult_t result = ncclSuccess;
        if (link->sends != NULL)
            result = progress_send(state, link, flags, progress);
        if (result == ncclSuccess && link->receives != NULL)
            result = progress_receive(state, link, flags, progress);
        if (result != ncclSuccess)
            return result;
    }
    return ncclSuccess;
}

static void wait_for_links(struct state *state) {
    struct pollfd *polled = state->memory->polled;
    nfds_t count = 0;
    for (int i = 0; i < state->active_count; i++) {
        const struct link *link = state->memory->active[i];
        short events = (short)((link->sends != NULL ? POLLOUT : 0) | (link->receives != NULL ? POLLIN : 0));
        if (events != 0)
            polled[count++] = (struct pollfd){.fd = link->fd, .events = events};
    }
    poll(polled, count, -1); /* an abort shuts the sockets down, which ends this */
}

ncclResult_t exchange(ncclComm_t comm, enum operation_kind kind, const struct operation *reduction,
                      const struct message *messages, int count) {
    ncclResult_t result = reserve(comm, (size_t)count * MAXIMUM_RAILS);
    if (result != ncclSuccess)
        return result;
    struct state state = {.comm = comm, .reduction = reduction, .kind = kind, .memory = comm->memory};
    for (int i = 0; i < count; i++)
        add_message(&state, &messages[i]);
    while (state.remaining > 0 && result == ncclSuccess) {
        bool progress = false;
        /* The last stripe has nobody beside it that could starve: block in the call itself and save the poll. */
        result = progress_all(&state, state.remaining == 1 ? 0 : MSG_DONTWAIT, &progress);
        if (result == ncclSuccess && !progress && state.remaining > 1)
            wait_for_links(&state);
    }
    for (int i = 0; i < state.active_count; i++) {
        struct link *link = state.memory->active[i];
        link->sends = link->receives = NULL;
        link->sends_end = link->receives_end = NULL;
    }
    return result;
}
