/* Result codes and their texts. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "internal.h"

static pthread_mutex_t last_error_lock = PTHREAD_MUTEX_INITIALIZER;
static char last_error[512];

/* Remember why, for ncclGetLastError, and return the code. */
ncclResult_t fail(ncclResult_t result, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    pthread_mutex_lock(&last_error_lock);
    vsnprintf(last_error, sizeof last_error, format, arguments);
    pthread_mutex_unlock(&last_error_lock);
    va_end(arguments);
    return result;
}

ncclResult_t check_comm(ncclComm_t comm, const char *function) {
    if (comm == NULL)
        return fail(ncclInvalidArgument, "%s: the communicator is NULL", function);
    if (comm->startMagic != COMM_MAGIC || comm->endMagic != COMM_MAGIC)
        return fail(ncclInvalidArgument, "%s: the communicator is corrupt, or destroyed", function);
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result) {
    switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "device error";
    case ncclSystemError: return "system error";
    case ncclInternalError: return "internal error";
    case ncclInvalidArgument: return "invalid argument";
    case ncclInvalidUsage: return "invalid usage";
    case ncclRemoteError: return "a remote process exited, or the network failed";
    case ncclInProgress: return "in progress";
    }
    return "unknown result code";
}
STRONG_TWIN(ncclGetErrorString);

const char *ncclGetLastError(ncclComm_t comm) {
    static _Thread_local char copy[sizeof last_error];
    (void)comm; /* as in NCCL: the last error of the process */
    pthread_mutex_lock(&last_error_lock);
    memcpy(copy, last_error, sizeof copy);
    pthread_mutex_unlock(&last_error_lock);
    return copy;
}
STRONG_TWIN(ncclGetLastError);

ncclResult_t ncclGetVersion(int *version) {
    if (version == NULL)
        return fail(ncclInvalidArgument, "ncclGetVersion: version is NULL");
    *version = NCCL_VERSION_REPORTED;
    return ncclSuccess;
}
STRONG_TWIN(ncclGetVersion);
