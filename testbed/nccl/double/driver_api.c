/* The driver functions that NCCL asks cudaGetDriverEntryPoint for.  Those of virtual memory and
 * multicast are absent on purpose: NCCL then does without them. */
#include <stdint.h>
#include <string.h>

#include "double.h"

/* The values of cuda.h's CU_LAUNCH_PARAM_*: they tag the words of a launch's `extra` array. */
#define LAUNCH_PARAM_END ((void *)0)
#define LAUNCH_PARAM_BUFFER_POINTER ((void *)1)
#define LAUNCH_PARAM_BUFFER_SIZE ((void *)2)

static char context;

static int get_error_text(int error, const char **text) {
    *text = error == CUDA_SUCCESS ? "no error" : "error of the CUDA test double";
    return CUDA_SUCCESS;
}

static int device_get(int *device, int ordinal) {
    *device = ordinal;
    return CUDA_SUCCESS;
}

static int device_get_attribute(int *value, int attribute, int device) {
    (void)device;
    double_log("driver's device attribute %d reads as 0", attribute);
    *value = 0;
    return CUDA_SUCCESS;
}

static int device_get_uuid(unsigned char *uuid, int device) {
    (void)device;
    memcpy(uuid, "cuda-test-double", 16);
    uuid[15] = (unsigned char)gpu_index();
    return CUDA_SUCCESS;
}

static int context_get_current(void **current) {
    *current = &context;
    return CUDA_SUCCESS;
}

static int context_set_current(void *current) {
    (void)current;
    return CUDA_SUCCESS;
}

static int context_get_device(int *device) {
    *device = 0;
    return CUDA_SUCCESS;
}

static int launch(struct stream *stream, const void *function, void **extra) {
    const char *name = symbol_name(function);
    const void *buffer = NULL;
    size_t size_bytes = 0;
    for (size_t i = 0; extra != NULL && extra[i] != LAUNCH_PARAM_END; i += 2) {
        if (extra[i] == LAUNCH_PARAM_BUFFER_POINTER)
            buffer = extra[i + 1];
        else if (extra[i] == LAUNCH_PARAM_BUFFER_SIZE)
            size_bytes = *(size_t *)extra[i + 1];
    }
    if (name == NULL || buffer == NULL || size_bytes == 0)
        double_fail("unsupported launch of %s: no argument buffer", name ? name : "a kernel without name");
    stream_launch(stream, kernel_new(name, buffer, size_bytes));
    return CUDA_SUCCESS;
}

static int launch_kernel_ex(const struct CUlaunchConfig_st *configuration, const void *function, void **parameters,
                            void **extra) {
    (void)parameters;
    return launch(configuration->hStream, function, extra);
}

static int launch_kernel(const void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                         unsigned block_y, unsigned block_z, unsigned shared_bytes, struct stream *stream,
                         void **parameters, void **extra) {
    (void)grid_x, (void)grid_y, (void)grid_z, (void)block_x, (void)block_y, (void)block_z;
    (void)shared_bytes, (void)parameters;
    return launch(stream, function, extra);
}

#define PLAYED(name, function) {#name, (void *)(function)}

const struct replacement driver_replacements[] = {
    PLAYED(cuGetErrorString, get_error_text),
    PLAYED(cuGetErrorName, get_error_text),
    PLAYED(cuDeviceGet, device_get),
    PLAYED(cuDeviceGetAttribute, device_get_attribute),
    PLAYED(cuDeviceGetUuid, device_get_uuid),
    PLAYED(cuCtxGetCurrent, context_get_current),
    PLAYED(cuCtxSetCurrent, context_set_current),
    PLAYED(cuCtxGetDevice, context_get_device),
    PLAYED(cuLaunchKernel, launch_kernel),
    PLAYED(cuLaunchKernelEx, launch_kernel_ex),
    {NULL, NULL},
};
