"""``apex.amp.amp``: the decorators and registrations of the core under Apex's names, and `init` of Apex's first API."""

from __future__ import annotations

import torch
from torch import nn

from ... import api
from ...casting.decorators import bfloat16_function as bfloat16_function
from ...casting.decorators import float_function as float_function
from ...casting.decorators import half_function as half_function
from ...casting.decorators import promote_function as promote_function
from ...casting.decorators import register_bfloat16_function as register_bfloat16_function
from ...casting.decorators import register_float_function as register_float_function
from ...casting.decorators import register_half_function as register_half_function
from ...casting.decorators import register_promote_function as register_promote_function
from ...plan import default_lower_precision
from ...policy.cast_rules import CastKind
from ...registry import session_of
from . import _printing
from ._amp_state import _amp_state
from ._initialize import _end_casts_of_other_kinds
from .frontend import Properties as Properties
from .frontend import initialize as initialize
from .frontend import load_state_dict as load_state_dict
from .frontend import opt_levels as opt_levels
from .frontend import state_dict as state_dict
from .handle import AmpHandle, NoOpHandle
from .lists import rules_changed_by_the_script


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    *,
    patch_type: torch.dtype | None = None,
) -> AmpHandle | NoOpHandle:
    """Patch torch as O1 does, without a model or an optimizer, until the handle's ``_deactivate()``.

    Casts where the accelerator is, or on the CPU of a machine without one. ``allow_banned`` has F.binary_cross_entropy
    computed in float32 where it would be refused.
    """
    _amp_state.init_was_called = True
    if not enabled:
        return NoOpHandle()
    lower_precision = patch_type or default_lower_precision("cuda")
    _printing.attach()
    _end_casts_of_other_kinds(lower_precision)
    anchor = nn.Identity()  # a session lives as long as its models: this one as long as the handle
    anchor.register_buffer("place", torch.empty(0, device="cuda" if torch.cuda.is_available() else "cpu"))
    with _printing.only_warnings():
        api.initialize(
            anchor,
            opt_level="O1",
            patch_torch_functions_type=lower_precision,
            verbosity=2 if verbose else 0,
            policy="apex",
            on_floor="warn",
        )
    session = session_of(anchor)
    handle = AmpHandle.of(session, loss_scale=loss_scale, enable_caching=enable_caching, verbose=verbose)
    handle._anchor = anchor
    _amp_state._opened_by_init.append(handle)
    if allow_banned:
        session.casting.register(CastKind.FP32, torch.nn.functional, "binary_cross_entropy")
    for rule in rules_changed_by_the_script():
        session.casting.register(rule.kind, rule.owner, rule.name)
    session.casting.covers_every_model = True
    session.casting.caches.keep_all()
    if not enable_caching:
        session.casting.caches.bypass()
    return handle
