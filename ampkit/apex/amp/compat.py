"""``apex.amp.compat``: answers to questions that only torch before 0.4 gave rise to."""

from typing import Any

import torch


def variable_is_tensor() -> bool:
    return True


def tensor_is_variable() -> bool:
    return True


def tensor_is_float_tensor() -> bool:
    return False


def is_tensor_like(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def is_floating_point(x: torch.Tensor) -> bool:
    return torch.is_floating_point(x)


def scalar_python_val(x: Any) -> Any:
    return x.item() if hasattr(x, "item") else x[0]


def filter_attrs(module: Any, attrs: list[str]) -> list[str]:
    return [name for name in attrs if hasattr(module, name)]
