/* Rails and the sockets on them.
 *
 * A rail is a network interface that NCCL_SOCKET_IFNAME names (a comma list of exact names or prefixes, in that
 * order; unset: every interface with an IPv4 address but the loopback).  Two ranks on different hosts have one TCP
 * connection a rail, bound to the rail's address at both ends; two ranks of one host have one unix socket, so that
 * nothing between them touches a rail. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

static struct rail {
    char name[IF_NAMESIZE];
    struct sockaddr_in address;
    atomic_uint_fast64_t transmit_bytes, receive_bytes;
} rails[MAXIMUM_RAILS];
static int rail_total;
static pthread_mutex_t rails_lock = PTHREAD_MUTEX_INITIALIZER;

static void add_rail(const struct ifaddrs *interface) {
    for (int rail = 0; rail < rail_total; rail++)
        if (strcmp(rails[rail].name, interface->ifa_name) == 0)
            return; /* its second address */
    if (rail_total == MAXIMUM_RAILS)
        return;
    struct rail *rail = &rails[rail_total++];
    snprintf(rail->name, sizeof rail->name, "%s", interface->ifa_name);
    memcpy(&rail->address, interface->ifa_addr, sizeof rail->address);
    rail->address.sin_port = 0;
}

/* NULL names all but the loopback.  Returns whether any interface matched. */
static bool add_rails_named(const struct ifaddrs *interfaces, const char *name, bool exact) {
    bool found = false;
    for (const struct ifaddrs *each = interfaces; each != NULL; each = each->ifa_next) {
        if (each->ifa_addr == NULL || each->ifa_addr->sa_family != AF_INET || !(each->ifa_flags & IFF_UP))
            continue;
        if (name == NULL ? !(each->ifa_flags & IFF_LOOPBACK)
            : exact      ? strcmp(each->ifa_name, name) == 0
                         : strncmp(each->ifa_name, name, strlen(name)) == 0) {
            add_rail(each);
            found = true;
        }
    }
    return found;
}

/* A name that an interface has is that interface: in "rail1,rail10" the first does not take rail10's place. */
static void add_rails_wanted(const struct ifaddrs *interfaces, const char *wanted) {
    char names[512], *rest = names, *name;
    bool exact_only = *wanted == '=';
    snprintf(names, sizeof names, "%s", exact_only ? wanted + 1 : wanted);
    while ((name = strsep(&rest, ",")) != NULL)
        if (*name != '\0' && !add_rails_named(interfaces, name, true) && !exact_only)
            add_rails_named(interfaces, name, false);
}

ncclResult_t rails_find(void) {
    const char *wanted = getenv("NCCL_SOCKET_IFNAME");
    ncclResult_t result = ncclSuccess;
    pthread_mutex_lock(&rails_lock);
    if (rail_total == 0) {
        struct ifaddrs *interfaces = NULL;
        if (getifaddrs(&interfaces) != 0)
            result = fail(ncclSystemError, "cannot list network interfaces: %s", strerror(errno));
        else if (wanted != NULL && *wanted != '\0')
            add_rails_wanted(interfaces, wanted);
        else
            add_rails_named(interfaces, NULL, false);
        freeifaddrs(interfaces);
        if (result == ncclSuccess && rail_total == 0)
            result = fail(ncclSystemError, "no interface matches NCCL_SOCKET_IFNAME=%s and has an IPv4 address",
                          wanted != NULL ? wanted : "(unset)");
    }
    pthread_mutex_unlock(&rails_lock);
    return result;
}

int rails_count(void) { return rail_total; }

struct sockaddr_in rail_address(int rail) { return rails[rail].address; }

void rails_add_bytes(int rail, size_t transmit_bytes, size_t receive_bytes) {
    if (rail < 0)
        return; /* within the host */
    atomic_fetch_add_explicit(&rails[rail].transmit_bytes, transmit_bytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&rails[rail].receive_bytes, receive_bytes, memory_order_relaxed);
}

int workload_rails(struct workload_rail *out, int capacity) {
    for (int rail = 0; rail < rail_total && rail < capacity; rail++) {
        snprintf(out[rail].name, sizeof out[rail].name, "%s", rails[rail].name);
        out[rail].transmit_bytes = atomic_load(&rails[rail].transmit_bytes);
        out[rail].receive_bytes = atomic_load(&rails[rail].receive_bytes);
    }
    return rail_total;
}

/* ---- plain sockets: connection set-up, not the data path ---- */

static ncclResult_t system_error(const char *what) {
    return fail(ncclSystemError, "%s: %s", what, strerror(errno));
}

