/* Redirect libnccl's CUDA runtime to the double.
 *
 * The wheel links the CUDA runtime statically, so no dynamic symbol can be interposed.  Its functions do
 * stand in .symtab as local symbols: the first bytes of each get a jump to our function of that name, in
 * this process's private copy of the page.  Functions we do not have get a jump to a small stub that says
 * so once and reports success, unless they would have moved memory, launched something or ordered work.
 *
 * It happens when the double is loaded, if libnccl is there already, or else after the dlopen() that
 * brings it, which is why dlopen is interposed.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "double.h"

enum { JUMP_BYTES = 13, STUB_BYTES = 32, STUBS_MAX = 1024 };

static unsigned char *stubs;
static const char *stub_names[STUBS_MAX];
static atomic_bool stub_said[STUBS_MAX];
static size_t stub_count;
static int own_memory;

void double_fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "cuda-double[%d]: ", getpid());
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    abort();
}

void double_log(const char *format, ...) {
    if (getenv("CUDA_DOUBLE_LOG") == NULL)
        return;
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "cuda-double[%d]: ", getpid());
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
}

static int unknown_function(int index) {
    const char *name = stub_names[index];
    if (strstr(name, "Memcpy") || strstr(name, "Memset") || strstr(name, "Launch"))
        double_fail("unsupported function %s: it would have moved memory or launched work", name);
    if (strstr(name, "Stream") || strstr(name, "Event") || strstr(name, "Graph"))
        double_fail("unsupported function %s: it would have ordered work", name);
    if (!atomic_exchange(&stub_said[index], true))
        fprintf(stderr, "cuda-double[%d]: %s is not played, success reported\n", getpid(), name);
    return CUDA_SUCCESS;
}

static void *stub_for(const char *name) {
    if (stub_count == STUBS_MAX)
        double_fail("more than %d unknown functions", STUBS_MAX);
    unsigned char *code = stubs + stub_count * STUB_BYTES, *at = code;
    uint32_t index = (uint32_t)stub_count;
    uint64_t target = (uint64_t)(uintptr_t)unknown_function;
    *at++ = 0xbf; /* mov $index, %edi */
    memcpy(at, &index, 4);
    at += 4;
    *at++ = 0x48; /* movabs $target, %rax */
    *at++ = 0xb8;
    memcpy(at, &target, 8);
    at += 8;
    *at++ = 0xff; /* jmp *%rax */
    *at++ = 0xe0;
    stub_names[stub_count++] = name;
    return code;
}

static void *replacement_of(const char *name) {
    const struct replacement *tables[] = {runtime_replacements, stream_replacements, capture_replacements,
                                          graph_replacements};
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
        for (const struct replacement *r = tables[i]; r->name != NULL; r++)
            if (strcmp(r->name, name) == 0)
                return r->function;
    return NULL;
}

/* Write into libnccl's code as a debugger does: its mapping keeps its protection, so that the process has
 * the mappings of a real one, and a uprobe set at this moment is not lost (the kernel sets none in writable
 * mappings). */
static void write_code(void *address, const void *bytes, size_t size_bytes) {
    if (pwrite(own_memory, bytes, size_bytes, (off_t)(uintptr_t)address) != (ssize_t)size_bytes)
        double_fail("cannot write libnccl's code through /proc/self/mem: %m");
}

static void redirect(const char *name, void *address, size_t size_bytes) {
    if (size_bytes < JUMP_BYTES)
        double_fail("%s has only %zu bytes, no room for a jump", name, size_bytes);
    void *function = replacement_of(name);
    uint64_t target = (uint64_t)(uintptr_t)(function ? function : stub_for(name));
    unsigned char jump[JUMP_BYTES] = {0x49, 0xbb}; /* movabs $target, %r11; jmp *%r11 */
    memcpy(jump + 2, &target, 8);
    jump[10] = 0x41;
    jump[11] = 0xff;
    jump[12] = 0xe3;
    write_code(address, jump, JUMP_BYTES);
}

static int is_nccl(struct dl_phdr_info *info, size_t size, void *result) {
    (void)size;
    const char *slash = strrchr(info->dlpi_name, '/');
    if (strncmp(slash ? slash + 1 : info->dlpi_name, "libnccl.so", 10) != 0)
        return 0;
    *(struct dl_phdr_info *)result = *info;
    return 1;
}

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void install(void) {
    static bool installed;
    struct dl_phdr_info nccl;
    pthread_mutex_lock(&lock);
    if (!installed && dl_iterate_phdr(is_nccl, &nccl)) {
        installed = true;
        stubs = mmap(NULL, STUBS_MAX * STUB_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (stubs == MAP_FAILED)
            double_fail("out of memory");
        symbols_load(nccl.dlpi_name, nccl.dlpi_addr);
        own_memory = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
        if (own_memory < 0)
            double_fail("cannot open /proc/self/mem: %m");
        symbols_each_cuda(redirect);
        close(own_memory);
        mprotect(stubs, STUBS_MAX * STUB_BYTES, PROT_READ | PROT_EXEC);
        double_log("redirected the CUDA runtime of %s, %zu functions of it to nothing", nccl.dlpi_name, stub_count);
    }
    pthread_mutex_unlock(&lock);
}

/* Our function of this name of the CUDA runtime, or NULL: for programs that need a stream to give to NCCL. */
__attribute__((visibility("default"))) void *cuda_double_function(const char *name) {
    return replacement_of(name);
}

__attribute__((constructor)) static void at_load(void) {
    install();
}

__attribute__((visibility("default"))) void *dlopen(const char *file, int flags) {
    void *(*real)(const char *, int) = (void *(*)(const char *, int))dlsym(RTLD_NEXT, "dlopen");
    void *handle = real(file, flags);
    if (handle != NULL)
        install();
    return handle;
}
