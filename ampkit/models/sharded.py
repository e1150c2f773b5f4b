"""Models that lie on several processes: what is done to them in the places of casts of weights.

At O2, O3 and O5 the sharded parameters stay float32, and FSDP2 casts them while it gathers them, by the policy that
`ampkit.parallel.fully_shard` chose. At O1 and O4 they are gathered in float32, and cast call by call.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from ..casting.engine import active_casting
from ..patching import Undo
from ..sharding import fsdp_modules, gathered, is_sharded, unsharded_params


def keep_no_casts_of_gathered(model: nn.Module, undo: Undo) -> None:
    """Forget casts of what FSDP2 has gathered for a module before and after its forward, until ``undo``.

    A gathered weight is the same tensor at the same version after every gathering, whatever was put into it.
    """
    for module in fsdp_modules(model):
        undo.callback(module.register_forward_pre_hook(_forget_casts).remove)
        undo.callback(module.register_forward_hook(_forget_casts, prepend=True).remove)


def place_gradients(model: nn.Module, undo: Undo) -> None:
    """Have gradients of tensor parallelism lie on the processes as their weights do, until ``undo``.

    With ``SequenceParallel`` each process sees some of the tokens, and has a part of a sum as the gradient of a norm; a layer that
    gathers tokens has a whole gradient for its part of a weight. torch's optimizers bring them together in their step. Judging,
    unscaling and steps in one pass need that before.
    """
    by_fsdp = {id(shard.param) for shard in gathered(model)}  # which sums up by itself
    for param in model.parameters():
        if is_sharded(param) and param.requires_grad and id(param) not in by_fsdp:
            undo.callback(param.register_hook(functools.partial(_placed, param.placements)).remove)


def _placed(placements: tuple[Any, ...], gradient: Any) -> Any:
    if not is_sharded(gradient) or gradient.placements == placements:
        return gradient
    return gradient.redistribute(placements=placements)


def _forget_casts(module: nn.Module, *_: Any) -> None:
    casting = active_casting()
    if casting is not None:
        for param in unsharded_params(module):
            casting.caches.forget(param)
