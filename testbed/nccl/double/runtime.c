/* The CUDA runtime's functions that NCCL calls, apart from streams and events.
 *
 * A process sees one device, an imaginary one of compute capability 8.0: NCCL then uses neither NVLink
 * SHARP nor symmetric kernels.  CUDA_VISIBLE_DEVICES says which of the host's eight it is.  Device and
 * pinned memory are ordinary memory; every allocation is remembered, since NCCL asks what a pointer is.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "double.h"

enum { DRIVER_VERSION = 12020, COMPUTE_MAJOR = 8, COMPUTE_MINOR = 0, MULTIPROCESSORS = 108, SHARED_BYTES = 166912 };
enum { ALIGNMENT = 4096, ENTRY_POINT_SYMBOL_NOT_FOUND = 1 };

int gpu_index(void) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    int index = visible != NULL ? atoi(visible) : 0;
    if (index < 0 || index > 7 || (visible != NULL && strchr(visible, ',') != NULL))
        double_fail("CUDA_VISIBLE_DEVICES=%s: the double shows one GPU of 0 to 7", visible);
    return index;
}

/* ---- allocations ---- */

struct allocation {
    struct allocation *next;
    char *start;
    size_t size_bytes;
    unsigned type;
};
static struct allocation *allocations;
static pthread_mutex_t allocations_lock = PTHREAD_MUTEX_INITIALIZER;

static int allocate(void **pointer, size_t size_bytes, unsigned type) {
    struct allocation *entry = malloc(sizeof *entry);
    void *start = NULL;
    if (entry == NULL || posix_memalign(&start, ALIGNMENT, size_bytes ? size_bytes : 1) != 0)
        double_fail("out of memory: %zu bytes", size_bytes);
    *entry = (struct allocation){.start = start, .size_bytes = size_bytes, .type = type};
    pthread_mutex_lock(&allocations_lock);
    entry->next = allocations;
    allocations = entry;
    pthread_mutex_unlock(&allocations_lock);
    *pointer = start;
    return CUDA_SUCCESS;
}

static int release(void *pointer) {
    if (pointer == NULL)
        return CUDA_SUCCESS;
    struct allocation *found = NULL;
    pthread_mutex_lock(&allocations_lock);
    for (struct allocation **link = &allocations; *link != NULL; link = &(*link)->next)
        if ((*link)->start == pointer) {
            found = *link;
            *link = found->next;
            break;
        }
    pthread_mutex_unlock(&allocations_lock);
    if (found == NULL)
        double_fail("free of %p, which was never allocated", pointer);
    free(found->start);
    free(found);
    return CUDA_SUCCESS;
}

/* Copies the entry that holds the pointer; false when none does. */
static bool allocation_of(const void *pointer, struct allocation *copy) {
    bool found = false;
    pthread_mutex_lock(&allocations_lock);
    for (struct allocation *entry = allocations; entry != NULL && !found; entry = entry->next)
        if ((const char *)pointer >= entry->start && (const char *)pointer < entry->start + entry->size_bytes) {
            *copy = *entry;
            found = true;
        }
    pthread_mutex_unlock(&allocations_lock);
    return found;
}

static int do_malloc(void **pointer, size_t size_bytes) {
    return allocate(pointer, size_bytes, cudaMemoryTypeDevice);
}

static int do_host_alloc(void **pointer, size_t size_bytes, unsigned flags) {
    (void)flags;
    return allocate(pointer, size_bytes, cudaMemoryTypeHost);
}

static int do_malloc_async(void **pointer, size_t size_bytes, void *pool, struct stream *stream) {
    (void)pool;
    if (capture_active(stream_capture(stream)))
        double_fail("unsupported cudaMallocFromPoolAsync in a captured graph");
    return allocate(pointer, size_bytes, cudaMemoryTypeDevice);
}

static void release_later(void *pointer) {
    release(pointer);
}

static int do_free_async(void *pointer, struct stream *stream) {
    if (capture_active(stream_capture(stream)))
        double_fail("unsupported cudaFreeAsync in a captured graph");
    stream_call(stream, release_later, pointer);
    return CUDA_SUCCESS;
}

static int do_pool_create(void **pool, const void *properties) {
    (void)properties;
    static char only_pool;
    *pool = &only_pool;
    return CUDA_SUCCESS;
}

