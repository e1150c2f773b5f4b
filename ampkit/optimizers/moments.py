"""The storage of a fused optimizer's moments, and its rounding of moments and parameters: `Storage`, made of three arguments.

An optimizer asks its storage for zeros, and for a tensor of a checkpoint as it is ``stored``.

Moments in lower precision are always rounded by random numbers: rounding to nearest would lose a step's small changes
(kernels/moments.py). Checkpoints hold them as they are, so that saving takes no memory. Shards in 8 bits are saved in float32:
codes cannot be divided among another number of processes.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from ..dtypes import CASTABLE, LOWER_PRECISION
from ..kernels import moments
from ..sharding import local

STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.uint8}
ROUNDINGS = ("nearest", "stochastic")
#: The moments that can be narrow, and whether they have a sign.
_MOMENTS = {"exp_avg": True, "exp_avg_sq": False, "momentum_buffer": True}


@dataclass(frozen=True)
class Storage:
    """The dtype of stored moments, and whether parameters in bfloat16 are rounded by random numbers."""

    state_dtype: torch.dtype = torch.float32
    is_stochastic: bool = False

    @classmethod
    def of(cls, optimizer: Any, state_dtype: str | torch.dtype, rounding: str, seed: int) -> Storage:
        """Return the storage for a constructor's arguments. Raises ValueError for a value that does not exist."""
        name = str(state_dtype).removeprefix("torch.")
        kind = type(optimizer).__name__
        if name not in STATE_DTYPES:
            raise ValueError(
                f"{kind}: state_dtype is {state_dtype!r}; expected one of {', '.join(map(repr, STATE_DTYPES))}."
            )
        if rounding not in ROUNDINGS:
            raise ValueError(f"{kind}: rounding is {rounding!r}; expected one of {', '.join(map(repr, ROUNDINGS))}.")
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise ValueError(f"{kind}: seed is {seed!r}; expected a whole number from 0 to 2**63 - 1.")
        return cls(STATE_DTYPES[name], rounding == "stochastic")

    @property
    def is_narrow(self) -> bool:
        return self.state_dtype is not torch.float32

    @property
    def draws(self) -> bool:
        return self.is_narrow or self.is_stochastic

    def defaults(self, seed: int) -> dict[str, int]:
        """The settings that parameter groups hold, and so checkpoints."""
        return {"seed": seed} if self.draws else {}

    def zeros(self, param: torch.Tensor) -> torch.Tensor:
        """A moment before the first step."""
        if self.state_dtype is torch.uint8 and param.dtype in CASTABLE:
            return torch.zeros(moments.packed_size(local(param).numel()), dtype=torch.uint8, device=param.device)
        dtype = self.state_dtype if param.dtype in CASTABLE else torch.promote_types(torch.float32, param.dtype)
        return torch.zeros_like(param, dtype=dtype, requires_grad=False)

    def check(self, name: str, saved: Any, param: torch.Tensor) -> None:
        """Raise ValueError for a moment in 8 bits that a checkpoint holds of a tensor of another size."""
        shape = local(param).shape
        if _is_packed(name, saved) and saved.numel() != moments.packed_size(shape.numel()):
            raise ValueError(
                f"The checkpoint's {name!r} has {saved.numel()} bytes, and in 8 bits a parameter of shape {tuple(shape)} needs "
                f"{moments.packed_size(shape.numel())}. Load it into an optimizer over the same parameters, unsharded. For others, "
                "save it again from there with state_dtype='float32'."
            )

    def unpacked(self, name: str, saved: Any, param: torch.Tensor) -> Any:
        """The float32 values of a moment in 8 bits, laid out as the parameter is; anything else unchanged."""
        if not _is_packed(name, saved):
            return saved
        values = torch.zeros_like(param, dtype=torch.float32, requires_grad=False)
        here = local(values)
        here.copy_(moments.unpack(saved, here.shape, _MOMENTS[name]))
        return values

    def stored(self, name: str, saved: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        """A tensor of a checkpoint as an optimizer keeps it: moments as ``state_dtype`` says, other floating values in float32.

        Float32 values that come from codes of 8 bits give the same codes again.
        """
        is_narrow = self.is_narrow and name in _MOMENTS and param.dtype in CASTABLE
        if _is_packed(name, saved) and not (is_narrow and self.state_dtype is torch.uint8):
            saved = self.unpacked(name, saved, param)
        if not saved.is_floating_point():
            return saved.to(param.device, copy=True)
        if is_narrow and self.state_dtype is torch.uint8:
            return moments.pack(local(saved.to(param.device)), _MOMENTS[name])
        dtype = self.state_dtype if is_narrow else torch.promote_types(torch.float32, param.dtype)
        return saved.to(param.device, dtype, copy=is_narrow or param.dtype in LOWER_PRECISION)

    def numbers(
        self, optimizer: torch.optim.Optimizer, group: dict[str, Any], params: list[torch.Tensor]
    ) -> dict[str, Any]:
        """The keywords of the kernels that say by which random numbers ``params`` are rounded; none where all is to nearest."""
        if not self.draws:
            return {}
        for param in params if self.is_stochastic else ():
            if param.dtype is torch.float16:
                raise RuntimeError(
                    f"rounding='stochastic' is for parameters in bfloat16; one of shape {tuple(param.shape)} is float16. "
                    "Train in bfloat16, or with float32 master weights: initialize(model, optimizer, 'O2')."
                )
        all_params = [param for param_group in optimizer.param_groups for param in param_group["params"]]
        cache = optimizer.__dict__.setdefault("_positions", {})
        cached = cache.get(id(params[0]))
        if cached is None or not are_same(cached[0], params) or not are_same(cached[1], all_params):
            places = {id(param): place for place, param in enumerate(all_params)}
            values = [float(places[id(param)]) for param in params]
            positions = torch.tensor(values, dtype=torch.float32, device=params[0].device)
            cached = cache[id(params[0])] = (list(params), all_params, positions)
        return dict(positions=cached[2], seed=group["seed"], round_params=self.is_stochastic)


def _is_packed(name: str, saved: Any) -> bool:
    return name in _MOMENTS and isinstance(saved, torch.Tensor) and saved.dtype is torch.uint8


def are_same(these: Collection[Any], those: Collection[Any]) -> bool:
    """Whether two collections hold the same objects, in the same order."""
    return len(these) == len(those) and all(map(operator.is_, these, those))
