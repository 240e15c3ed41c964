/* A stub of libnvidia-ml.so.1: eight GPUs without NVLink, without confidential computing.
 *
 * NCCL's topology detection loads NVML by name and calls some of it without checking for NULL.  What
 * is left out here NCCL treats as "not supported".  No NVML header is used: the functions below take
 * nothing but pointers and numbers.
 */
#include <stdio.h>

enum { NVML_SUCCESS = 0, NVML_INVALID_ARGUMENT = 2, NVML_NOT_SUPPORTED = 3, GPUS = 8 };
static char gpus[GPUS]; /* a device handle is the address of its byte */

int nvmlInit_v2(void) {
    return NVML_SUCCESS;
}

int nvmlShutdown(void) {
    return NVML_SUCCESS;
}

const char *nvmlErrorString(int error) {
    return error == NVML_SUCCESS ? "success" : "not supported by the NVML stub";
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = GPUS;
    return NVML_SUCCESS;
}

int nvmlDeviceGetHandleByIndex(unsigned index, void **device) {
    if (index >= GPUS)
        return NVML_INVALID_ARGUMENT;
    *device = &gpus[index];
    return NVML_SUCCESS;
}

int nvmlDeviceGetHandleByPciBusId(const char *bus_id, void **device) {
    unsigned domain, bus;
    if (sscanf(bus_id, "%x:%x:", &domain, &bus) != 2 || bus < 1 || bus > GPUS)
        return NVML_INVALID_ARGUMENT;
    *device = &gpus[bus - 1]; /* the double's GPU n is on bus n + 1 */
    return NVML_SUCCESS;
}

int nvmlDeviceGetIndex(void *device, unsigned *index) {
    *index = (unsigned)((char *)device - gpus);
    return NVML_SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    (void)device;
    *major = 8;
    *minor = 0;
    return NVML_SUCCESS;
}

int nvmlDeviceGetP2PStatus(void *device, void *peer, int capability, int *status) {
    (void)device, (void)peer, (void)capability;
    *status = 1; /* not supported by the chipset */
    return NVML_SUCCESS;
}

int nvmlDeviceGetCurrPcieLinkGeneration(void *device, unsigned *generation) {
    (void)device;
    *generation = 4;
    return NVML_SUCCESS;
}

int nvmlDeviceGetCurrPcieLinkWidth(void *device, unsigned *lanes) {
    (void)device;
    *lanes = 16;
    return NVML_SUCCESS;
}

#define NOT_SUPPORTED(name)                                                                                            \
    int name(void) {                                                                                                   \
        return NVML_NOT_SUPPORTED;                                                                                     \
    }
NOT_SUPPORTED(nvmlDeviceGetNvLinkState)
NOT_SUPPORTED(nvmlDeviceGetNvLinkRemotePciInfo)
NOT_SUPPORTED(nvmlDeviceGetNvLinkCapability)
NOT_SUPPORTED(nvmlDeviceGetFieldValues)
NOT_SUPPORTED(nvmlDeviceGetPciInfo_v3)
NOT_SUPPORTED(nvmlDeviceGetPciInfoExt)
NOT_SUPPORTED(nvmlDeviceGetPcieLinkMaxSpeed)
NOT_SUPPORTED(nvmlDeviceGetGpuFabricInfoV)
NOT_SUPPORTED(nvmlDeviceGetPlatformInfo)
NOT_SUPPORTED(nvmlSystemGetConfComputeState)
NOT_SUPPORTED(nvmlSystemGetConfComputeSettings)
