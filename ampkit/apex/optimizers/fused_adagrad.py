"""``apex.optimizers.fused_adagrad``: `ampkit.optimizers.FusedAdagrad`, without step counts."""

from __future__ import annotations

from typing import Any

from ... import optimizers as _core
from .. import amp_C
from .subclassing import ForSubclasses


class FusedAdagrad(ForSubclasses, _core.FusedAdagrad):
    __doc__ = _core.FusedAdagrad.__doc__

    multi_tensor_adagrad = staticmethod(amp_C.multi_tensor_adagrad)

    # Apex counts no steps here; lr_decay is 0, so that only the torch twin would ask for them.
    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        states = {key: {"sum": state["sum"]} for key, state in saved["state"].items() if "sum" in state}
        return {**saved, "state": states}
