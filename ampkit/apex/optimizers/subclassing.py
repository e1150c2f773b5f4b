"""Attributes for subclasses of Apex's optimizers: fairseq's, for one, write their own ``step`` with them."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch


class ForSubclasses:
    """A mixin with the no-op flag for ``multi_tensor_applier``. Each optimizer names the functions of ``amp_C`` beside it."""

    param_groups: list[dict[str, Any]]

    @cached_property
    def _dummy_overflow_buf(self) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int32, device=self.param_groups[0]["params"][0].device)
