"""The set-up of all tests: the devices at hand, and random numbers that are the same each time."""

import gc
import os
import sys
import tempfile

import pytest

# Tests are too small for several threads, and run in a process for each core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Threads that spin while they wait make bfloat16 ten times slower wherever something else runs, other tests included.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Two runs with different instruction sets must not write over each other's compiled code.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    os.path.join(
        tempfile.gettempdir(),
        f"ampkit-inductor-{os.getuid()}",
        *(os.environ.get(f"{one}_CPU_CAPABILITY", "native") for one in ("ATEN", "AMPKIT")),
    ),
)

import helpers
import torch
import torch._dynamo  # replaces torch.manual_seed; the first optimizer would import it in the midst of a test

import ampkit
from ampkit import kernels
from ampkit.casting import cpp_wrappers as wrappers
from ampkit.kernels import backend
from ampkit.libraries import cuda_is_emulated

# Launches of the emulation run from PTX too, before any tensor is allocated that a kernel may get.
if os.environ.get("AMPKIT_EMULATION") == "ptx":
    from ptx import launching

    kernels.implementation()
    launching.attach()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    return torch.device(request.param)


# What is built, and why it is missing where it is.
COMPILED = {
    "kernels": lambda: None if kernels.implementation().name == "extension" else kernels.implementation().why,
    "wrappers": lambda: None if wrappers.library is not None else wrappers.why,
}

WAITING = pytest.StashKey[int]()


def asks_for(item, parameter: str, value) -> bool:
    return getattr(item, "callspec", None) is not None and item.callspec.params.get(parameter) == value


# Tests of no use with this AMPKIT_EXTENSION. Without libraries what chooses between the wrappers finds only those in Python.
LEFT_OUT = {
    "off": lambda item: item.get_closest_marker("compiled") or asks_for(item, "in_python", True),
    "emulated": lambda item: item.get_closest_marker("cpu_kernels") or asks_for(item, "ops", "reference"),
}


@pytest.hookimpl(trylast=True)  # after -k and -m, so that only tests that were asked for count as waiting
def pytest_collection_modifyitems(config, items):
    """Leave out what cannot run here: tests of what is not there, or is beside the point, with this AMPKIT_EXTENSION, and tests
    that need GPUs.
    """
    if (left_out := LEFT_OUT.get(os.environ.get("AMPKIT_EXTENSION"))) is not None:
        useless = [item for item in items if left_out(item)]
        config.hook.pytest_deselected(items=useless)
        items[:] = [item for item in items if item not in set(useless)]
    if os.environ.get("AMPKIT_EMULATION") != "ptx":
        items[:] = [item for item in items if item.get_closest_marker("ptx") is None]
    if not cuda_is_emulated():
        items[:] = [item for item in items if item.get_closest_marker("emulated") is None]
    here = [item for item in items if gpus_needed(item) <= torch.cuda.device_count()]
    config.stash[WAITING] = len(items) - len(here)
    items[:] = here


def pytest_collection_finish(session):
    """Run the garbage collector less often: it walks all live objects, a cost that every test would pay."""
    gc.set_threshold(50_000, 20, 20)


def gpus_needed(item):
    return max((marker.kwargs.get("count", 1) for marker in item.iter_markers("cuda")), default=0)


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # a process of pytest-xdist, each of which collects all tests
        session.config.workeroutput["waiting"] = session.config.stash.get(WAITING, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    node.config.stash[WAITING] = getattr(node, "workeroutput", {}).get("waiting", 0)


def pytest_terminal_summary(terminalreporter, config):
    if waiting := config.stash.get(WAITING, 0):
        terminalreporter.write_line(f"{waiting} tests wait for a GPU")
    if cuda_is_emulated():
        which = "PTX and emulated CUDA" if os.environ.get("AMPKIT_EMULATION") == "ptx" else "emulated CUDA"
        terminalreporter.write_line(f"{which}: {len(terminalreporter.stats.get('passed', ()))} passed")


def pytest_runtest_setup(item):
    for marker in item.iter_markers("compiled"):
        if (why := COMPILED[marker.args[0]]()) is not None:
            pytest.skip(f"no compiled {marker.args[0]}: {why}")


@pytest.fixture(params=["reference", pytest.param("extension", marks=pytest.mark.compiled("kernels"))])
def ops(request, monkeypatch, device):
    """The multi-tensor operators, with the reference or with the extension behind them."""
    chosen = kernels.implementation()
    if request.param == "reference":
        monkeypatch.setattr(backend, "kernel_devices", frozenset())
    elif device.type == "cuda" and not chosen.cuda:
        pytest.skip(f"no CUDA kernels: {chosen.cuda_why}")
    return kernels


@pytest.fixture(params=[False, True], ids=["C++", "Python"])
def in_python(request):
    """Whether O1's wrappers are those in Python."""
    return request.param


@pytest.fixture
def threads_take_turns_often():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture(scope="module", autouse=True)
def earlier_heap_left_alone():
    """An `initialize` beside a live session has the collector walk the heap, where clients and compilers of earlier files have left
    so much that it takes half a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def accelerate_forgets():
    """Accelerate keeps the settings of one accelerator, or of one Trainer, in classes, for all later ones."""
    yield
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


@pytest.fixture(autouse=True)
def torch_left_as_found():
    """Sessions end with their test, and torch is then what it was: every attribute, by identity."""
    with helpers.torch_left_as_found():
        yield
        ampkit.close()
