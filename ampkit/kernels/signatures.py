"""Functions that are made as text, with the signature of another one: what an operator's call is bound by."""

import inspect
import math
from collections.abc import Callable
from typing import Any


def with_signature_of(function: Callable, expression: str, names: dict[str, Any]) -> Callable:
    """A function that takes what ``function`` takes, Python binding and refusing it, and returns this expression of it."""
    signature = inspect.signature(function)
    bare = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
    signature = signature.replace(parameters=bare, return_annotation=signature.empty)
    made = eval(f"lambda {str(signature)[1:-1]}: {expression}", {**names, "inf": math.inf})
    made.__name__ = made.__qualname__ = function.__name__
    return made
