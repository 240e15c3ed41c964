/* Patience with sockets, where NCCL_DOUBLE_PATIENT is 1: NCCL's threads ask a socket for bytes and for peers again and
 * again until they come, a processor each, and keep it from the ranks that they wait for where these share two.  A
 * thread that has asked in vain for long sleeps a little before it asks again.  Without the variable it spins, as on
 * real machines. */
#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#define IN_VAIN_BEFORE_SLEEP 100
#define SLEEP_NS 100000

static bool patient;

__attribute__((constructor)) static void read_variable(void) {
    const char *value = getenv("NCCL_DOUBLE_PATIENT");
    patient = value != NULL && strcmp(value, "1") == 0;
}

/* The answer of a socket, after a while where it was one of many in vain. */
static ssize_t answered(ssize_t answer) {
    static _Thread_local unsigned in_vain;
    if (answer >= 0 || errno != EAGAIN) {
        in_vain = 0;
    } else if (patient && ++in_vain > IN_VAIN_BEFORE_SLEEP) {
        nanosleep(&(struct timespec){.tv_nsec = SLEEP_NS}, NULL);
        errno = EAGAIN;
    }
    return answer;
}

/* In place of libc's for all of the process: this library comes before it. */
__attribute__((visibility("default"))) ssize_t recv(int socket, void *buffer, size_t size, int flags) {
    return answered(recvfrom(socket, buffer, size, flags, NULL, NULL));
}

__attribute__((visibility("default"))) int accept(int socket, struct sockaddr *address, socklen_t *size) {
    return (int)answered(accept4(socket, address, size, 0));
}
