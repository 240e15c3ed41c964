/* Launches that the double must refuse and that NCCL makes only where the hardware has more than a plain GPU.
 *
 * A program of its own: kernel.c plays a launch that is made up here, one channel with one batch of one work.  The
 * names of device functions are made up too, for libnccl has none of those that are refused.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "double.h"

static const char *device_function = "ncclDevFunc_AllReduce_Sum_f32_RING_SIMPLEv";

void double_fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    abort();
}

void double_log(const char *format, ...) {
    (void)format;
}

void *symbol_address(const char *name) {
    static const void *table[1] = {&device_function};
    return strcmp(name, "ncclDevFuncTable") == 0 ? table : NULL;
}

const char *symbol_name(const void *address) {
    return address == &device_function ? device_function : NULL;
}

struct launch {
    struct ncclDevKernelArgs head;
    struct ncclDevWorkBatch batch;
    union {
        struct ncclDevWorkColl collective;
        struct ncclDevWorkP2p point_to_point;
    } work;
};

/* Set a bit field: layout.h can only read it, so its place is where a single bit makes it 1. */
#define PUT(structure, field, object, value)                               \
    for (unsigned place = 0; place < 8 * sizeof(struct structure); place++) { \
        struct structure alone = {0};                                      \
        set_bits(alone.bytes, place, 1);                                   \
        if (structure##_##field(&alone) == 1)                              \
            set_bits((object)->bytes, place, value);                       \
    }

static void set_bits(unsigned char *bytes, unsigned place, unsigned value) {
    for (; value != 0; value >>= 1, place++)
        bytes[place / 8] |= (unsigned char)((value & 1) << place % 8);
}

/* One channel sends, or receives, in a buffer that is registered. */
static void point_to_point(struct launch *launch, bool send) {
    struct ncclDevWorkP2p *work = &launch->work.point_to_point;
    device_function = "ncclDevFunc_SendRecvv";
    work->nP2pChannels = 1;
    work->nSendChannels = send;
    work->nRecvChannels = !send;
    work->sendRank = work->recvRank = 1;
}

int main(int count, char **words) {
    struct launch launch = {0};
    struct ncclKernelComm comm = {0};
    const char *kernel = "_Z40ncclDevKernel_AllReduce_Sum_f32_RING_LL24ncclDevKernelArgsStorageILm4096EE";
    const char *what = count == 2 ? words[1] : "";
    bool sends = strncmp(what, "send-", 5) == 0, receives = strncmp(what, "receive-", 8) == 0;
    unsigned type = sends || receives || strcmp(what, "collective-as-point-to-point") == 0 ? ncclDevWorkTypeP2p
                    : strcmp(what, "work-type") == 0                                        ? 2
                                                                                            : ncclDevWorkTypeColl;
    launch.head.comm = &comm;
    launch.head.channelMask = 1;
    launch.head.workStorageType = ncclDevWorkStorageTypeArgs;
    launch.batch.offsetBase = offsetof(struct launch, work);
    launch.batch.offsetBitset = 1;
    PUT(ncclDevWorkBatch, workType, &launch.batch, type);
    if (sends || receives)
        point_to_point(&launch, sends);
    if (strcmp(what, "registered") == 0)
        PUT(ncclDevWorkColl, regUsed, &launch.work.collective, 1);
    if (strcmp(what, "registered-with-network") == 0)
        PUT(ncclDevWorkColl, netRegUsed, &launch.work.collective, 1);
    if (strcmp(what, "send-registered") == 0)
        PUT(ncclDevWorkP2p, sendIpcReg, &launch.work.point_to_point, 1);
    if (strcmp(what, "send-registered-with-network") == 0)
        PUT(ncclDevWorkP2p, sendNetReg, &launch.work.point_to_point, 1);
    if (strcmp(what, "receive-registered") == 0)
        PUT(ncclDevWorkP2p, recvIpcReg, &launch.work.point_to_point, 1);
    if (strcmp(what, "receive-registered-with-network") == 0)
        PUT(ncclDevWorkP2p, recvNetReg, &launch.work.point_to_point, 1);
    if (strcmp(what, "tree-of-allgather") == 0)
        device_function = "ncclDevFunc_AllGather_TREE_SIMPLEv";
    if (strcmp(what, "another-kernel") == 0)
        kernel = "_Z9somethingv";
    kernel_run(kernel_new(kernel, &launch, sizeof launch));
    return 0;
}