ncclResult_t socket_listen(const struct sockaddr_in *address, int *fd, struct sockaddr_in *bound) {
    socklen_t length = sizeof *bound;
    *fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (*fd < 0)
        return system_error("socket");
    if (bind(*fd, (const struct sockaddr *)address, sizeof *address) != 0 || listen(*fd, MAXIMUM_RANKS) != 0 ||
        getsockname(*fd, (struct sockaddr *)bound, &length) != 0) {
        ncclResult_t result = system_error("listen on a rail");
        close(*fd);
        *fd = -1;
        return result;
    }
    return ncclSuccess;
}

static double monotonic_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* A rail may still be coming up: refused and unreachable are tried again until the time is over. */
ncclResult_t socket_connect(const struct sockaddr_in *from, const struct sockaddr_in *to, int *fd) {
    double give_up = monotonic_seconds() + CONNECT_SECONDS;
    for (;;) {
        int one = 1;
        *fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (*fd < 0)
            return system_error("socket");
        setsockopt(*fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        if (bind(*fd, (const struct sockaddr *)from, sizeof *from) == 0 &&
            connect(*fd, (const struct sockaddr *)to, sizeof *to) == 0)
            return ncclSuccess;
        int reason = errno;
        close(*fd);
        *fd = -1;
        if (monotonic_seconds() > give_up) {
            char text[INET_ADDRSTRLEN];
            inet_ntop(AF_INET, &to->sin_addr, text, sizeof text);
            return fail(ncclSystemError, "cannot connect to %s port %d: %s", text, ntohs(to->sin_port),
                        strerror(reason));
        }
        nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    }
}

ncclResult_t socket_accept(int listener, int *fd) {
    struct pollfd ready = {.fd = listener, .events = POLLIN};
    int one = 1;
    *fd = -1;
    if (poll(&ready, 1, CONNECT_SECONDS * 1000) == 0)
        return fail(ncclSystemError, "no rank connected within %d s", CONNECT_SECONDS);
    *fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (*fd < 0)
        return system_error("accept");
    setsockopt(*fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one); /* a unix socket refuses: nothing to delay there */
    return ncclSuccess;
}

ncclResult_t socket_write(int fd, const void *data, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        ssize_t part = send(fd, (const char *)data + done, bytes - done, MSG_NOSIGNAL);
        if (part < 0 && errno == EINTR)
            continue;
        if (part < 0)
            return fail(ncclRemoteError, "cannot send to a rank: %s", strerror(errno));
        done += (size_t)part;
    }
    return ncclSuccess;
}

ncclResult_t socket_read(int fd, void *data, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        ssize_t part = recv(fd, (char *)data + done, bytes - done, 0);
        if (part < 0 && errno == EINTR)
            continue;
        if (part <= 0)
            return fail(ncclRemoteError, "a rank went away: %s", part == 0 ? "it closed" : strerror(errno));
        done += (size_t)part;
    }
    return ncclSuccess;
}

/* ---- listeners and links of one communicator ---- */

static socklen_t local_address(const char *name, struct sockaddr_un *address) {
    /* The leading zero byte makes it abstract: it lives in the host's network namespace and leaves no file. */
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "%s", name);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(name));
}

ncclResult_t listeners_open(struct listeners *listeners, struct rank_record *record) {
    static atomic_uint serial;
    listeners->local_fd = -1;
    record->rail_count = rail_total;
    for (int rail = 0; rail < MAXIMUM_RAILS; rail++)
        listeners->rail_fds[rail] = -1;
    for (int rail = 0; rail < rail_total; rail++) {
        ncclResult_t result =
            socket_listen(&rails[rail].address, &listeners->rail_fds[rail], &record->listeners[rail]);
        if (result != ncclSuccess)
            return result;
    }
    struct sockaddr_un address;
    snprintf(record->local_listener, sizeof record->local_listener, "railscope-workload-%d-%u", (int)getpid(),
             atomic_fetch_add(&serial, 1));
    socklen_t length = local_address(record->local_listener, &address);
    listeners->local_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (listeners->local_fd < 0 || bind(listeners->local_fd, (struct sockaddr *)&address, length) != 0 ||
        listen(listeners->local_fd, MAXIMUM_RANKS) != 0)
        return system_error("listen on a unix socket");
    return ncclSuccess;
}

void listeners_close(struct listeners *listeners) {
    for (int rail = 0; rail < MAXIMUM_RAILS; rail++)
        if (listeners->rail_fds[rail] >= 0)
            close(listeners->rail_fds[rail]);
    if (listeners->local_fd >= 0)
        close(listeners->local_fd);
}