static int do_host_get_device_pointer(void **device, void *host, unsigned flags) {
    (void)flags;
    *device = host;
    return CUDA_SUCCESS;
}

static int do_memcpy(void *to, const void *from, size_t size_bytes, int kind) {
    (void)kind;
    memmove(to, from, size_bytes);
    return CUDA_SUCCESS;
}

static int do_memset(void *to, int value, size_t size_bytes) {
    memset(to, value, size_bytes);
    return CUDA_SUCCESS;
}

static int do_pointer_get_attributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    struct allocation entry;
    memset(attributes, 0, sizeof *attributes);
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->hostPointer = (void *)(uintptr_t)pointer;
    if (allocation_of(pointer, &entry)) {
        attributes->type = entry.type;
        attributes->devicePointer = (void *)(uintptr_t)pointer;
    }
    return CUDA_SUCCESS;
}

/* ---- the device ---- */

static int do_get_device(int *device) {
    *device = 0;
    return CUDA_SUCCESS;
}

static int do_set_device(int device) {
    return device == 0 ? CUDA_SUCCESS : CUDA_INVALID_VALUE;
}

static int do_get_device_count(int *count) {
    *count = 1;
    return CUDA_SUCCESS;
}

static int do_get_version(int *version) {
    *version = DRIVER_VERSION;
    return CUDA_SUCCESS;
}

static int do_device_get_attribute(int *value, int attribute, int device) {
    (void)device;
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
        *value = COMPUTE_MAJOR;
        break;
    case cudaDevAttrComputeCapabilityMinor:
        *value = COMPUTE_MINOR;
        break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = SHARED_BYTES;
        break;
    case cudaDevAttrMultiProcessorCount:
        *value = MULTIPROCESSORS;
        break;
    default:
        double_log("device attribute %d reads as 0", attribute);
        *value = 0;
    }
    return CUDA_SUCCESS;
}

static int do_get_device_properties(struct cudaDeviceProp *properties, int device) {
    (void)device;
    memset(properties, 0, sizeof *properties);
    snprintf(properties->name, sizeof properties->name, "CUDA test double");
    properties->totalGlobalMem = 80ull << 30;
    properties->warpSize = 32;
    properties->major = COMPUTE_MAJOR;
    properties->minor = COMPUTE_MINOR;
    properties->multiProcessorCount = MULTIPROCESSORS;
    properties->pciBusID = 1 + gpu_index();
    return CUDA_SUCCESS;
}

static int do_device_get_pci_bus_id(char *text, int size_bytes, int device) {
    (void)device;
    snprintf(text, (size_t)size_bytes, "0000:%02x:00.0", 1 + gpu_index());
    return CUDA_SUCCESS;
}

static int do_device_get_by_pci_bus_id(int *device, const char *text) {
    (void)text;
    *device = 0;
    return CUDA_SUCCESS;
}

static int do_device_can_access_peer(int *can, int device, int peer) {
    (void)device, (void)peer;
    *can = 0;
    return CUDA_SUCCESS;
}

/* ---- errors ---- */

static int do_success(void) {
    return CUDA_SUCCESS;
}

static const char *do_get_error_string(int error) {
    return error == CUDA_SUCCESS ? "no error" : "error of the CUDA test double";
}

static int do_not_supported(void) {
    return CUDA_NOT_SUPPORTED;
}

/* ---- kernels and the driver ---- */

struct dim3 {
    unsigned x, y, z;
};

static int do_get_func_by_symbol(void **function, const void *symbol) {
    *function = (void *)(uintptr_t)symbol;
    return CUDA_SUCCESS;
}

static int do_func_get_attributes(struct cudaFuncAttributes *attributes, const void *function) {
    (void)function;
    memset(attributes, 0, sizeof *attributes);
    attributes->binaryVersion = 10 * COMPUTE_MAJOR + COMPUTE_MINOR;
    return CUDA_SUCCESS;
}

static _Noreturn void unsupported_launch(const void *function) {
    const char *name = symbol_name(function);
    double_fail("unsupported kernel %s", name ? name : "(no name)");
}

