"""The gradients that a script's calls of torch write to or read, and the blocks that these belong to.

While a session lives, `calls_of_torch` patches the functions of torch that run a backward pass, clip gradients, or unscale them
for a GradScaler. A `scale_loss` block first holds the gradients that the graph of its loss leads to: those of other sessions'
optimizers, and of tensors without one. Outside of all blocks, a wrapper whose gradients a pass writes to notes it for the step.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from ..casting.cpp_wrappers import library as _library
from ..errors import ConfigurationError
from ..events import listeners, telling
from ..patching import PatchSet, Reference, SharedPatches, by_tensor
from ..registry import wrappers

_compiling = torch.compiler.is_dynamo_compiling
_running_backward = torch._C._current_graph_task_id  # -1 outside of a backward pass
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


def leaves_of(roots: Iterable[Any], past: Collection[Any] = ()) -> Reached:
    """Return what the graphs of these nodes reach, except what they reach only through the nodes in ``past``."""
    leaves, has_python = [], False
    pending = [node for node in roots if node is not None and node not in past]
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
    (lambda tensors: leaves_of([tensor.grad_fn for tensor in tensors])[:2]) if _library is None else _library.leaves_of
)
"""Return the leaves that the graphs of tensors lead to, and whether a function in Python is among the nodes."""
seen = _seen if _library is None else _library.seen
"""Return the present gradients of a list of parameters, for `are_still`, without keeping them alive."""
are_still = _are_still if _library is None else _library.are_still
"""Whether a list of parameters has the gradients that `seen` returned for it, with no write since that torch counts."""


#: The open blocks, in all threads, innermost last.
open_blocks: list[Any] = []


#: Results of functions on which a script has called ``x.retain_grad()``.
retaining = by_tensor()


def retained(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Results in the graph of ``tensor`` on which a script has called ``retain_grad()``."""
    nodes = leaves_of([tensor.grad_fn]).nodes
    return [result for result in list(retaining) if result.grad_fn in nodes]


def _retain_grad(original: Callable, tensor: torch.Tensor) -> None:
    original(tensor)
    if not tensor.is_leaf and not _compiling():
        retaining[tensor] = None


retained_results = SharedPatches(lambda patches: patches.put_around(torch.Tensor, "retain_grad", _retain_grad))


def reaching_backward(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``torch.autograd.backward``: blocks first hold what a pass will write to, wrappers note passes outside of blocks."""

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if _compiling():  # dynamo would guard every gradient
            return torch._dynamo.disable(backward)(tensors, *args, **kwargs)
        roots = [tensors] if isinstance(tensors, (torch.Tensor, GradientEdge)) else list(tensors)
        if _running_backward() != -1:  # a part of the pass around it, as in torch.utils.checkpoint
            around = [block for block in open_blocks if block.has_python]
            if len(around) == 1:
                around[0].hold_leaves(leaves_of(map(node_of, roots)).leaves, wrappers())
            return original(roots, *args, **kwargs)
        run = telling(original, roots) if listeners else original
        inputs = kwargs.get("inputs", args[4] if len(args) > 4 else None)
        if open_blocks and _notify_blocks(roots, inputs):
            return run(roots, *args, **kwargs)
        reached = _reached_outside(roots, inputs)
        run(roots, *args, **kwargs)
        for wrapper, passes in reached:
            wrapper.note_outside(passes)
        return None

    return backward


def _notify_blocks(roots: list[Any], inputs: Any) -> bool:
    """Let the blocks whose scaled losses a backward pass comes from hold what it will write to, whatever the thread.

    Returns whether there are such blocks, or the pass runs inside of a block of this thread all the same.
    """
    ids = set(map(id, roots))
    reached = [block for block in open_blocks if id(block.scaled) in ids]
    if len(reached) < len(roots):
        nodes = leaves_of(map(node_of, roots)).nodes
        reached = [block for block in open_blocks if block.scaled.grad_fn in nodes]
    for block in reached:
        if not block.is_plain:
            block.before_backward(roots, inputs, reached)
    if reached:
        return True
    around = [block for block in open_blocks if block.thread == threading.get_ident()]
    for block in [block for block in around if not block.is_plain][-1:]:
        block.before_backward(roots, inputs, ())
    return bool(around)


def _reached_outside(roots: list[Any], inputs: Any) -> list[tuple[Any, int]]:
    """The optimizers with a loss scale that a backward pass outside of all blocks reaches, and their counts of scaled passes."""
    scaled = [wrapper for wrapper in wrappers() if wrapper.is_outside_of_blocks]
    if not scaled:
        return []
    if inputs is not None:
        leaves = [inputs] if isinstance(inputs, torch.Tensor) else inputs
    elif all([isinstance(root, torch.Tensor) for root in roots]):
        leaves, _ = leaves_behind(roots)
    else:
        leaves = leaves_of(map(node_of, roots)).leaves
    ids = {id(leaf) for leaf in leaves}
    return [(wrapper, wrapper.advice.passes) for wrapper in scaled if not ids.isdisjoint(wrapper.gradients.ids)]


# Other calls of torch


def _group(original: Callable, lists: Any, *args: Any, **kwargs: Any) -> Any:
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


def _unscale(original: Callable, grad_scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Warn where a ``torch.amp.GradScaler`` unscales for an optimizer with a loss scale, in ``step`` or ``unscale_``."""
    for wrapper in wrappers():
        if wrapper.optimizer() is optimizer and wrapper.has_scale:
            wrapper.advice.tell("GradScaler", type(optimizer).__name__)
            wrapper.findings.came_through_no_block = False
    return original(grad_scaler, optimizer, *args, **kwargs)


def _patch(patches: PatchSet) -> None:
    patches.set(torch.autograd, "backward", reaching_backward(torch.autograd.backward))
    patches.put_around(sys.modules["torch.nn.utils.clip_grad"], "_group_tensors_by_device_and_dtype", _group)
    patches.put_around(torch.amp.grad_scaler.GradScaler, "_unscale_grads_", _unscale)


calls_of_torch = SharedPatches(_patch)
