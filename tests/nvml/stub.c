/* A simulated libnvidia-ml.so.1: GPUs, NVLinks and counters as a script says.
 *
 * A script is lines of words; `nvml_stub` takes one line, and the file that NVML_STUB_SCRIPT names is read at every
 * nvmlInitWithFlags and again when it has changed, so that another process can be driven too:
 *
 *   reset                                    no GPUs, no errors
 *   gpus N                                   N GPUs on PCI buses 1b, 1c, …
 *   link GPU LINK STATE TYPE PCI             a link; TYPE -1: not supported; PCI 0: not supported, else a bus number
 *   states GPU                               field 165 tells the states of its links, as from Hopper on
 *   field GPU FIELD SCOPE CODE KIND VALUE    one field value; KIND is nvmlValueType_t
 *   grow GPU FIELD SCOPE STEP                adds STEP to a field at every reading of it
 *   fail GPU CODE                            every function of this GPU returns CODE; 0: none does
 *   refuse-fields-from FIELD                 a call that asks for FIELD or above fails as a whole; 0: none does
 *   fabric GPU STATE HEALTH                  state and health mask of the fabric; STATE -1: not supported
 *   joined GPU STATUS CLIQUE BYTE            how it joined the fabric; BYTE stands in all places of the cluster's UUID
 *   clocks GPU REASONS                       what holds its clocks down, a mask; -1: not supported
 *   events GPU TYPES                         which events it can tell, a mask; 0: none, not supported
 *   event GPU TYPES DATA                     it happens: who registered for one of these types is told
 *   init CODE                                nvmlInitWithFlags returns CODE
 *   hang GPU                                 functions of this GPU do not return, GPU -1: nvmlInitWithFlags does not
 *   release                                  whatever hangs goes on
 *
 * Without NVML's header: the structs below are written after NVIDIA's API reference.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, TIMEOUT = 10 };
enum { GPUS = 16, LINKS = 36, FIELDS = 32768, SETS = 8, EVENTS = 1024, LINK_STATE = 165 };

struct link {
    int present, state, type;
    unsigned bus;
};
struct gpu {
    int failure, hangs, states_by_field, fabric_state, fabric_status;
    unsigned fabric_health, fabric_clique;
    unsigned char fabric_cluster;
    long long clocks;
    unsigned long long events;
    struct link links[LINKS];
};
struct field {
    int used, gpu;
    unsigned field, scope;
    int code, kind;
    unsigned long long value, step;
};
struct pci_info {
    char legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};
struct event {
    void *device;
    unsigned long long types, data;
    unsigned gpu_instance, compute_instance;
};
struct event_set {
    int used, first, last;
    unsigned long long registered[GPUS];
    struct event waiting[EVENTS];
};
struct field_value {
    unsigned field, scope;
    long long timestamp, latency;
    int kind, code;
    union {
        double d;
        unsigned ui;
        unsigned long long ull;
    } value;
};
struct fabric_info {
    unsigned version;
    unsigned char cluster[16];
    int status;
    unsigned clique;
    unsigned char state;
    unsigned health;
};
_Static_assert(sizeof(struct pci_info) == 68 && sizeof(struct field_value) == 40 && sizeof(struct fabric_info) == 36,
               "NVML's sizes");

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t released = PTHREAD_COND_INITIALIZER;
static struct gpu gpus[GPUS];
static struct field fields[FIELDS];
static struct event_set sets[SETS];
static unsigned count, refused_from;
static int initialised, init_code, init_hangs;
static struct timespec script_time;

/* Where a field's value is, or would be: a host's GPUs have thousands.  NULL: there is no room. */
static struct field *slot_of(int gpu, unsigned field, unsigned scope) {
    unsigned at = (((unsigned)gpu * 512 + field) * 64 + scope % 64) * 2654435761u >> 17;
    for (unsigned tries = 0; tries < FIELDS; tries++, at = (at + 1) % FIELDS)
        if (!fields[at].used || (fields[at].gpu == gpu && fields[at].field == field && fields[at].scope == scope))
            return &fields[at];
    return NULL;
}

static struct field *find(int gpu, unsigned field, unsigned scope) {
    struct field *slot = slot_of(gpu, field, scope);
    return slot && slot->used ? slot : NULL;
}

