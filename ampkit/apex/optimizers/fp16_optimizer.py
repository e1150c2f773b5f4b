"""``apex.optimizers.FP16_Optimizer`` of 2018: one flat float32 master for each parameter group."""

from __future__ import annotations

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from ..masters_of_groups import MastersOfGroups


class FP16_Optimizer(MastersOfGroups):
    __doc__ = f"""{MastersOfGroups.__doc__}
    The model's parameters of a group are views of one tensor of ``fp16_groups_flat``, whose master is in ``fp32_groups_flat``.
    """

    masters = "fp32_groups_flat"

    def _make_masters(self, params: list[torch.Tensor]) -> list[torch.Tensor]:
        flat = _flatten_dense_tensors([param.detach() for param in params]).clone()
        for param, view in zip(params, _unflatten_dense_tensors(flat, params)):
            param.data = view
        vars(self).setdefault("fp16_groups_flat", []).append(flat)
        vars(self).setdefault("fp32_groups_flat", []).append(flat.clone().float().requires_grad_())
        return self.fp32_groups_flat[-1:]

    def _stored(self, index: int) -> list[torch.Tensor]:
        return [self.fp16_groups_flat[index]]

    def _laid_out(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [_flatten_dense_tensors(tensors)]
