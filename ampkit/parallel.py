"""Training on several processes: FSDP2 at an opt level (`fully_shard`), and batch norm over the batches of all processes.

`convert_syncbn_model` replaces batch norms. On CUDA it gives ``torch.nn.SyncBatchNorm``. That class refuses CPU tensors, so on
the CPU it gives `SyncBatchNorm`, which computes the same in plain torch operations and one all-reduce each way, also over gloo.
Scripts call it on the model before the optimizer is built and before ``initialize``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from . import plan
from .errors import ConfigurationError
from .models.float32_values import members
from .models.keep_fp32 import Kept
from .registry import watchers
from .sharding import gathered, is_fsdp
from .validation import sharded_after_initialize

__all__ = ["SyncBatchNorm", "convert_syncbn_model", "fully_shard"]


def fully_shard(
    module: nn.Module,
    *,
    opt_level: str = "O1",
    mesh: Any = None,
    cast_model_type: torch.dtype | None = None,
    keep_batchnorm_fp32: bool | None = None,
    keep_fp32: Any = (),
    reduce_dtype: torch.dtype = torch.float32,
    **options: Any,
) -> nn.Module:
    """Shard in place by torch's ``fully_shard`` (FSDP2), with the precision of an opt level, which cannot be changed afterwards.

    Call it as torch's own: on the blocks first, then on the model, then build the optimizer, then `initialize` at the same
    level with the same settings. At O2, O3 and O5 the sharded parameters stay and train in float32. They are gathered in lower
    precision, except norms and what ``keep_fp32`` names, which get groups of their own. Gradients are reduced in
    ``reduce_dtype``. At O0, O1 and O4 everything is gathered in float32. ``options`` go to torch's: ``reshard_after_forward``,
    ``offload_policy``, ``shard_placement_fn``, ``ignored_params``.

    Raises `ConfigurationError` for an ``mp_policy``, for settings that `initialize` would refuse, and where ``keep_fp32`` names
    single parameters.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp import fully_shard as shard

    if "mp_policy" in options:
        raise ConfigurationError(
            "fully_shard: mp_policy= is chosen by opt_level, cast_model_type and reduce_dtype. Leave it out, or call "
            "torch.distributed.fsdp.fully_shard with it."
        )
    if any(inner in watchers or inner in members for inner in module.modules()):
        raise sharded_after_initialize(module)
    first = next(module.parameters(), None)
    device_type = mesh.device_type if mesh is not None else "cpu" if first is None else first.device.type
    settings = dict(
        cast_model_type=cast_model_type, keep_batchnorm_fp32=keep_batchnorm_fp32, keep_fp32=keep_fp32 or None
    )
    resolved = plan.resolve(opt_level, device_type, settings)
    options["mesh"] = mesh
    if not resolved.has_narrow_results:
        return cast(nn.Module, shard(module, mp_policy=MixedPrecisionPolicy(), **options))
    kept = Kept(module, resolved)
    in_kept = {param for kept_module in kept.modules for param in kept_module.parameters()}
    alone = [name for name, param in module.named_parameters() if param in kept.parameters - in_kept]
    if alone:
        raise ConfigurationError(
            f"fully_shard: keep_fp32 names single parameters ({', '.join(alone)}), and FSDP2 gathers whole modules. Name the "
            "modules that they belong to."
        )
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    inside = {inner for kept_module in kept.modules for inner in kept_module.modules() if inner is not kept_module}
    by_fsdp = {id(part.param) for part in gathered(module)}  # tensor parallelism shards too
    for kept_module in kept.modules:
        has_own = any(id(param) not in by_fsdp for param in kept_module.parameters())
        if has_own and kept_module not in inside and kept_module is not module and not is_fsdp(kept_module):
            shard(kept_module, mp_policy=policy, **options)
            by_fsdp.update(id(param) for param in kept_module.parameters())
    if module not in kept.modules:
        policy = replace(policy, param_dtype=resolved.lower_precision, reduce_dtype=reduce_dtype)
    return cast(nn.Module, shard(module, mp_policy=policy, **options))