static int do_launch_kernel(const void *function, struct dim3 grid, struct dim3 block, void **arguments,
                            size_t shared_bytes, struct stream *stream) {
    (void)grid, (void)block, (void)arguments, (void)shared_bytes, (void)stream;
    unsupported_launch(function);
}

static int do_launch_kernel_ex(const void *configuration, const void *function, void **arguments) {
    (void)configuration, (void)arguments;
    unsupported_launch(function);
}

static int do_get_driver_entry_point(const char *name, void **function, unsigned long long flags, int *status) {
    (void)flags;
    *function = NULL;
    for (const struct replacement *r = driver_replacements; r->name != NULL; r++)
        if (strcmp(r->name, name) == 0)
            *function = r->function;
    if (*function == NULL)
        double_log("driver function %s is absent", name);
    if (status != NULL)
        *status = *function != NULL ? 0 : ENTRY_POINT_SYMBOL_NOT_FOUND;
    return CUDA_SUCCESS;
}

static int do_get_driver_entry_point_by_version(const char *name, void **function, unsigned version,
                                                unsigned long long flags, int *status) {
    (void)version;
    return do_get_driver_entry_point(name, function, flags, status);
}

#define PLAYED(name, function) {#name, (void *)(function)}

const struct replacement runtime_replacements[] = {
    PLAYED(cudaMalloc, do_malloc),
    PLAYED(cudaFree, release),
    PLAYED(cudaHostAlloc, do_host_alloc),
    PLAYED(cudaFreeHost, release),
    PLAYED(cudaMallocFromPoolAsync, do_malloc_async),
    PLAYED(cudaFreeAsync, do_free_async),
    PLAYED(cudaMemPoolCreate, do_pool_create),
    PLAYED(cudaMemPoolDestroy, do_success),
    PLAYED(cudaMemPoolSetAttribute, do_success),
    PLAYED(cudaHostGetDevicePointer, do_host_get_device_pointer),
    PLAYED(cudaHostRegister, do_success),
    PLAYED(cudaHostUnregister, do_success),
    PLAYED(cudaMemcpy, do_memcpy),
    PLAYED(cudaMemset, do_memset),
    PLAYED(cudaPointerGetAttributes, do_pointer_get_attributes),
    PLAYED(cudaIpcGetMemHandle, do_not_supported),
    PLAYED(cudaIpcOpenMemHandle, do_not_supported),
    PLAYED(cudaIpcCloseMemHandle, do_not_supported),
    PLAYED(cudaGetDevice, do_get_device),
    PLAYED(cudaSetDevice, do_set_device),
    PLAYED(cudaGetDeviceCount, do_get_device_count),
    PLAYED(cudaDriverGetVersion, do_get_version),
    PLAYED(cudaRuntimeGetVersion, do_get_version),
    PLAYED(cudaDeviceGetAttribute, do_device_get_attribute),
    PLAYED(cudaGetDeviceProperties, do_get_device_properties),
    PLAYED(cudaGetDeviceProperties_v2, do_get_device_properties),
    PLAYED(cudaDeviceGetPCIBusId, do_device_get_pci_bus_id),
    PLAYED(cudaDeviceGetByPCIBusId, do_device_get_by_pci_bus_id),
    PLAYED(cudaDeviceCanAccessPeer, do_device_can_access_peer),
    PLAYED(cudaDeviceEnablePeerAccess, do_not_supported),
    PLAYED(cudaDeviceSetLimit, do_success),
    PLAYED(cudaGetLastError, do_success),
    PLAYED(cudaPeekAtLastError, do_success),
    PLAYED(cudaGetErrorString, do_get_error_string),
    PLAYED(cudaGetErrorName, do_get_error_string),
    PLAYED(cudaGetFuncBySymbol, do_get_func_by_symbol),
    PLAYED(cudaFuncGetAttributes, do_func_get_attributes),
    PLAYED(cudaFuncSetAttribute, do_success),
    PLAYED(cudaLaunchKernel, do_launch_kernel),
    PLAYED(cudaLaunchKernelExC, do_launch_kernel_ex),
    PLAYED(cudaGetDriverEntryPoint, do_get_driver_entry_point),
    PLAYED(cudaGetDriverEntryPointByVersion, do_get_driver_entry_point_by_version),
    {NULL, NULL},
};
