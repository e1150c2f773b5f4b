"""``apex.optimizers.fused_novograd``: `ampkit.optimizers.FusedNovoGrad`, with the norms in the parameter group."""

from __future__ import annotations

from typing import Any

import torch

from ... import optimizers as _core
from .. import amp_C
from .layout import StepsInGroups
from .subclassing import ForSubclasses


class FusedNovoGrad(ForSubclasses, StepsInGroups, _core.FusedNovoGrad):
    __doc__ = _core.FusedNovoGrad.__doc__

    multi_tensor_novograd = staticmethod(amp_C.multi_tensor_novograd)

    def state_dict(self) -> dict[str, Any]:
        """As in Apex, the norms stand in the group: a tensor for its float16 parameters, and one for the others."""
        saved = super().state_dict()
        for group, ours in zip(saved["param_groups"], self.param_groups):
            norms: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
            for key, param in zip(group["params"], ours["params"]):
                state = saved["state"].get(key)
                if state is not None and "exp_avg_sq" in state:
                    norms[param.dtype is not torch.float16].append(state["exp_avg_sq"])
                    saved["state"][key] = {name: value for name, value in state.items() if name != "exp_avg_sq"}
            if any(norms):
                group["exp_avg_sq"] = [torch.stack(part) if part else torch.zeros(0) for part in norms]
        return saved
