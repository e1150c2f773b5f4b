"""Lightning's precision plugin: ``Trainer(plugins=AmpkitPrecision("O2"))``.

Works with ``lightning`` and with ``pytorch_lightning``: import the one that you use before this module.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ..api import clip_grad_norm_, initialize, master_params, scale_loss
from ..errors import NotInitializedError
from ..iteration.loss_scale import load_scalers, save_scalers
from ..registry import session_of, watchers
from ..session import Session
from . import framework

_lightning = framework("lightning.pytorch", "pytorch_lightning", install="lightning")
Precision = _lightning.plugins.Precision
WeightAveraging: Any = getattr(_lightning.callbacks, "WeightAveraging", ())  # since 2.6


class AmpkitPrecision(Precision):
    """A precision plugin that trains at an opt level; it takes the settings of `ampkit.initialize` as keywords.

    The session begins when Lightning has set up model and optimizers, and ends with its ``fit`` (``validate``, ...). Every
    backward pass is a `scale_loss` block over all optimizers. The Trainer's ``gradient_clip_val``, ``accumulate_grad_batches`` and
    checkpoints work as ever; a checkpoint holds float32 weights, and the loss scale under the name of this class.

    Raises what `ampkit.initialize` raises, when ``fit`` sets up model and optimizers.
    """

    def __init__(self, opt_level: str = "O1", **settings: Any) -> None:
        self._settings = {"opt_level": opt_level, **settings}
        self._session: Session | None = None
        self._module: torch.nn.Module | None = None
        self._state: dict[str, Any] = {}

    def connect(self, model: Any, optimizers: list[Any], lr_schedulers: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        self.teardown()
        module = self._module = model.module if isinstance(model, DistributedDataParallel) else model
        initialize(module, optimizers, **self._settings)
        self._session = session_of(module)
        if self._session.incoming.dtypes_of(module):
            # Lightning has already loaded the file of ckpt_path=, and a model in bfloat16 has rounded its weights.
            checkpoint = module.trainer._checkpoint_connector._loaded_checkpoint
            if checkpoint:
                module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading)
        if self._session.plan.casts_weights:
            for callback in module.trainer.callbacks:
                _average_float32(callback, self._session)
        if model is not module:
            self._session.on_close(module.register_forward_pre_hook(_before_forward).remove)
            if self._session.plan.casts_weights:  # DDP has laid out its buckets for float32
                strategy = module.trainer.strategy
                strategy.model = module
                strategy.configure_ddp()
                model = strategy.model
        return model, optimizers, lr_schedulers

    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        if self._session is None:
            raise NotInitializedError(
                "AmpkitPrecision runs in a Trainer, which connects it to model and optimizers. For Fabric use "
                "ampkit.integrations.fabric.AmpkitFabricPrecision."
            )
        # A training step may call submodules without calling forward of the module.
        _before_forward(self._module)
        yield

    def backward(self, tensor: torch.Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        with scale_loss(tensor, self._session.optimizers) as scaled:
            super().backward(scaled, model, optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        if isinstance(optimizer, torch.optim.LBFGS):  # LBFGS evaluates the closure more than once
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        result = self._wrap_closure(model, optimizer, closure)
        optimizer.step(**kwargs)
        return result

    def main_params(self, optimizer: Any) -> Any:
        return master_params(optimizer)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        clip_grad_norm_(optimizer, clip_val)

    def state_dict(self) -> dict[str, Any]:
        if self._session is not None:
            self._session.scaling.synchronize()
            self._state = {}
            save_scalers([self._session.scalers], self._state)
        return self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        load_scalers([self._session.scalers], state_dict)

    def teardown(self) -> None:
        if self._session is None:
            return
        self.state_dict()  # a checkpoint may be saved after fit, from self._state
        device = next((param.device for param in self._module.parameters()), None)
        self._session.close()
        self._session = None
        if device is not None:
            self._module.to(device)  # back to the device that Lightning moved it to


def _average_float32(callback: Any, session: Session) -> None:
    """Patch Lightning's `WeightAveraging` to exchange float32 values with the model (at O3, which has none, rounded ones).

    The callback itself writes to lower-precision weights through ``.data``. That would round the average at each validation, and
    lose it when training ends.
    """
    if not isinstance(callback, WeightAveraging):
        return

    def copy_average(module: torch.nn.Module) -> None:
        module.load_state_dict(callback._average_model.module.state_dict())

    def swap(module: torch.nn.Module) -> None:
        current = {name: value.clone() for name, value in module.state_dict().items()}
        copy_average(module)
        callback._average_model.module.load_state_dict(current)

    for name, method in (("_copy_average_to_current", copy_average), ("_swap_models", swap)):
        setattr(callback, name, method)
        session.on_close(vars(callback).pop, name, None)


def _before_forward(module: Any, *_: Any) -> None:
    watcher = watchers.get(module)
    if watcher is not None:
        watcher.before_forward(module)