struct hello { /* the first bytes on a new link */
    uint64_t comm_hash;
    uint32_t rank, rail;
};

static ncclResult_t connect_to(ncclComm_t comm, int peer, int rail) {
    const struct rank_record *record = &comm->records[peer];
    struct hello hello = {comm->commHash, (uint32_t)comm->rank, (uint32_t)rail};
    struct link *link = &comm->peers[peer].links[rail];
    if (link->rail >= 0) {
        ncclResult_t result = socket_connect(&rails[rail].address, &record->listeners[rail], &link->fd);
        if (result != ncclSuccess)
            return result;
    } else {
        struct sockaddr_un address;
        socklen_t length = local_address(record->local_listener, &address);
        link->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (link->fd < 0 || connect(link->fd, (struct sockaddr *)&address, length) != 0)
            return system_error("connect to a rank of this host (NCCL_HOSTID equal, but another network namespace?)");
    }
    return socket_write(link->fd, &hello, sizeof hello);
}

static ncclResult_t accept_from(ncclComm_t comm, int listener, int rail) {
    struct hello hello = {0};
    int fd;
    ncclResult_t result = socket_accept(listener, &fd);
    if (result == ncclSuccess)
        result = socket_read(fd, &hello, sizeof hello);
    if (result == ncclSuccess && (hello.comm_hash != comm->commHash || hello.rank >= (uint32_t)comm->rank ||
                                  (int)hello.rail != rail || comm->peers[hello.rank].links[rail].fd >= 0))
        result = fail(ncclRemoteError, "something that is no rank of this communicator connected");
    if (result != ncclSuccess) {
        if (fd >= 0)
            close(fd);
        return result;
    }
    comm->peers[hello.rank].links[rail].fd = fd;
    return ncclSuccess;
}

/* Every pair at once: the lower rank connects, the higher accepts.  No rank waits for another before it has connected
 * to all above it, and a connection is complete without the other's accept, so the order cannot lock up. */
ncclResult_t peers_connect(ncclComm_t comm, const struct listeners *listeners) {
    int local_below = 0, remote_below = 0;
    comm->peers = calloc((size_t)comm->nRanks, sizeof *comm->peers);
    if (comm->peers == NULL)
        return fail(ncclSystemError, "out of memory for %d peers", comm->nRanks);
    for (int peer = 0; peer < comm->nRanks; peer++) {
        bool local = comm->records[peer].host_hash == comm->records[comm->rank].host_hash;
        if (comm->records[peer].rail_count != rail_total)
            return fail(ncclInvalidUsage, "rank %d has %d rails and rank %d has %d: give all the same number", peer,
                        comm->records[peer].rail_count, comm->rank, rail_total);
        comm->peers[peer].link_count = peer == comm->rank ? 0 : local ? 1 : rail_total;
        for (int rail = 0; rail < MAXIMUM_RAILS; rail++)
            comm->peers[peer].links[rail] = (struct link){.fd = -1, .rail = local ? -1 : rail};
        if (peer < comm->rank)
            *(local ? &local_below : &remote_below) += 1;
    }
    for (int peer = comm->rank + 1; peer < comm->nRanks; peer++)
        for (int rail = 0; rail < comm->peers[peer].link_count; rail++) {
            ncclResult_t result = connect_to(comm, peer, rail);
            if (result != ncclSuccess)
                return result;
        }
    for (int rail = 0; rail < rail_total; rail++)
        for (int i = 0; i < remote_below; i++) {
            ncclResult_t result = accept_from(comm, listeners->rail_fds[rail], rail);
            if (result != ncclSuccess)
                return result;
        }
    for (int i = 0; i < local_below; i++) {
        ncclResult_t result = accept_from(comm, listeners->local_fd, 0);
        if (result != ncclSuccess)
            return result;
    }
    return ncclSuccess;
}

static void for_each_socket(ncclComm_t comm, void (*act)(int fd)) {
    for (int peer = 0; comm->peers != NULL && peer < comm->nRanks; peer++)
        for (int rail = 0; rail < comm->peers[peer].link_count; rail++)
            if (comm->peers[peer].links[rail].fd >= 0)
                act(comm->peers[peer].links[rail].fd);
}

static void close_socket(int fd) { close(fd); }
static void shut_down_socket(int fd) { shutdown(fd, SHUT_RDWR); }

void peers_disconnect(ncclComm_t comm) {
    for_each_socket(comm, close_socket);
    free(comm->peers);
    comm->peers = NULL;
}

/* Wakes a worker that waits for data, from another thread. */
void peers_shut_down(ncclComm_t comm) { for_each_socket(comm, shut_down_socket); }
