"""What subclasses of Apex's optimizers find on ``self``: fairseq's, for one, write their own ``step`` with them."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch


class ForSubclasses:
    """The no-op flag that ``multi_tensor_applier`` is given. Each optimizer names the functions of ``amp_C`` beside it."""

    param_groups: list[dict[str, Any]]

    @cached_property
    def _dummy_overflow_buf(self) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int32, device=self.param_groups[0]["params"][0].device)
