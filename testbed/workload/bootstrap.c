/* How ranks that know nothing but a unique id find each other.
 *
 * Whoever makes the id opens a listener on its first rail and starts a thread there; the id carries the listener's
 * address and a nonce.  Every rank connects, says who it is and where its own listeners are, and gets everybody's
 * answers once all have come.  The thread then ends.  NCCL's bootstrap does the same in more rounds. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "internal.h"

struct id_content { /* the unique id's bytes; the rest are zero */
    uint64_t nonce;
    struct sockaddr_in address;
};

struct greeting {
    uint64_t nonce;
    int32_t nranks;
    struct rank_record record;
};

struct meeting { /* the thread's own */
    uint64_t nonce;
    int listener;
};

/* FNV-1a with a final mix (the finaliser of splitmix64), so that ids that differ in one byte look unrelated. */
uint64_t hash_bytes(const void *data, size_t bytes, uint64_t seed) {
    uint64_t hash = 0xcbf29ce484222325ull ^ seed * 0x9e3779b97f4a7c15ull;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ ((const unsigned char *)data)[i]) * 0x100000001b3ull;
    hash = (hash ^ hash >> 30) * 0xbf58476d1ce4e5b9ull;
    hash = (hash ^ hash >> 27) * 0x94d049bb133111ebull;
    hash ^= hash >> 31;
    return hash != 0 ? hash : 1; /* zero would read as "not set yet" */
}

/* NCCL_HOSTID as NCCL reads it, else the host's name. */
uint64_t host_hash(void) {
    char name[256] = "";
    const char *given = getenv("NCCL_HOSTID");
    if (given != NULL && *given != '\0')
        return hash_bytes(given, strlen(given), 1);
    gethostname(name, sizeof name - 1);
    return hash_bytes(name, strlen(name), 0);
}

/* Accept one rank.  A stranger's connection is closed; a rank that disagrees about the number ends the meeting. */
static ncclResult_t greet(const struct meeting *meeting, struct rank_record **records, int **sockets, int *nranks,
                          int *present) {
    struct greeting greeting;
    int fd;
    ncclResult_t result = socket_accept(meeting->listener, &fd);
    if (result != ncclSuccess)
        return result;
    if (socket_read(fd, &greeting, sizeof greeting) != ncclSuccess || greeting.nonce != meeting->nonce ||
        greeting.nranks < 1 || greeting.nranks > MAXIMUM_RANKS) {
        close(fd);
        return ncclSuccess;
    }
    if (*nranks == 0) {
        *nranks = greeting.nranks;
        *records = calloc((size_t)*nranks, sizeof **records);
        *sockets = malloc((size_t)*nranks * sizeof **sockets);
        if (*records == NULL || *sockets == NULL) {
            close(fd);
            return fail(ncclSystemError, "out of memory for %d ranks", *nranks);
        }
        memset(*sockets, 0xff, (size_t)*nranks * sizeof **sockets);
    }
    int rank = greeting.record.rank;
    if (greeting.nranks != *nranks || rank < 0 || rank >= *nranks || (*sockets)[rank] >= 0) {
        close(fd);
        return fail(ncclInvalidUsage, "rank %d came twice, or with another number of ranks", rank);
    }
    (*records)[rank] = greeting.record;
    (*sockets)[rank] = fd;
    *present += 1;
    return ncclSuccess;
}

static void *meet_thread(void *argument) {
    struct meeting *meeting = argument;
    struct rank_record *records = NULL;
    int *sockets = NULL, nranks = 0, present = 0;
    ncclResult_t result = ncclSuccess;
    while (result == ncclSuccess && (nranks == 0 || present < nranks))
        result = greet(meeting, &records, &sockets, &nranks, &present);
    for (int rank = 0; sockets != NULL && rank < nranks; rank++) {
        if (sockets[rank] < 0)
            continue;
        if (result == ncclSuccess) /* one that has gone finds out by itself; the others notice when they connect */
            (void)socket_write(sockets[rank], records, (size_t)nranks * sizeof *records);
        close(sockets[rank]);
    }
    close(meeting->listener);
    free(sockets);
    free(records);
    free(meeting);
    return NULL;
}

ncclResult_t bootstrap_create(ncclUniqueId *id) {
    struct id_content content = {0};
    ncclResult_t result = rails_find();
    if (result != ncclSuccess)
        return result;
    struct meeting *meeting = malloc(sizeof *meeting);
    if (meeting == NULL || getrandom(&content.nonce, sizeof content.nonce, 0) != sizeof content.nonce) {
        free(meeting);
        return fail(ncclSystemError, "no memory or no random numbers for a unique id");
    }
    struct sockaddr_in address = rail_address(0);
    result = socket_listen(&address, &meeting->listener, &content.address);
    if (result != ncclSuccess) {
        free(meeting);
        return result;
    }
    meeting->nonce = content.nonce;
    pthread_t thread;
    if (pthread_create(&thread, NULL, meet_thread, meeting) != 0) {
        close(meeting->listener);
        free(meeting);
        return fail(ncclSystemError, "cannot start the bootstrap's thread");
    }
    pthread_detach(thread);
    memset(id, 0, sizeof *id);
    memcpy(id->internal, &content, sizeof content);
    return ncclSuccess;
}

ncclResult_t bootstrap_meet(const ncclUniqueId *id, int nranks, const struct rank_record *mine,
                            struct rank_record *all) {
    struct id_content content;
    struct greeting greeting = {.nranks = nranks, .record = *mine};
    struct sockaddr_in from = rail_address(0);
    int fd;
    memcpy(&content, id->internal, sizeof content);
    if (content.address.sin_family != AF_INET)
        return fail(ncclInvalidArgument, "the unique id was not made by ncclGetUniqueId of this library");
    greeting.nonce = content.nonce;
    ncclResult_t result = socket_connect(&from, &content.address, &fd);
    if (result != ncclSuccess)
        return result;
    result = socket_write(fd, &greeting, sizeof greeting);
    if (result == ncclSuccess)
        result = socket_read(fd, all, (size_t)nranks * sizeof *all);
    close(fd);
    return result;
}