def convert_syncbn_model(
    module: nn.Module,
    process_group: dist.ProcessGroup | None = None,
    *,
    layer_class: Callable[..., _BatchNorm] | None = None,
) -> nn.Module:
    """Replace every batch norm of a model by one that normalises over the processes' joined batch.

    Parameters and running statistics are the very objects of the layers replaced, so an optimizer built before still
    owns them. Instance norms stay as they are. A module that is itself a batch norm comes back as a new one, so use the
    return value. Move the model to its device first: the device chooses the class, unless ``layer_class`` says it.

    Raises ValueError for a lazy batch norm that has not seen a batch, and TypeError for an argument that is no module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"convert_syncbn_model expects a model (torch.nn.Module), found a {type(module).__name__}.")
    chosen = layer_class or (nn.SyncBatchNorm if is_on_cuda(module) else SyncBatchNorm)
    twins: dict[nn.Module, nn.Module] = {}
    for layer in [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]:
        if any(tensor is not None and is_lazy(tensor) for tensor in (layer.weight, layer.running_mean)):
            raise ValueError(
                f"convert_syncbn_model found a {type(layer).__name__} that has not seen a batch; it expects layers of known"
                " size. Pass one batch through the model first."
            )
        # The tensors come from the layer.
        settings: dict[str, Any] = dict(eps=layer.eps, momentum=layer.momentum, affine=False, track_running_stats=False)
        twin = chosen(layer.num_features, **settings, process_group=process_group)
        twin.affine, twin.track_running_stats = layer.affine, layer.track_running_stats
        twin._parameters.update(layer._parameters)
        twin._buffers.update(layer._buffers)
        twins[layer] = twin.train(layer.training)
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):  # a layer used in two places stays one layer
            if child is not None and child in twins:
                parent._modules[name] = twins[child]
    return twins.get(module, module)


class SyncBatchNorm(_BatchNorm):
    """Batch norm over the joined batch of all processes of a group, for any device that the group's backend serves.

    Takes (N, C, ...) with ``num_features`` channels C. The local batches may differ in size and may even be empty. Input in a lower
    precision keeps its dtype, while the statistics are computed in float32. In eval mode, or with one process, this is plain
    batch norm.

    Raises ValueError for input without a batch dimension, and in training for fewer than two values per channel over all processes.

    Source: Ioffe and Szegedy, "Batch Normalization", ICML 2015.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **bias: bool,  # newer torch's batch norms have it
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype, **bias)
        self.process_group = process_group

    _check_input_dim: Any = nn.SyncBatchNorm._check_input_dim

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        has_processes = dist.is_available() and dist.is_initialized() and dist.get_world_size(self.process_group) > 1
        if not (self.training and has_processes):
            return super().forward(input)
        self._check_input_dim(input)
        running_mean, running_var, factor = self.running_mean, self.running_var, self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:  # a cumulative average
                factor = 1.0 / float(self.num_batches_tracked)
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        mean, var, count = self._joined_statistics(x)
        if running_mean is not None and running_var is not None and self.track_running_stats:
            unbiased = var.detach() * (count / (count - 1.0))
            running_mean.lerp_(mean.detach().to(running_mean.dtype), factor or 0.0)
            running_var.lerp_(unbiased.to(running_var.dtype), factor or 0.0)
        scale = (var + self.eps).rsqrt().to(x.dtype)
        if self.weight is not None:
            scale = scale * self.weight.to(x.dtype)
        output = (x - _along_channels(mean.to(x.dtype), x)) * _along_channels(scale, x)
        if self.bias is not None:
            output = output + _along_channels(self.bias.to(x.dtype), x)
        return output.to(input.dtype)

    def _joined_statistics(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Mean and biased variance of each channel over all processes (float64, shape [C]), and the number of values per channel.

        Autograd goes through the all-reduce, in whose backward pass every process gets the others' gradients.
        """
        from torch.distributed.nn.functional import all_reduce  # not there where torch is built without processes

        dims = [dim for dim in range(x.dim()) if dim != 1]
        local_count = x.numel() // x.size(1)
        local_mean = x.sum(dims) / max(local_count, 1)
        spread = (x - _along_channels(local_mean, x)).square().sum(dims).double()
        # Each process measures the spread around its own mean; only these small per-channel numbers are joined, in float64,
        # where the difference of two sums of squares is harmless.
        local_mean = local_mean.double()
        local = [local_mean * local_count, spread + local_mean.square() * local_count, spread.new_tensor([local_count])]
        group = self.process_group or dist.group.WORLD
        sums: torch.Tensor = all_reduce(torch.cat(local), group=group)  # type: ignore[no-untyped-call]
        count = sums[-1].item()
        if count < 2:
            raise ValueError(
                f"SyncBatchNorm found {int(count)} value per channel over all processes (here: {tuple(x.shape)});"
                " training expects at least 2. Use a larger batch, or eval()."
            )
        mean, mean_of_squares = (sums[:-1] / count).chunk(2)
        return mean, (mean_of_squares - mean.square()).clamp(min=0), count


def is_on_cuda(module: nn.Module) -> bool:
    """Whether a parameter or buffer of the module is on CUDA."""
    return any(tensor.is_cuda for tensor in (*module.parameters(), *module.buffers()))


def _along_channels(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Reshape one value per channel to broadcast over ``x``."""
    return values.view(1, -1, *(1,) * (x.dim() - 2))
