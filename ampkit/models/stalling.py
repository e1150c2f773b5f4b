"""Averages that a script keeps in lower-precision tensors, where most of their small steps are lost, are warned of.

A momentum encoder, a target network, or a buffer that follows what a model computes: no optimizer trains it, and it moves by
less than an eighth of its values. agreement.py hands over what a script has written to (`warn_of_average`) and has
`look_for_averages` find what torch does not count; ``load_state_dict`` hands over what it loads (`warn_of_loaded_average`).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from ..logs import logger
from .float32_values import Float32Value, all_lower, is_capturing
from .parts import walk
from .records import CastModel, record_of


def may_be_average(whole: CastModel, entry: Float32Value, lower: torch.Tensor) -> bool:
    """Whether no optimizer trains it, as far as can be told: without masters, what is unfrozen later may be trained too."""
    if entry.value is None:
        return False
    if not lower.requires_grad:
        return True
    return whole.has_masters and not isinstance(entry.value, nn.Parameter)


@torch.no_grad()
def warn_of_average(model: nn.Module, whole: CastModel, entry: Float32Value, lower: torch.Tensor) -> bool:
    """Say it once if ``lower``, which was written to, has moved as an average does; whether it was looked at.

    Looked at when it is written to for the first, second, fourth, eighth time and so on: it asks the device.
    """
    entry.writes += 1
    if whole.averages or is_capturing(lower) or entry.writes & (entry.writes - 1) or entry.value.shape != lower.shape:
        return False
    if may_be_average(whole, entry, lower) and _moved_as_averages_do(entry, lower, lower):
        # The vectors of spectral norm settle, they do not add up.
        if not _is_of_spectral_norm(model, lower):
            _warn(whole, model, _name_for_keeping(model, lower), lower.dtype)
    return True


@torch.no_grad()
def warn_of_loaded_average(
    whole: CastModel, entry: Float32Value, lower: torch.Tensor, loaded: torch.Tensor, name: str
) -> None:
    """The same where an average of rounded weights comes in by ``load_state_dict``, as ``named_parameters()`` gives them."""
    if loaded.dtype is not lower.dtype or whole.averages or not may_be_average(whole, entry, lower):
        return
    entry.writes += 1
    looks = entry.writes > 1 and not entry.writes & (entry.writes - 1)  # a checkpoint is loaded once
    if looks and _moved_as_averages_do(entry, lower, loaded.to(lower.device)):
        _warn(whole, None, name, lower.dtype)


def _moved_as_averages_do(entry: Float32Value, lower: torch.Tensor, now: torch.Tensor) -> torch.Tensor | bool:
    before = entry.value.detach().to(lower.device).to(lower.dtype)
    changed = before != now
    by_little = changed & ((now - before).abs() <= before.abs() / 8)
    return bool(2 * by_little.sum() > changed.sum()) and not _is_copy_of_another(lower, now)


def _is_copy_of_another(lower: torch.Tensor, now: torch.Tensor) -> bool:
    """Whether it holds what another weight does: a target network that is copied now and then loses nothing."""
    return any(
        one.shape == now.shape and one.dtype is now.dtype and one.device == now.device and torch.equal(one, now)
        for one in all_lower()
        if one is not lower
    )


def _warn(whole: CastModel, model: nn.Module | None, name: str, dtype: torch.dtype) -> None:
    whole.averages.add(name)
    keep = f"keep_fp32={name!r}" if name else "keep_fp32=[that model]"
    logger.warning(
        "%s is trained by no optimizer that initialize() was given and is written to by small steps, like an average, in %s, where "
        "steps below 1/%d of a value are lost. To have it in float32: initialize(..., %s).",
        name or f"A whole model, the {type(model).__name__},",
        dtype,
        round(1 / torch.finfo(dtype).eps) * 2,
        keep,
    )


_SAMPLE = 1024  # values of each tensor


def look_for_averages(model: nn.Module) -> None:
    """Find averages that are written to through ``.data``, which torch does not count, in a sample of their values.

    Called before each forward; looked at is the second, the fourth, the eighth and so on. What was found to be written to is looked
    at again two forwards later, and once more: what a script copies every hundred iterations is not written to that often.
    """
    whole = record_of(model).whole
    looks = whole.looks
    looks.forwards += 1
    if looks.forwards == looks.next_look:
        _look(model, whole)


@torch.no_grad()
def _look(model: nn.Module, whole: CastModel) -> None:
    """Warn of the first that was written to before each of three looks."""
    looks = whole.looks
    written = [] if whole.averages else _written(model)
    for entry, lower in written:
        if looks.in_a_row == 2:
            entry.writes = 0  # have it looked at, whatever was counted
            warn_of_average(model, whole, entry, lower)
        entry.take_over(lower, for_training=True)
    looks.in_a_row = looks.in_a_row + 1 if written and looks.in_a_row < 2 else 0
    looks.next_look = looks.forwards + 2 if looks.in_a_row else 1 << looks.forwards.bit_length()


def _written(model: nn.Module) -> list[tuple[Float32Value, torch.Tensor]]:
    """What may be an average and holds something else than it did, though torch has counted no write."""
    found: dict[int, tuple[Float32Value, torch.Tensor]] = {}
    for module in walk(model):
        record = record_of(module)
        # torch counts no update of running statistics either.
        if record is None or isinstance(module, _NormBase):
            continue
        for _, lower, entry in record.lower_tensors(module):
            settled = entry.lower is lower and may_be_average(record.whole, entry, lower) and entry.agrees_with(lower)
            if settled and lower.numel() and not is_capturing(lower):
                found[id(entry)] = (entry, lower)
    now = _on_host([_sample(lower) for _, lower in found.values()])
    before = _on_host([_sample(entry.value).to(lower.dtype) for entry, lower in found.values()])
    return [pair for pair, one, other in zip(found.values(), now, before) if not torch.equal(one, other)]


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().flatten()[:: max(1, tensor.numel() // _SAMPLE)]


def _on_host(samples: list[torch.Tensor]) -> list[torch.Tensor]:
    """All of them in one transfer from each device and dtype."""
    results = list(samples)
    places = {(one.device, one.dtype) for one in samples if one.device.type != "cpu"}
    for place in places:
        indices = [index for index, one in enumerate(samples) if (one.device, one.dtype) == place]
        joined = torch.cat([samples[index] for index in indices]).cpu()
        parts = joined.split([samples[index].numel() for index in indices])
        for index, part in zip(indices, parts):
            results[index] = part
    return results


def _is_of_spectral_norm(model: nn.Module, buffer: torch.Tensor) -> bool:
    for module in model.modules():
        hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
        names = [f"{hook.name}{end}" for hook in hooks for end in ("_u", "_v")]
        if isinstance(module, _SpectralNorm):
            names += ["_u", "_v"]
        if any(module._buffers.get(name) is buffer for name in names):
            return True
    return False


def _name_for_keeping(model: nn.Module, tensor: torch.Tensor) -> str:
    """The outermost module around an untrained parameter in which nothing is trained, "" for the model; else the tensor's name."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    name = next(name for name, one in tensors if one is tensor)
    parts = name.split(".")[:-1] if isinstance(tensor, nn.Parameter) else []
    around = (".".join(parts[:length]) for length in range(len(parts) + 1))
    whole = record_of(model).whole

    def is_trained(param: nn.Parameter) -> bool:
        entry = whole.parameters.get(id(param))
        return param.requires_grad and (entry is None or not may_be_average(whole, entry, param))

    if not isinstance(tensor, nn.Parameter):
        return name
    return next((one for one in around if not any(map(is_trained, model.get_submodule(one).parameters()))), name)
