"""``apex.fp16_utils.fp16util``: converting networks to float16, and copying between model and master parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.modules.batchnorm import _BatchNorm

from ... import kernels

clip_grad_norm = nn.utils.clip_grad_norm_


class tofp16(nn.Module):
    """A module that casts its input to float16."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input.half()


class FP16Model(nn.Module):
    """A network in float16, affine batch norms excepted, whose inputs are cast to float16."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, dtype=torch.half)

    def forward(self, *inputs: Any) -> Any:
        cast = (x.half() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs)
        return self.network(*cast)


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Turn every affine batch norm back to float32, in place."""
    for child in module.modules():
        if isinstance(child, _BatchNorm) and child.affine:
            child.float()
    return module


def network_to_half(network: nn.Module) -> nn.Sequential:
    """Return ``Sequential(tofp16(), network)`` with the network in float16, affine batch norms excepted."""
    return nn.Sequential(tofp16(), BN_convert_float(network.half()))


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast a module's own floating parameters, gradients and buffers, not those of its children."""
    for param in module.parameters(recurse=False):
        if param.is_floating_point():
            gradient, param.grad = param.grad, None
            param.data = param.data.to(dtype)
            param.grad = None if gradient is None else gradient.to(dtype)
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_floating_point():
            module._buffers[name] = buffer.to(dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast every module except affine batch norms, in place."""
    for module in network.modules():
        if isinstance(module, _BatchNorm) and module.affine:
            continue
        convert_module(module, dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return network


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return (the model's trainable parameters, float32 copies of them, or with ``flat_master`` one flat copy of all)."""
    model_params = [param for param in model.parameters() if param.requires_grad]
    if not flat_master:
        return model_params, [nn.Parameter(param.detach().clone().float()) for param in model_params]
    dtypes = {param.dtype for param in model_params}
    if len(dtypes) > 1:
        raise RuntimeError(
            f"prep_param_lists: flat_master=True needs parameters of one dtype, found {', '.join(sorted(map(str, dtypes)))}. "
            "Use flat_master=False for models with float32 batch norms."
        )
    flat = nn.Parameter(_flatten_dense_tensors([param.detach() for param in model_params]).float())
    return model_params, [flat]


@torch.no_grad()
def model_grads_to_master_grads(
    model_params: list[torch.Tensor], master_params: list[torch.Tensor], flat_master: bool = False
) -> None:
    """Copy gradients to the masters, in the masters' precision."""
    if flat_master:
        flat = [torch.zeros_like(param) if param.grad is None else param.grad for param in model_params]
        (master,) = master_params
        master.grad = _flatten_dense_tensors(flat).to(master.dtype)
        return
    kernels.multi_tensor_scale(*pairs_of_gradients(model_params, master_params), 1.0)


def pairs_of_gradients(
    model_params: list[torch.Tensor], master_params: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the gradients of a model, and those of its masters to write to; a master has none where its parameter has none."""
    sources, targets = [], []
    for param, master in zip(model_params, master_params):
        if param.grad is None:
            master.grad = None
            continue
        if master.grad is None:
            master.grad = torch.empty_like(master)
        sources.append(param.grad)
        targets.append(master.grad)
    return sources, targets


@torch.no_grad()
def master_params_to_model_params(
    model_params: list[torch.Tensor], master_params: list[torch.Tensor], flat_master: bool = False
) -> None:
    """Round the masters into the model."""
    if flat_master:
        master_params = _unflatten_dense_tensors(master_params[0].detach(), model_params)
    torch._foreach_copy_(list(model_params), [master.detach() for master in master_params])


def to_python_float(value: Any) -> float:
    """The number in a tensor of one element, or in the first element of anything else."""
    return value.item() if hasattr(value, "item") else value[0]
