"""``apex.amp.lists``: which functions O1 casts, as lists that a script may edit before ``amp.initialize``.

The lists come from the tables of the core (`ampkit.policy.tables`). `rules_changed_by_the_script` returns a script's
changes as rules for the engine.
"""

from __future__ import annotations

from types import ModuleType

from ....policy.cast_rules import CastKind, CastRule
from . import functional_overrides as functional_overrides
from . import tensor_overrides as tensor_overrides
from . import torch_overrides as torch_overrides
from .tables import banned_name

_KINDS = {
    "FP16_FUNCS": CastKind.LOWER_PRECISION_FP,
    "FP32_FUNCS": CastKind.FP32,
    "CASTS": CastKind.PROMOTE,
    "SEQUENCE_CASTS": CastKind.PROMOTE,
    "BANNED_FUNCS": CastKind.BANNED,
}


def _listed(module: ModuleType) -> dict[str, CastKind]:
    return {banned_name(entry): kind for attribute, kind in _KINDS.items() for entry in getattr(module, attribute, ())}


_MODULES = (functional_overrides, torch_overrides, tensor_overrides)
_AS_MADE = {module: _listed(module) for module in _MODULES}


def rules_changed_by_the_script() -> list[CastRule]:
    """A rule for every name that was added to, moved between or removed from the lists."""
    rules = []
    for module in _MODULES:
        before, new = _AS_MADE[module], _listed(module)
        changed = [
            name for name in {**before, **new} if before.get(name) is not new.get(name) and hasattr(module.MODULE, name)
        ]
        rules += [
            CastRule(new.get(name, CastKind.NATIVE), module.MODULE, name, "edited in apex.amp.lists")
            for name in changed
        ]
    return rules