static void release(void) {
    init_hangs = 0;
    for (int i = 0; i < GPUS; i++)
        gpus[i].hangs = 0;
    pthread_cond_broadcast(&released);
}

static void happen(int gpu, unsigned types, unsigned long long data) {
    for (int i = 0; i < SETS; i++) {
        struct event_set *set = &sets[i];
        if (set->used && set->registered[gpu] & types && set->last < EVENTS)
            set->waiting[set->last++] = (struct event){&gpus[gpu], types & set->registered[gpu], data, ~0u, ~0u};
    }
}

/* Returns 0, or -1 for a line that is not understood. */
static int obey(const char *line) {
    int gpu, a, b, c;
    unsigned field, scope;
    unsigned long long value;
    if (line[0] == '#' || line[0] == '\n' || line[0] == 0)
        return 0;
    if (!strncmp(line, "reset", 5)) {
        release();
        memset(gpus, 0, sizeof gpus);
        memset(sets, 0, sizeof sets);
        memset(fields, 0, sizeof fields);
        count = refused_from = 0;
        init_code = 0;
        return 0;
    }
    if (!strncmp(line, "release", 7)) {
        release();
        return 0;
    }
    if (sscanf(line, "gpus %d", &a) == 1 && a >= 0 && a <= GPUS) {
        count = (unsigned)a;
        return 0;
    }
    if (sscanf(line, "init %d", &a) == 1) {
        init_code = a;
        return 0;
    }
    if (sscanf(line, "hang %d", &gpu) == 1 && gpu >= -1 && gpu < GPUS) {
        *(gpu < 0 ? &init_hangs : &gpus[gpu].hangs) = 1;
        return 0;
    }
    if (sscanf(line, "refuse-fields-from %u", &field) == 1) {
        refused_from = field;
        return 0;
    }
    if (sscanf(line, "%*s %d", &gpu) != 1 || gpu < 0 || gpu >= GPUS)
        return -1;
    if (sscanf(line, "fail %*d %d", &a) == 1) {
        gpus[gpu].failure = a;
        return 0;
    }
    if (!strncmp(line, "states ", 7)) {
        gpus[gpu].states_by_field = 1;
        return 0;
    }
    if (sscanf(line, "fabric %*d %d %u", &a, &field) == 2) {
        gpus[gpu].fabric_state = a;
        gpus[gpu].fabric_health = field;
        return 0;
    }
    if (sscanf(line, "joined %*d %d %u %x", &a, &field, &scope) == 3) {
        gpus[gpu].fabric_status = a;
        gpus[gpu].fabric_clique = field;
        gpus[gpu].fabric_cluster = (unsigned char)scope;
        return 0;
    }
    if (sscanf(line, "events %*d %llu", &value) == 1) {
        gpus[gpu].events = value;
        return 0;
    }
    if (sscanf(line, "event %*d %u %llu", &field, &value) == 2) {
        happen(gpu, field, value);
        return 0;
    }
    if (sscanf(line, "clocks %*d %lld", (long long *)&value) == 1) {
        gpus[gpu].clocks = (long long)value;
        return 0;
    }
    if (sscanf(line, "link %*d %d %d %d %x", &a, &b, &c, &field) == 4 && a >= 0 && a < LINKS) {
        gpus[gpu].links[a] = (struct link){.present = 1, .state = b, .type = c, .bus = field};
        return 0;
    }
    if (sscanf(line, "field %*d %u %u %d %d %llu", &field, &scope, &a, &b, &value) == 5) {
        struct field *slot = slot_of(gpu, field, scope);
        if (!slot)
            return -1;
        *slot = (struct field){1, gpu, field, scope, a, b, value, 0};
        return 0;
    }
    if (sscanf(line, "grow %*d %u %u %llu", &field, &scope, &value) == 3) {
        struct field *slot = find(gpu, field, scope);
        if (!slot)
            return -1;
        slot->step = value;
        return 0;
    }
    return -1;
}

