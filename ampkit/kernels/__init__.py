"""The multi-tensor operators, and the one place that decides who computes them: the compiled extension or plain torch.

The choice is made once, at import, by AMPKIT_EXTENSION: ``auto`` (default) takes the extension if it loads, ``off``
never does, ``require`` raises ExtensionError where ``auto`` would fall back. implementation() tells what was chosen and
why. Everything else in ampkit calls the three functions below and cannot tell the difference, except by the clock.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ampkit.errors import ExtensionError
from ampkit.kernels import reference

__all__ = ["Implementation", "implementation", "multi_tensor_axpby", "multi_tensor_l2norm", "multi_tensor_scale"]

Tensors = Sequence[torch.Tensor]


@torch.no_grad()
def multi_tensor_scale(inputs: Tensors, outputs: Tensors, scale: float, found_inf: torch.Tensor | None = None) -> None:
    """outputs[i] = inputs[i] * scale, for lists that may mix dtypes, sizes and devices.

    ``found_inf`` (float32, shape [1]) becomes 1.0 if an input is not finite, and otherwise stays what it was; the
    outputs are written in any case. Inputs and outputs may be the same tensors.
    """
    lists = {"inputs": inputs, "outputs": outputs}
    for kernels, group, flag in _routes("multi_tensor_scale", lists, found_inf):
        kernels.multi_tensor_scale(*group, scale, flag)


@torch.no_grad()
def multi_tensor_axpby(
    xs: Tensors,
    ys: Tensors,
    outputs: Tensors,
    a: float,
    b: float,
    found_inf: torch.Tensor | None = None,
    arg_to_check: int = -1,
) -> None:
    """outputs[i] = a * xs[i] + b * ys[i]; ``arg_to_check`` says who is checked: -1 both, 0 ``xs``, 1 ``ys``.

    ``found_inf`` and the lists are as in multi_tensor_scale.
    """
    lists = {"xs": xs, "ys": ys, "outputs": outputs}
    for kernels, group, flag in _routes("multi_tensor_axpby", lists, found_inf):
        kernels.multi_tensor_axpby(*group, a, b, flag, arg_to_check)


@torch.no_grad()
def multi_tensor_l2norm(tensors: Tensors, per_tensor: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(Euclidean norm of all tensors together, float32 [1]; the norm of each, float32 [n], or [0] unless asked for).

    Both lie on the device of the first tensor. Sums are float64: huge and tiny values keep their norm.
    """
    parts = []
    order = []
    for kernels, (group,), _ in _routes("multi_tensor_l2norm", {"tensors": tensors}, None, order):
        parts.append(kernels.multi_tensor_l2norm(group, per_tensor))
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return torch.zeros(1), torch.zeros(0)
    device = tensors[0].device
    norm = torch.cat([norm.to(device, torch.float64) for norm, _ in parts]).square().sum(dim=0, keepdim=True).sqrt()
    norms = torch.cat([norms.to(device) for _, norms in parts])
    if per_tensor:
        norms = torch.empty_like(norms).index_copy_(0, torch.tensor(order, device=device), norms)
    return norm.to(torch.float32), norms


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


_KERNEL_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))


def _routes(op: str, lists: dict[str, Tensors], found_inf: torch.Tensor | None, order: list | None = None) -> Iterator:
    """Yields (module that has the operator, lists for it, found_inf for it): once if one call can serve everything,
    otherwise for each device and, on a device with kernels, apart for the tensors that these cannot take.

    A found_inf of another device is combined after its group has run. ``order`` receives the index of every tensor, in
    the order in which they come out.
    """
    columns = list(lists.values())
    first = columns[0]
    if not first or len({len(column) for column in columns}) != 1:
        reference.check_lists(op, **lists)
        return
    device = first[0].device
    on_one_device = all({tensor.device for tensor in column} == {device} for column in columns)
    if on_one_device and (found_inf is None or found_inf.device == device):
        if device.type not in _kernel_devices:
            yield reference, columns, found_inf
            return
        if all({tensor.dtype for tensor in column} <= _KERNEL_DTYPES for column in columns):
            yield _extension, columns, found_inf
            return

    # Groups of one call must not be half done when a later one turns out to be wrong.
    reference.check_lists(op, **lists)
    groups = {}
    for i, row in enumerate(zip(*columns)):
        device = row[0].device
        fits = all(tensor.device == device and tensor.dtype in _KERNEL_DTYPES for tensor in row)
        kernels = _extension if fits and device.type in _kernel_devices else reference
        groups.setdefault((device, kernels), []).append(i)
    for (device, kernels), indices in groups.items():
        if order is not None:
            order += indices
        elsewhere = found_inf is not None and found_inf.device != device
        flag = torch.zeros(1, device=device) if elsewhere else found_inf
        yield kernels, [[column[i] for i in indices] for column in columns], flag
        if elsewhere:
            found_inf.copy_(torch.maximum(found_inf, flag.to(found_inf.device)))


def _choose(wish: str) -> tuple:
    """The module that runs on kernel devices (or the reference), the types of these devices, and the reason."""
    if wish not in ("auto", "off", "require"):
        raise ExtensionError(f"AMPKIT_EXTENSION is {wish!r}; expected 'auto', 'off' or 'require'")
    if wish == "off":
        return reference, frozenset(), Implementation("reference", "AMPKIT_EXTENSION=off")
    try:
        from ampkit.kernels import extension

        capability = extension.ops.cpu_capability()
    except (ImportError, OSError, RuntimeError) as error:
        why = f"the extension could not be loaded: {error}"
        if wish == "require":
            raise ExtensionError(
                f"AMPKIT_EXTENSION=require, but {why}. Build it with: pip install --no-build-isolation ."
            ) from error
        return reference, frozenset(), Implementation("reference", why)
    cuda, cuda_why = _load_cuda(extension)
    chosen = Implementation(
        "extension",
        f"AMPKIT_EXTENSION={wish}, and the extension loaded",
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


_extension, _kernel_devices, _implementation = _choose(os.environ.get("AMPKIT_EXTENSION", "auto"))
