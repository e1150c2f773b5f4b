"""What all tests share: the devices at hand, and random numbers that are the same each time."""

import os
import types

import pytest

# Threads that spin while they wait make bfloat16 ten times slower wherever something else runs, other tests included.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch._dynamo  # replaces torch.manual_seed; the first optimizer would import it in the midst of a test

import ampkit
from ampkit import kernels
from ampkit.casting.library import dispatch
from ampkit.kernels import reference, switch

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


# What is built, and why it is missing where it is.
COMPILED = {
    "kernels": lambda: None if kernels.implementation().name == "extension" else kernels.implementation().why,
    "wrappers": lambda: None if dispatch().library is not None else dispatch().why,
}


def pytest_collection_modifyitems(config, items):
    """With AMPKIT_EXTENSION=off, tests of what is compiled are no part of the run; the run with it has them."""
    if os.environ.get("AMPKIT_EXTENSION") == "off":
        compiled = [item for item in items if item.get_closest_marker("compiled")]
        config.hook.pytest_deselected(items=compiled)
        items[:] = [item for item in items if item not in set(compiled)]


def pytest_runtest_setup(item):
    for marker in item.iter_markers("compiled"):
        if (why := COMPILED[marker.args[0]]()) is not None:
            pytest.skip(f"no compiled {marker.args[0]}: {why}")


@pytest.fixture(params=["reference", pytest.param("extension", marks=pytest.mark.compiled("kernels"))])
def ops(request, monkeypatch, device):
    """The multi-tensor operators, with the reference or with the extension behind them."""
    chosen = kernels.implementation()
    if request.param == "reference":
        monkeypatch.setattr(switch, "_kernel_devices", frozenset())
        monkeypatch.setattr(switch, "_extension", reference)
    elif device.type == "cuda" and not chosen.cuda:
        pytest.skip(f"no CUDA kernels: {chosen.cuda_why}")
    return kernels


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


NAMESPACES = (torch, torch.nn.functional, torch.Tensor, torch.linalg, torch.special)


@pytest.fixture(autouse=True)
def torch_left_as_found():
    """Sessions end with their test, and torch is then what it was: every attribute, by identity."""
    before = [dict(vars(namespace)) for namespace in NAMESPACES]
    yield
    ampkit.close()
    for namespace, attributes in zip(NAMESPACES, before):
        now = vars(namespace)
        changed = [name for name, value in attributes.items() if name not in now or now[name] is not value]
        # Modules that torch imports late become its attributes; copying a tensor leaves copyreg's cache on its class.
        new = now.keys() - attributes.keys() - {"__slotnames__"}
        added = [name for name in new if not isinstance(now[name], types.ModuleType)]
        assert not changed and not added, f"{namespace.__name__}: changed {changed}, added {added}"
