"""``apex.parallel.sync_batchnorm``: batch norm over all processes, with Apex's arguments."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from ... import parallel as _core


class SyncBatchNorm(_core.SyncBatchNorm):
    """`ampkit.parallel.SyncBatchNorm`, with an addend ``z``, a ReLU after it, and channels in the last dimension.

    ``forward(input, z)`` is ``batch_norm(input) + z``, and with ``fuse_relu`` its positive part. With ``channel_last`` tensors are
    (N, ..., C); those in ``torch.channels_last`` memory format are still (N, C, H, W) and do not need it.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
        **bias: bool,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, process_group, **bias)
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    def forward(self, input: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        if self.channel_last and input.dim() >= 2:
            output = super().forward(input.movedim(-1, 1)).movedim(1, -1)
        else:
            output = super().forward(input)
        if z is not None:
            output = output + z
        return torch.relu(output) if self.fuse_relu else output


def convert_syncbn_model(
    module: nn.Module, process_group: dist.ProcessGroup | None = None, channel_last: bool = False
) -> nn.Module:
    """`ampkit.parallel.convert_syncbn_model`; layers are `SyncBatchNorm`, on CUDA ``torch.nn.SyncBatchNorm``."""
    layer_class = partial(SyncBatchNorm, channel_last=channel_last)
    is_torchs = _core.is_on_cuda(module) and not channel_last  # torch's class has no channels in the last dimension
    return _core.convert_syncbn_model(module, process_group, layer_class=None if is_torchs else layer_class)


def create_syncbn_process_group(group_size: int) -> dist.ProcessGroup | None:
    """The group of ``group_size`` neighbouring ranks that this rank is in; None, which means all, for 0.

    Every rank must call it, for all groups are made on all of them.
    """
    if group_size == 0:
        return None
    world_size = dist.get_world_size()
    assert world_size >= group_size, f"group_size={group_size} is more than the world size {world_size}"
    assert world_size % group_size == 0, f"the world size {world_size} is not a multiple of group_size={group_size}"
    starts = range(0, world_size, group_size)
    groups = [dist.new_group(ranks=list(range(start, start + group_size))) for start in starts]
    return groups[dist.get_rank() // group_size]
