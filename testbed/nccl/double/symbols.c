/* Names and addresses in libnccl's .symtab: the wheel ships it, the CUDA runtime's local functions and
 * NCCL's device function table included. */
#include <elf.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "double.h"

static struct {
    uintptr_t load_address;
    const Elf64_Sym *symbols;
    size_t count;
    const char *strings;
} library;

static const Elf64_Shdr *section(const unsigned char *file, const char *name) {
    const Elf64_Ehdr *head = (const void *)file;
    const Elf64_Shdr *sections = (const void *)(file + head->e_shoff);
    const char *names = (const char *)file + sections[head->e_shstrndx].sh_offset;
    for (size_t i = 0; i < head->e_shnum; i++)
        if (strcmp(names + sections[i].sh_name, name) == 0)
            return &sections[i];
    double_fail("libnccl has no section %s: the double needs the unstripped library of the wheel", name);
}

static void check_build_id(const unsigned char *file) {
    const Elf64_Shdr *note = section(file, ".note.gnu.build-id");
    const Elf64_Nhdr *head = (const void *)(file + note->sh_offset);
    const unsigned char *id = (const unsigned char *)(head + 1) + ((head->n_namesz + 3u) & ~3u);
    char text[129] = "";
    for (size_t i = 0; i < head->n_descsz && i < 64; i++)
        snprintf(text + 2 * i, 3, "%02x", id[i]);
    if (strcmp(text, LAYOUT_BUILD_ID) != 0)
        double_fail("this libnccl has build-id %s, the double was built for %s: build it again", text, LAYOUT_BUILD_ID);
}

void symbols_load(const char *path, uintptr_t load_address) {
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    struct stat facts;
    if (descriptor < 0 || fstat(descriptor, &facts) != 0)
        double_fail("cannot read %s: %m", path);
    unsigned char *file = mmap(NULL, (size_t)facts.st_size, PROT_READ, MAP_PRIVATE, descriptor, 0);
    if (file == MAP_FAILED)
        double_fail("cannot map %s: %m", path);
    close(descriptor);
    check_build_id(file);
    const Elf64_Shdr *symbols = section(file, ".symtab"), *strings = section(file, ".strtab");
    /* Copies: mapping the file for good would make the process look as if it had libnccl loaded twice. */
    Elf64_Sym *symbol_copy = malloc(symbols->sh_size);
    char *string_copy = malloc(strings->sh_size);
    if (symbol_copy == NULL || string_copy == NULL)
        double_fail("out of memory");
    memcpy(symbol_copy, file + symbols->sh_offset, symbols->sh_size);
    memcpy(string_copy, file + strings->sh_offset, strings->sh_size);
    library.load_address = load_address;
    library.count = symbols->sh_size / sizeof *symbol_copy;
    library.symbols = symbol_copy;
    library.strings = string_copy;
    munmap(file, (size_t)facts.st_size);
}

void *symbol_address(const char *name) {
    for (size_t i = 0; i < library.count; i++)
        if (library.symbols[i].st_value != 0 && strcmp(library.strings + library.symbols[i].st_name, name) == 0)
            return (void *)(library.load_address + library.symbols[i].st_value);
    return NULL;
}

const char *symbol_name(const void *address) {
    uintptr_t value = (uintptr_t)address - library.load_address;
    for (size_t i = 0; i < library.count; i++)
        if (library.symbols[i].st_value == value && ELF64_ST_TYPE(library.symbols[i].st_info) == STT_FUNC)
            return library.strings + library.symbols[i].st_name;
    return NULL;
}

void symbols_each_cuda(void (*found)(const char *name, void *address, size_t size_bytes)) {
    for (size_t i = 0; i < library.count; i++) {
        const Elf64_Sym *symbol = &library.symbols[i];
        const char *name = library.strings + symbol->st_name;
        if (ELF64_ST_TYPE(symbol->st_info) == STT_FUNC && symbol->st_value != 0 && strncmp(name, "cuda", 4) == 0 &&
            name[4] >= 'A' && name[4] <= 'Z')
            found(name, (void *)(library.load_address + symbol->st_value), symbol->st_size);
    }
}
