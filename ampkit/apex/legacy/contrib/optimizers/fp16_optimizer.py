"""``apex.contrib.optimizers.FP16_Optimizer``: as in ``apex.optimizers``, but with a float32 master for each parameter."""

from __future__ import annotations

import torch

from ...masters_of_groups import MastersOfGroups


class FP16_Optimizer(MastersOfGroups):
    __doc__ = f"""{MastersOfGroups.__doc__}
    ``fp32_groups`` are the masters of ``fp16_groups``.
    """

    masters = "fp32_groups"

    def _make_masters(self, params: list[torch.Tensor]) -> list[torch.Tensor]:
        masters = [param.detach().clone().float().requires_grad_() for param in params]
        vars(self).setdefault("fp32_groups", []).append(masters)
        return list(masters)

    def _stored(self, index: int) -> list[torch.Tensor]:
        return self.fp16_groups[index]

    def _laid_out(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return tensors
