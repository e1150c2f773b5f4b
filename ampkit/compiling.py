"""Work that has to be done beside compiled code, and that code which dynamo traces needs.

A graph of torch.compile holds what Python did while it was traced. What an initialized model does before each forward
(take over what was written to loans, refuse changed dtypes) cannot be in it: `compiled_models` has it done on the way into
compiled code instead. `forget_traces` is for those who change what a trace would contain.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.compiler import config

from .patching import PatchSet

_TAG = " ampkit: "


def forget_traces() -> None:
    """Have compiled functions traced anew: they hold what casting did at the first trace, and do not see it change."""
    if is_compiling_here():
        compiled_models.before_each_call(forget_traces)
    elif "torch._dynamo" in sys.modules:
        compiled_models.not_before_calls(forget_traces)
        torch.compiler.reset()


def is_compiling_here() -> bool:
    """Whether dynamo compiles in this thread: what it works on, and has compiled, may not be taken from it."""
    return torch._guards.CompileContext.try_get() is not None


def tag_compiled_code(casts: str) -> None:
    """Have torch keep compiled code on disk apart from code in which other casts were made; "" is none.

    A graph names ``x @ y`` and not what stands behind it, so that torch's caches would hand a program without casts the
    code that was compiled with them.
    """
    own = config.cache_key_tag.split(_TAG)[0]
    config.cache_key_tag = f"{own}{_TAG}{casts}" if casts else own


def give_back_kernels(original_of: Callable[[Any], Any]) -> None:
    """Have generated code call torch's own kernels: inductor takes wrappers for them where it is loaded while torch is patched."""
    if (module := sys.modules.get("torch._inductor.select_algorithm")) is not None:
        kernels = vars(module.extern_kernels)
        kernels.update({name: original_of(kernel) for name, kernel in kernels.items()})


class CompiledModels:
    """The initialized models whose forward is in compiled code, and what is done for them before that code runs.

    Every call of a compiled function or module, whenever it was compiled, asks ``_callback_from_stance`` what to do with
    the frames that follow; that is where this is done. When it raises, the call is left uncompiled: the model's own forward
    then raises the same error, and nothing of dynamo's is left half set up.
    """

    def __init__(self) -> None:
        #: By themselves, or by a reference to the model that they are done for.
        self._before_calls: dict[Any, Callable[[], Any]] = {}
        self._patches = PatchSet()
        self._is_watching = False

    def not_before_calls(self, action: Any) -> None:
        """Undo `before_each_call`, or `note` by a reference to its model."""
        self._before_calls.pop(action, None)
        if not self._before_calls:
            self._patches.restore()
            self._is_watching = False

    def note(self, model: nn.Module, before_forward: Callable[[nn.Module], None]) -> None:
        """A trace goes through the forward of ``model``: do what precedes a forward, now and before each compiled call."""
        before_forward(model)
        ref = weakref.ref(model, self.not_before_calls)
        self.before_each_call(lambda: (alive := ref()) is None or before_forward(alive), ref)

    def before_each_call(self, action: Callable[[], Any], key: Any = None) -> None:
        """Have ``action()`` done in the thread of each compiled call, before dynamo looks at its guards."""
        self._before_calls[key or action] = action
        # Where no optimizer has loaded dynamo yet, the first trace through a model comes here again.
        if not self._is_watching and "torch._dynamo" in sys.modules:
            self._patches.put_around(torch._dynamo.eval_frame, "_callback_from_stance", self._choose_callback)
            self._is_watching = True

    def _choose_callback(self, original: Callable[[Any], Any], callback: Any) -> Any:
        if callback is not None and callback is not False:
            try:
                for action in tuple(self._before_calls.values()):
                    action()
            except Exception:
                return None
        return original(callback)


compiled_models = CompiledModels()