static void read_script(int always) {
    const char *path = getenv("NVML_STUB_SCRIPT");
    struct stat status;
    char line[256];
    if (!path || stat(path, &status))
        return;
    if (!always && status.st_mtim.tv_sec == script_time.tv_sec && status.st_mtim.tv_nsec == script_time.tv_nsec)
        return;
    FILE *file = fopen(path, "re");
    if (!file)
        return;
    script_time = status.st_mtim;
    while (fgets(line, sizeof line, file))
        if (obey(line))
            fprintf(stderr, "NVML stub: not understood: %s", line);
    fclose(file);
}

int nvml_stub(const char *line) {
    pthread_mutex_lock(&lock);
    int result = obey(line);
    pthread_mutex_unlock(&lock);
    return result;
}

/* Takes the lock and finds the GPU; on success the caller gives the lock back. */
static int enter(void *device, struct gpu **gpu) {
    unsigned index = (unsigned)((struct gpu *)device - gpus);
    pthread_mutex_lock(&lock);
    read_script(0);
    int code = !initialised ? UNINITIALIZED : index >= count ? INVALID_ARGUMENT : SUCCESS;
    if (!code) {
        while (gpus[index].hangs)
            pthread_cond_wait(&released, &lock);
        code = gpus[index].failure;
    }
    if (code)
        pthread_mutex_unlock(&lock);
    else
        *gpu = &gpus[index];
    return code;
}

static int leave(int code) {
    pthread_mutex_unlock(&lock);
    return code;
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    pthread_mutex_lock(&lock);
    read_script(1);
    while (init_hangs)
        pthread_cond_wait(&released, &lock);
    if (!init_code)
        initialised++;
    return leave(init_code);
}

int nvmlShutdown(void) {
    pthread_mutex_lock(&lock);
    int code = initialised ? SUCCESS : UNINITIALIZED;
    initialised -= initialised > 0;
    return leave(code);
}

const char *nvmlErrorString(int code) {
    return code ? "an error of the NVML stub" : "success";
}

int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    snprintf(version, length, "0.0.simulated");
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *number) {
    pthread_mutex_lock(&lock);
    *number = count;
    return leave(initialised ? SUCCESS : UNINITIALIZED);
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    struct gpu *gpu;
    if (index >= GPUS)
        return INVALID_ARGUMENT;
    int code = enter(&gpus[index], &gpu);
    if (code)
        return code;
    *device = gpu;
    return leave(SUCCESS);
}

int nvmlDeviceGetName(void *device, char *name, unsigned length) {
    struct gpu *gpu;
    int code = enter(device, &gpu);
    if (code)
        return code;
    snprintf(name, length, "Simulated GPU");
    return leave(SUCCESS);
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
    struct gpu *gpu;
    int code = enter(device, &gpu);
    if (code)
        return code;
    snprintf(uuid, length, "GPU-00000000-0000-0000-0000-%012d", (int)(gpu - gpus));
    return leave(SUCCESS);
}

int nvmlDeviceGetPciInfo_v3(void *device, struct pci_info *info) {
    struct gpu *gpu;
    int code = enter(device, &gpu);
    if (code)
        return code;
    memset(info, 0, sizeof *info);
    info->bus = 0x1b + (unsigned)(gpu - gpus);
    snprintf(info->bus_id, sizeof info->bus_id, "00000000:%02X:00.0", info->bus);
    return leave(SUCCESS);
}

static int enter_link(void *device, unsigned number, struct link **link) {
    struct gpu *gpu;
    int code = enter(device, &gpu);
    if (code)
        return code;
    if (number >= LINKS)
        return leave(INVALID_ARGUMENT);
    if (!gpu->links[number].present)
        return leave(NOT_SUPPORTED);
    *link = &gpu->links[number];
    return SUCCESS;
}

int nvmlDeviceGetNvLinkState(void *device, unsigned number, int *state) {
    struct link *link;
    int code = enter_link(device, number, &link);
    if (code)
        return code;
    *state = link->state;
    return leave(SUCCESS);
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned number, struct pci_info *info) {
    struct link *link;
    int code = enter_link(device, number, &link);
    if (code)
        return code;
    if (!link->bus)
        return leave(NOT_SUPPORTED);
    memset(info, 0, sizeof *info);
    info->bus = link->bus;
    return leave(SUCCESS);
}

int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned number, int *type) {
    struct link *link;
    int code = enter_link(device, number, &link);
    if (code)
        return code;
    if (link->type < 0)
        return leave(NOT_SUPPORTED);
    *type = link->type;
    return leave(SUCCESS);
}

