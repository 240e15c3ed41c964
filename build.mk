# What is compiled: BPF objects (for both architectures, on any machine) and the demo's workload.
CLANG ?= clang
LLVM_STRIP ?= llvm-strip
CC ?= gcc

BPF_SOURCES := $(wildcard probes/bpf/*.bpf.c)
BPF_HEADERS := $(wildcard probes/bpf/*.h)
BPF_OBJECTS := $(BPF_SOURCES:.bpf.c=.x86.bpf.o) $(BPF_SOURCES:.bpf.c=.arm64.bpf.o)
# Where a checkout lies is nobody's business, and the same commit gives the same bytes.
WITHOUT_ITS_PLACE := -ffile-prefix-map=$(CURDIR)=.
BPF_CFLAGS := -g -O2 -Wall -Wextra -Werror -target bpf -mcpu=v3 $(WITHOUT_ITS_PLACE)

BUILT := $(BPF_OBJECTS)

# Which commit it is: `railscope --version` and build_info say it.  A source distribution brings the file along.
REVISION := probes/revision.txt
ifneq ($(shell git rev-parse --git-dir 2>/dev/null),)
BUILT += $(REVISION)
.PHONY: revision
revision:
$(REVISION): revision
	@now=$$(git rev-parse --short=12 HEAD)$$(git diff --quiet HEAD -- || echo -dirty); \
		[ "$$now" = "$$(cat $@ 2>/dev/null)" ] || echo "$$now" > $@
endif

probes/bpf/%.x86.bpf.o: probes/bpf/%.bpf.c $(BPF_SOURCES) $(BPF_HEADERS)
	$(CLANG) $(BPF_CFLAGS) -I/usr/include/$(shell $(CC) -print-multiarch) -D__TARGET_ARCH_x86 -c $< -o $@
	$(LLVM_STRIP) -g $@
probes/bpf/%.arm64.bpf.o: probes/bpf/%.bpf.c $(BPF_SOURCES) $(BPF_HEADERS)
	$(CLANG) $(BPF_CFLAGS) -I/usr/include/$(shell $(CC) -print-multiarch) -D__TARGET_ARCH_arm64 -c $< -o $@
	$(LLVM_STRIP) -g $@

# `make` alone must not mean the first file below.
.DEFAULT_GOAL := setup

# The testbed's workload: a library with NCCL's interface and the program that calls it.
# -g: observers read struct layouts from DWARF.  Every entry point begins with a push (of the frame pointer, and before
# any early return), so that a uprobe there is emulated instead of single-stepped.  -fwrapv: integers wrap as on a GPU.
WORKLOAD_LIBRARY := testbed/bin/librailscope-workload.so
WORKLOAD_DRIVER := testbed/bin/railscope-workload
WORKLOAD_DRIVER_SOURCES := $(wildcard testbed/workload/driver*.c)
WORKLOAD_LIBRARY_SOURCES := $(filter-out $(WORKLOAD_DRIVER_SOURCES),$(wildcard testbed/workload/*.c))
WORKLOAD_HEADERS := $(wildcard testbed/workload/*.h)
WORKLOAD_CFLAGS := -std=gnu11 -g -O3 -Wall -Wextra -Werror -pthread -fPIC -fvisibility=hidden -fwrapv \
	-fno-omit-frame-pointer -fno-optimize-sibling-calls $(WITHOUT_ITS_PLACE) \
	$(shell $(CC) -fno-shrink-wrap -E -x c /dev/null >/dev/null 2>&1 && echo -fno-shrink-wrap)
BUILT += $(WORKLOAD_LIBRARY) $(WORKLOAD_DRIVER)

$(WORKLOAD_LIBRARY): $(WORKLOAD_LIBRARY_SOURCES) $(WORKLOAD_HEADERS)
	@mkdir -p $(@D)
	$(CC) $(WORKLOAD_CFLAGS) -shared -Wl,--build-id -Wl,-soname,$(@F) $(WORKLOAD_LIBRARY_SOURCES) -o $@
$(WORKLOAD_DRIVER): $(WORKLOAD_DRIVER_SOURCES) $(WORKLOAD_HEADERS) $(WORKLOAD_LIBRARY)
	@mkdir -p $(@D)
	$(CC) $(WORKLOAD_CFLAGS) -Wl,--build-id -Wl,-rpath,'$$ORIGIN' $(WORKLOAD_DRIVER_SOURCES) $(WORKLOAD_LIBRARY) -lm -o $@

# What samples counters in a thread without an interpreter; without it Python does.  For the other machine by a cross
# compiler: `make probes/native/beats.aarch64.so CC=aarch64-linux-gnu-gcc`.
BEATS_LIBRARY := probes/native/beats.$(shell uname -m).so
BUILT += $(BEATS_LIBRARY)

probes/native/beats.%.so: probes/native/beats.c
	$(CC) -std=gnu11 -g -O2 -Wall -Wextra -Werror -pthread -fPIC -fvisibility=hidden -shared -Wl,--build-id $(WITHOUT_ITS_PLACE) $< -o $@
