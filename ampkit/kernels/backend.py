"""The one place that decides who computes the multi-tensor operators: the compiled extension or plain torch.

The choice is made once, at import, by AMPKIT_EXTENSION (libraries.py). implementation() tells what was chosen and why.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ampkit.libraries import BUILD, cuda_is_emulated, load_library, report_broken


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


def through_dispatcher(op: str, *arguments: Any) -> Any:
    """What the operator of torch.ops.ampkit returns."""
    return _extension.through_dispatcher(op, *arguments)


def _import() -> tuple:
    from ampkit.kernels import extension

    if cuda_is_emulated():
        extension.load_emulated_kernels()
        return extension, "CUDA's, emulated"
    return extension, extension.ops["cpu_capability"]()


def _choose() -> tuple:
    """The extension or None, the types of devices that it has kernels for, and the reason."""
    loaded, why = load_library("the extension", _import)
    if loaded is None:
        return None, frozenset(), Implementation("reference", why)
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
        return False, f"the CUDA library was not built: AMPKIT_CUDA=1 {BUILD}"
    except (ImportError, OSError) as error:
        why = f"the CUDA library could not be loaded: {error}"
        report_broken(why, error)
        return False, why


_extension, kernel_devices, _implementation = _choose()
#: What calls compiled operators past torch's dispatcher, by their names.
direct: dict[str, Callable[..., Any]] = {} if _extension is None else _extension.direct
