"""State of parameters in a fused optimizer: rests, step counts and moments, and checkpoints of two layouts.

State is float32 whatever the parameters are, or as `Storage` says. ``state_dict`` writes the layout of the torch.optim twin, where
a step count stands in the state of each parameter; ``load_state_dict`` reads that layout and Apex's, where it stands in the group.

**Where a rest lies.** The rest of a parameter in lower precision lies in one place at a time. Without a session
that is ``state[param]["rest"]`` of its optimizer, zeros at the first step; optimizers of one parameter hold the same tensor.
`initialize` joins rests into float32 parameters (models/incoming.py), from which O2 splits its own. ``close()`` splits what it
gives back into parameter and rest again.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import kernels
from ..dtypes import LOWER_PRECISION
from ..logs import logger
from ..sharding import is_sharded
from .moments import Storage
from .scales import refuse_to_begin

_SETTINGS = (bool, int, float, str, torch.dtype, Storage, type(None))
# How many parameters share a step count, noted on the tensor that holds it.
_HOLDERS = "_ampkit_holders"
#: The optimizers that have kept a rest.
KEEPERS: weakref.WeakSet[KeepsState] = weakref.WeakSet()


@dataclass(frozen=True)
class _AsSaved:
    """A tensor that torch's ``load_state_dict`` hands on, instead of rounding it to the parameter's dtype."""

    tensor: Tensor


class KeepsState(torch.optim.Optimizer):
    """A torch optimizer with state that fused steps read and write, and rests where it ``rests``."""

    storage = Storage()
    rests = False

    @property
    def keeps_narrow_state(self) -> bool:
        """Whether its moments are in lower precision because ``state_dtype`` says so; the session does not make them float32."""
        return self.storage.is_narrow

    def keep_rest(self, param: torch.Tensor, values: torch.Tensor | None = None) -> torch.Tensor:
        """Begin to keep the rest of a parameter: that of another optimizer which keeps one, or zeros. Writes ``values`` to it."""
        refuse_to_begin("the optimizer's state", param.device)
        rest = torch.zeros_like(param, dtype=torch.int16, requires_grad=False)
        for other in [optimizer.state.get(param, {}).get("rest") for optimizer in list(KEEPERS)]:
            if other is not None and (other.dtype, other.shape, other.device) == (rest.dtype, rest.shape, rest.device):
                rest = other
        if values is not None:
            rest.copy_(values)
        self.state[param]["rest"] = rest
        KEEPERS.add(self)
        return rest

    def own_rest(self, param: torch.Tensor) -> torch.Tensor | None:
        """The rest of a parameter in lower precision, created where it is missing; None where no rests are kept."""
        rest: torch.Tensor | None = self.state.get(param, {}).get("rest")
        if rest is None:
            return self.keep_rest(param) if self.rests else None
        if rest.dtype is not torch.int16:
            raise RuntimeError(
                f"{type(self).__name__}: state['rest'] of a parameter of shape {tuple(param.shape)} was made {rest.dtype}; it "
                "counts units, and stays torch.int16. Convert only tensors of the state that are floating-point."
            )
        return rest

    def leave_out_rests(self, params: list[torch.Tensor]) -> None:
        """Drop the rests of these parameters, which have no use for them, and warn of their number."""
        lost = [self.state[param].pop("rest") for param in params if "rest" in self.state.get(param, {})]
        if lost:
            logger.warning(
                "%s: the rests of %d parameters are left out: these are not in lower precision here, or no rests are kept. "
                "ampkit.optimizers.float32_state_dict gives values that go anywhere.",
                type(self).__name__,
                len(lost),
            )

    def own_count(self, step: torch.Tensor | None, params: list[torch.Tensor]) -> torch.Tensor:
        """The step count that these parameters, and no others, share: ``step``, or a copy where others hold it too."""
        device = params[0].device
        if step is None:
            refuse_to_begin("the optimizer's state", device)
            step = torch.zeros((), dtype=torch.float32, device=device)
        elif len(params) == getattr(step, _HOLDERS, None):
            return step
        else:
            step = step.detach().to(device, torch.float32, copy=True)
        self._share_count(step, params)
        return step

    def _share_count(self, step: torch.Tensor, params: list[torch.Tensor]) -> None:
        setattr(step, _HOLDERS, len(params))
        for param in params:
            self.state[param]["step"] = step

    def __getstate__(self) -> dict[str, Any]:
        """Return torch's state, and the settings in attributes, which torch leaves out of copies."""
        settings = {name: value for name, value in vars(self).items() if isinstance(value, _SETTINGS)}
        return {**settings, **super().__getstate__()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.rests:
            KEEPERS.add(self)

    def state_dict(self) -> dict[str, Any]:
        """Return a state dict like torch.optim's: every parameter has a step count of its own in it, on the host."""
        saved = super().state_dict()
        for key, param in self._by_key(saved).items():
            if is_sharded(param) and key in saved["state"]:  # codes of 8 bits cannot be divided among more processes
                state = saved["state"][key].items()
                saved["state"][key] = {name: self.storage.unpacked(name, value, param) for name, value in state}
        steps: dict[int, torch.Tensor] = {}
        for key, state in saved["state"].items():
            step = state.get("step")
            if isinstance(step, torch.Tensor):
                here = steps.setdefault(id(step), step.detach().cpu())
                saved["state"][key] = {**state, "step": here.clone()}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this class, of its torch.optim twin, or of Apex."""
        state_dict = self.translated(
            {
                **state_dict,
                "state": {key: dict(state) for key, state in state_dict["state"].items()},
                "param_groups": [dict(group) for group in state_dict["param_groups"]],
            }
        )
        for group in state_dict["param_groups"]:
            self.check_group(group)
        hooks = (
            self.register_load_state_dict_pre_hook(lambda _, saved: self._hand_on_saved(saved)),
            self.register_load_state_dict_post_hook(lambda _: self._store_saved(), prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _hand_on_saved(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Replace tensors of state, after the hooks of scripts, by what torch does not round."""
        states = dict(state_dict["state"])
        for key, param in self._by_key(state_dict).items():
            state = dict(states.get(key, {}))
            for name, value in state.items():
                self.storage.check(name, value, param)
                if isinstance(value, Tensor) and name != "step":
                    state[name] = _AsSaved(value)
            if key in states:
                states[key] = state
        return {**state_dict, "state": states}

    def _store_saved(self) -> None:
        """Store what `_hand_on_saved` has replaced, before the hooks of scripts."""
        params, missing = [param for group in self.param_groups for param in group["params"]], 0
        for param in params:
            state = self.state.get(param, {})
            for name, value in state.items():
                if isinstance(value, _AsSaved):
                    state[name] = self.storage.stored(name, value.tensor, param)
            if self.rests and param.dtype in LOWER_PRECISION and state:
                values, missing = state.get("rest"), missing + ("rest" not in state)
                if values is not None:
                    state["rest"] = None  # of another optimizer, which the next line looks for, or new
                    self.keep_rest(param, values)
        if missing and "_ampkit" not in vars(self):  # registry.WRAPPER_KEY: else the session has them
            logger.warning(
                "%s: the checkpoint has no rests of %d parameters: they begin at 0.", type(self).__name__, missing
            )
        self.leave_out_rests([p for p in params if not self.rests or p.dtype not in LOWER_PRECISION])
        self._share_equal_counts()

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError or RuntimeError for settings that are not accepted."""

    def _by_key(self, state_dict: dict[str, Any]) -> dict[Any, torch.Tensor]:
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        return dict(zip(saved, (param for group in self.param_groups for param in group["params"])))

    def _share_equal_counts(self) -> None:
        shared: dict[Any, list[torch.Tensor]] = {}
        for index, group in enumerate(self.param_groups):
            for param in group["params"]:
                step = self.state.get(param, {}).get("step")
                if step is not None:
                    shared.setdefault((index, param.device, float(step)), []).append(param)
        for (_, device, number), params in shared.items():
            self._share_count(torch.full((), number, dtype=torch.float32, device=device), params)

    def translated(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Translate a checkpoint of either layout to this class's; ``state_dict`` is a copy, two levels deep."""
        for group in state_dict["param_groups"]:
            step = group.pop("step", None)
            for key in group["params"]:
                if step is not None and key in state_dict["state"]:
                    state_dict["state"][key].setdefault("step", torch.tensor(float(step)))
        return self.with_our_groups(state_dict)

    def with_our_groups(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Add settings that the other layout does not know, with their present values."""
        for saved, group in zip(state_dict["param_groups"], self.param_groups):
            for name in self.defaults:
                if name in group:
                    saved.setdefault(name, group[name])
        return state_dict


# Float32 values of a model whose optimizer keeps the rests: for evaluation, export and averages


@torch.no_grad()
def float32_state_dict(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """``model.state_dict()`` with the float32 value of every tensor in lower precision, exact where ``optimizer`` keeps its rest.

    The float32 tensors are copies; all others are the model's own, as in ``state_dict``.
    """
    state: dict[str, Tensor] = {}
    copies: dict[int, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor) or tensor.dtype not in LOWER_PRECISION:
            state[name] = tensor.detach() if isinstance(tensor, Tensor) else tensor
        elif id(tensor) in copies:  # tied
            state[name] = copies[id(tensor)]
        else:
            state[name] = copies[id(tensor)] = kernels.joined(tensor, optimizer.state.get(tensor, {}).get("rest"))
    return state


@torch.no_grad()
def load_float32(model: nn.Module, optimizer: Any, state: dict[str, Any], strict: bool = True) -> Any:
    """``model.load_state_dict(state)`` of float32 values; what parameters in lower precision lack of them becomes rests.

    Returns what ``load_state_dict`` does. Raises RuntimeError for names and shapes that do not fit, as it does.
    """
    result = model.load_state_dict(state, strict=strict)
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in state and id(tensor) in held and tensor.dtype in LOWER_PRECISION:
            if getattr(optimizer, "rests", False):
                value = state[name].detach().to(tensor.device, torch.float32)
                kernels.multi_tensor_split([value], [tensor.detach()], [optimizer.keep_rest(tensor)])
    return result