int nvmlDeviceGetFieldValues(void *device, int number, struct field_value *values) {
    struct gpu *gpu;
    int code = enter(device, &gpu);
    if (code)
        return code;
    for (int i = 0; i < number; i++)
        if (refused_from && values[i].field >= refused_from)
            return leave(INVALID_ARGUMENT);
    for (int i = 0; i < number; i++) {
        if (gpu->states_by_field && values[i].field == LINK_STATE && values[i].scope < LINKS &&
            gpu->links[values[i].scope].present) {
            values[i].code = SUCCESS;
            values[i].kind = 1;
            values[i].value.ui = (unsigned)gpu->links[values[i].scope].state;
            continue;
        }
        struct field *field = find((int)(gpu - gpus), values[i].field, values[i].scope);
        values[i].code = field ? field->code : NOT_SUPPORTED;
        values[i].value.ull = 0xdeadbeefdeadbeef; /* undefined unless the code is success */
        if (values[i].code)
            continue;
        field->value += field->step;
        values[i].kind = field->kind;
        if (field->kind == 0)
            values[i].value.d = (double)field->value;
        else if (field->kind == 1)
            values[i].value.ui = (unsigned)field->value;
        else
            values[i].value.ull = field->value;
    }
    return leave(SUCCESS);
}

int nvmlDeviceGetGpuFabricInfoV(void *device, struct fabric_info *info) {
    struct gpu *gpu;
    int code = enter(device, &gpu);
    if (code)
        return code;
    if (gpu->fabric_state < 0)
        return leave(NOT_SUPPORTED);
    info->state = (unsigned char)gpu->fabric_state;
    info->status = gpu->fabric_status;
    info->clique = gpu->fabric_clique;
    memset(info->cluster, gpu->fabric_cluster, sizeof info->cluster);
    info->health = gpu->fabric_health;
    return leave(SUCCESS);
}

int nvmlDeviceGetCurrentClocksEventReasons(void *device, unsigned long long *reasons) {
    struct gpu *gpu;
    int code = enter(device, &gpu);
    if (code)
        return code;
    if (gpu->clocks < 0)
        return leave(NOT_SUPPORTED);
    *reasons = (unsigned long long)gpu->clocks;
    return leave(SUCCESS);
}

int nvmlDeviceGetSupportedEventTypes(void *device, unsigned long long *types) {
    struct gpu *gpu;
    int code = enter(device, &gpu);
    if (code)
        return code;
    *types = gpu->events;
    return leave(gpu->events ? SUCCESS : NOT_SUPPORTED);
}

int nvmlEventSetCreate(struct event_set **made) {
    pthread_mutex_lock(&lock);
    for (int i = 0; initialised && i < SETS; i++)
        if (!sets[i].used) {
            memset(&sets[i], 0, sizeof sets[i]);
            sets[i].used = 1;
            *made = &sets[i];
            return leave(SUCCESS);
        }
    return leave(initialised ? INVALID_ARGUMENT : UNINITIALIZED);
}

int nvmlDeviceRegisterEvents(void *device, unsigned long long types, struct event_set *set) {
    struct gpu *gpu;
    int code = enter(device, &gpu);
    if (code)
        return code;
    if (types & ~gpu->events)
        return leave(NOT_SUPPORTED);
    set->registered[gpu - gpus] |= types;
    return leave(SUCCESS);
}

int nvmlEventSetWait_v2(struct event_set *set, struct event *told, unsigned timeout_ms) {
    (void)timeout_ms; /* nobody waits here */
    pthread_mutex_lock(&lock);
    read_script(0);
    if (!initialised)
        return leave(UNINITIALIZED);
    for (unsigned i = 0; i < count; i++)
        if (set->registered[i] && gpus[i].failure)
            return leave(gpus[i].failure);
    if (set->first == set->last)
        return leave(TIMEOUT);
    *told = set->waiting[set->first++];
    if (set->first == set->last)
        set->first = set->last = 0;
    return leave(SUCCESS);
}

int nvmlEventSetFree(struct event_set *set) {
    pthread_mutex_lock(&lock);
    set->used = 0;
    return leave(initialised ? SUCCESS : UNINITIALIZED);
}
