"""The one place that decides who computes the multi-tensor operators: the compiled extension or plain torch.

The choice is made once, at import, by AMPKIT_EXTENSION (libraries.py). implementation() tells what was chosen and why. The
faces (ops.py) say what to call, and serve() with whom.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ampkit.kernels import reference
from ampkit.kernels.checks import KERNEL_DTYPES, check_flag, check_lists
from ampkit.libraries import load_library

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Implementation:
    """Who computes the multi-tensor operators of this process, and why."""

    name: str  #: "extension" or "reference"
    why: str  #: in words, with the import error if there was one
    built_with: str | None = None  #: the torch version whose headers the extension was compiled with
    target: str = "2.10"  #: the oldest torch it runs on
    cpu_capability: str | None = None  #: the instruction set of the CPU kernels
    cuda: bool = False  #: whether the CUDA kernels are loaded
    cuda_why: str = "the extension is not loaded"


def implementation() -> Implementation:
    """What was chosen when ampkit was imported."""
    return _implementation


class Route:
    """Lists that one call can serve: who computes them, and what belongs to them."""

    def __init__(self, kernels: Any, lists: list, device: torch.device, indices: list[int] | None = None) -> None:
        self.kernels = kernels
        self.lists = lists
        self.device = device
        self.indices = indices  #: where these tensors stand in the caller's lists; None if they are all of them

    def here(self, number: Any) -> Any:
        """A number, or a tensor that holds one, where the kernels can read it."""
        if isinstance(number, torch.Tensor) and number.device != self.device:
            return number.to(self.device, non_blocking=True)
        return number

    def rows(self, vector: torch.Tensor | None) -> torch.Tensor | None:
        """Of a vector with one element a tensor, those of this route."""
        if vector is None or (self.indices is None and vector.device == self.device):
            return vector
        chosen = vector if self.indices is None else vector[torch.tensor(self.indices, device=vector.device)]
        return chosen.to(self.device)

    def flags(self, found_inf: torch.Tensor | None, first_bad: torch.Tensor | None) -> tuple:
        """Flags for the kernels to write, which report() brings home: the caller's own where that can be."""
        if found_inf is not None and found_inf.device != self.device:
            found_inf = torch.zeros(1, device=self.device)
        if first_bad is not None and (first_bad.device != self.device or self.indices is not None):
            first_bad = torch.full((1,), reference.NO_BAD, dtype=torch.int64, device=self.device)
        return found_inf, first_bad

    def report(self, flags: tuple, found_inf: torch.Tensor | None, first_bad: torch.Tensor | None) -> None:
        flag, first = flags
        if flag is not found_inf:
            found_inf.copy_(torch.maximum(found_inf, flag.to(found_inf.device)))
        if first is not first_bad:
            if self.indices is not None:
                indices = torch.tensor([*self.indices, reference.NO_BAD], device=first.device)
                first = indices[first.clamp(max=len(self.indices))]
            first_bad.copy_(torch.minimum(first_bad, first.to(first_bad.device)))


def kernels_of(device: torch.device) -> Any:
    """The module whose operators run on this device."""
    return _extension if device.type in _kernel_devices else reference


def without_grad(face: Callable) -> Callable:
    """What ``torch.no_grad()`` makes of a function, without a context object for every call."""

    @functools.wraps(face)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            return face(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(before)

    return call


def serve(
    op: str,
    lists: dict[str, Tensors | None],
    call: Callable[[Route], Any],
    found_inf: torch.Tensor | None = None,
    first_bad: torch.Tensor | None = None,
) -> list[tuple[Route, Any]]:
    """Call ``call(route)`` once if that can serve everything, otherwise for each device and, on a device with kernels,
    apart for the tensors that these cannot take; returns each route with what its call returned. Lists that are None stay
    so. Raises before anything is written if the lists do not fit.
    """
    check_flag(op, "found_inf", found_inf, torch.float32)
    check_flag(op, "first_bad", first_bad, torch.int64)
    columns = list(lists.values())
    first = columns[0]
    for column in columns:
        if not first or (column is not None and len(column) != len(first)):
            check_lists(op, **lists)
            return []
    device = first[0].device
    # A look at every tensor from Python takes longer than the work on small ones. The kernels look anyway, and refuse
    # before they write. (In a graph their fakes stand for them, which do not.)
    if device.type in _kernel_devices and not torch.compiler.is_compiling():
        everything = Route(_extension, columns, device)
        try:
            return [(everything, call(everything))]
        except RuntimeError:
            routes = _routes(op, lists)
            if routes[0].kernels is _extension and routes[0].indices is None:
                raise
    else:
        routes = _routes(op, lists)
    return [(route, call(route)) for route in routes]


def _routes(op: str, lists: dict[str, Tensors | None]) -> list[Route]:
    columns = list(lists.values())
    given = [column for column in columns if column is not None]
    device = given[0][0].device
    if all({tensor.device for tensor in column} == {device} for column in given):
        if device.type not in _kernel_devices:
            return [Route(reference, columns, device)]
        if all({tensor.dtype for tensor in column} <= KERNEL_DTYPES for column in given):
            return [Route(_extension, columns, device)]

    # Groups of one call must not be half done when a later one turns out to be wrong.
    check_lists(op, **lists)
    groups = {}
    for i, row in enumerate(zip(*given)):
        device = row[0].device
        fits = all(tensor.device == device and tensor.dtype in KERNEL_DTYPES for tensor in row)
        kernels = _extension if fits and device.type in _kernel_devices else reference
        groups.setdefault((device, kernels), []).append(i)
    return [
        Route(
            kernels, [None if column is None else [column[i] for i in indices] for column in columns], device, indices
        )
        for (device, kernels), indices in groups.items()
    ]


def _import() -> tuple:
    from ampkit.kernels import extension

    return extension, extension.ops.cpu_capability()


def _choose() -> tuple:
    """The module that runs on kernel devices (or the reference), the types of these devices, and the reason."""
    loaded, why = load_library("the extension", _import)
    if loaded is None:
        return reference, frozenset(), Implementation("reference", why)
    extension, capability = loaded
    cuda, cuda_why = _load_cuda(extension)
    chosen = Implementation(
        "extension",
        why,
        built_with=extension.built_with,
        cpu_capability=capability,
        cuda=cuda,
        cuda_why=cuda_why,
    )
    return extension, frozenset(("cpu", "cuda") if cuda else ("cpu",)), chosen


def _load_cuda(extension) -> tuple[bool, str]:
    if torch.version.cuda is None:
        return False, "this torch was built without CUDA"
    try:
        return True, f"built with torch {extension.load_cuda_kernels()}"
    except ModuleNotFoundError:
        return False, "the CUDA library was not built: AMPKIT_CUDA=1 pip install --no-build-isolation ."
    except (ImportError, OSError) as error:
        return False, f"the CUDA library could not be loaded: {error}"


_extension, _kernel_devices, _implementation = _choose()
