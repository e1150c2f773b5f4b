"""transformers' Trainer: a class to put in front of it, or in front of any class derived from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..api import initialize
from ..registry import session_of
from ..validation import unwrapped
from .accelerate import attach, refuse_unfit


class AmpkitMixin:
    """``class O2Trainer(AmpkitMixin, Trainer): ampkit_settings = {"opt_level": "O2"}``.

    ``ampkit_settings`` are those of `ampkit.initialize`, which is called once the Trainer has its optimizer. The session goes on
    after ``train()``, so that ``evaluate`` computes alike; `ampkit.close` ends it. Leave out ``fp16=`` and ``bf16=``.

    Raises what `ampkit.initialize` and `attach` raise, when the optimizer is made.
    """

    ampkit_settings: ClassVar[Mapping[str, Any]] = {}

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = super().create_optimizer(*args, **kwargs)
        inner = unwrapped(self.optimizer)
        if session_of(inner) is None:
            refuse_unfit(self.accelerator)
            initialize(self.model, inner, **self.ampkit_settings)
        if self.accelerator.scaler is None:
            attach(self.accelerator, session_of(inner))
        return optimizer

    def save_model(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        super().save_model(output_dir, *args, **kwargs)
        # transformers 5 loads weights in the dtype that config.json names: that of the model, where these are float32.
        config, session = getattr(self.model, "config", None), session_of(self.model)
        if session is not None and self.args.should_save and getattr(config, "dtype", None) is not None:
            config.dtype = "float32"
            config.save_pretrained(output_dir or self.args.output_dir)
