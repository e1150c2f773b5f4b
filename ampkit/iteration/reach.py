"""The tensors that a backward pass writes to, by its graph, and calls of torch that read scaled or narrow gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from .. import kernels
from ..casting.cpp_wrappers import library as _library
from ..casting.narrow_gradients import stored_gradient
from ..compiling import uncompiled
from ..dtypes import LOWER_PRECISION
from ..errors import ConfigurationError
from ..patching import PatchSet, Reference, SharedPatches, by_tensor
from ..registry import wrappers

_compiling = torch.compiler.is_dynamo_compiling
_PythonNode = torch.autograd.function.BackwardCFunction


class Reached(NamedTuple):
    """The leaves of a graph, and whether a function in Python is among its nodes, which may reach anything.

    A reentrant checkpoint, or a reversible layer, runs a backward pass of its own over a graph that is not there yet.
    """

    leaves: list[torch.Tensor]
    has_python: bool
    nodes: Collection[Any] = ()

    def has(self, ids: set[int]) -> bool:
        """Whether a tensor with one of these ids is among the leaves."""
        return any([id(leaf) in ids for leaf in self.leaves])


def node_of(root: torch.Tensor | GradientEdge) -> Any:
    """The autograd node at which a backward pass from ``root`` begins."""
    return root.node if isinstance(root, GradientEdge) else root.grad_fn


def leaves_of(roots: Iterable[torch.Tensor | GradientEdge], past: Collection[Any] = ()) -> Reached:
    """Return what the graphs of these roots reach, except what they reach only through the nodes in ``past``."""
    leaves, has_python = [], False
    pending = [node for node in map(node_of, roots) if node is not None and node not in past]
    met = {None, *past, *pending}
    for node in pending:
        following = node.next_functions
        if not following and hasattr(node, "variable"):
            leaves.append(node.variable)
        elif isinstance(node, _PythonNode):
            has_python = True
        for after, _ in following:
            if after not in met:
                met.add(after)
                pending.append(after)
    return Reached(leaves, has_python, met)


def _seen(params: list[torch.Tensor]) -> Any:
    return [None if grad is None else (Reference(grad), grad._version) for grad in (param.grad for param in params)]


def _are_still(before: Any, params: list[torch.Tensor]) -> bool:
    present = [(param.grad, None if param.grad is None else param.grad._version) for param in params]
    known = [(None, None) if pair is None else (pair[0](), pair[1]) for pair in before]
    return len(present) == len(known) and all(a is b and m == n for (a, m), (b, n) in zip(present, known))


leaves_behind: Callable[[list[torch.Tensor]], Any] = (
    (lambda tensors: leaves_of(tensors)[:2]) if _library is None else _library.leaves_of
)
"""Return the leaves that the graphs of tensors lead to, and whether a function in Python is among the nodes."""
seen = _seen if _library is None else _library.seen
"""Return the present gradients of a list of parameters, for `are_still`, without keeping them alive."""
are_still = _are_still if _library is None else _library.are_still
"""Whether a list of parameters has the gradients that `seen` returned for it, with no write since that torch counts."""


#: Results of functions on which a script has called ``x.retain_grad()``.
retaining = by_tensor()


def retained(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Results in the graph of ``tensor`` on which a script has called ``retain_grad()``."""
    nodes = leaves_of([tensor]).nodes
    return [result for result in list(retaining) if result.grad_fn in nodes]


def _note_retain_grad(original: Callable, tensor: torch.Tensor) -> None:
    original(tensor)
    if not tensor.is_leaf and not _compiling():
        retaining[tensor] = None


retained_results = SharedPatches(lambda patches: patches.put_around(torch.Tensor, "retain_grad", _note_retain_grad))


# Other calls of torch


def refuse_scaled(original: Callable, lists: Any, *args: Any, **kwargs: Any) -> Any:
    """Raise where torch.nn.utils clips or measures gradients that are still scaled; with Apex's policy warn."""
    for wrapper in wrappers():
        if not wrapper.holds_scaled(lists[0]):
            continue
        if wrapper.owner.plan.policy.base != "apex":  # Apex lets such scripts run on
            raise ConfigurationError(
                "torch.nn.utils was to clip or measure gradients that are still multiplied by the loss scale, so that nearly "
                "all of them would be clipped away. Call it after the scale_loss block, on the level of `with` (with "
                "delay_unscale=True after the last block), or call ampkit.clip_grad_norm_(optimizer, max_norm) there."
            )
        wrapper.advice.tell("scaled", "A clipping or a norm of torch.nn.utils was asked for")
    return original(lists, *args, **kwargs)


def warn_of_grad_scaler(original: Callable, grad_scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Warn where a ``torch.amp.GradScaler`` unscales for an optimizer with a loss scale, in ``step`` or ``unscale_``."""
    for wrapper in wrappers():
        if wrapper.optimizer() is optimizer and wrapper.has_scale:
            wrapper.advice.tell("GradScaler", type(optimizer).__name__)
            wrapper.findings.came_through_no_block = False
    return original(grad_scaler, optimizer, *args, **kwargs)


@uncompiled
def _clip_narrow_gradients(
    original: Callable, parameters: Any, max_norm: float, norm_type: float = 2.0, *args: Any, **kwargs: Any
) -> Any:
    """Clip like torch's ``clip_grad_norm_``, but read narrow gradients as they are stored: their norm is float32."""
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    gradients = [gradient for param in params if (gradient := stored_gradient(param)) is not None]
    is_plain = all(type(x) is torch.Tensor and x.layout is torch.strided for x in gradients)
    has_narrow = any(x.dtype in LOWER_PRECISION for x in gradients) and len({x.device for x in gradients}) == 1
    if args or kwargs or norm_type != 2.0 or not is_plain or not has_narrow:
        return original(params, max_norm, norm_type, *args, **kwargs)
    norm = kernels.multi_tensor_l2norm(gradients)[0].reshape(())
    kernels.multi_tensor_scale(gradients, gradients, kernels.clip_coefficient(norm, max_norm))
    return norm


def _patch_clipping(patches: PatchSet) -> None:
    for module in (torch.nn.utils.clip_grad, torch.nn.utils):
        patches.put_around(module, "clip_grad_norm_", _clip_narrow_gradients)


torchs_clipping = SharedPatches(_patch_clipping)
