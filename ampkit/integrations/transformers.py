"""A mixin for transformers' Trainer, or for any class derived from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar
from unittest import mock

from ..api import initialize
from ..errors import ConfigurationError
from ..logs import logger
from ..registry import session_of, unwrapped
from .accelerate import PRECISION_VARIABLE, attach, refuse_unfit


class AmpkitMixin:
    """A mixin for Trainer: ``class O2Trainer(AmpkitMixin, Trainer): ampkit_settings = {"opt_level": "O2"}``.

    ``ampkit_settings`` are those of `ampkit.initialize`, which is called once the Trainer has its optimizer. The session goes on
    after ``train()``, so that ``evaluate`` computes alike; `ampkit.close` ends it. Leave out ``fp16=`` and ``bf16=``.

    Raises what `ampkit.initialize` and `attach` raise, when the optimizer is made, and `ConfigurationError` for a class that names
    ``AmpkitMixin`` behind ``Trainer``.
    """

    ampkit_settings: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        before = cls.__mro__[: cls.__mro__.index(AmpkitMixin)]
        trainers = [base for base in before if hasattr(base, "train") and not issubclass(base, AmpkitMixin)]
        if trainers and not hasattr(super(), "train"):
            bases = ", ".join(base.__name__ for base in cls.__bases__)
            raise ConfigurationError(
                f"class {cls.__name__}({bases}): AmpkitMixin comes behind {trainers[0].__name__}, whose methods would run in the "
                f"place of its own, and nothing would train at a level. Write class {cls.__name__}(AmpkitMixin, "
                f"{trainers[0].__name__})."
            )

    def create_accelerator_and_postprocess(self) -> None:
        """Ignore the precision that an earlier ``TrainingArguments(bf16=True)`` has left in the environment."""
        precision = os.environ.get(PRECISION_VARIABLE, "no")
        if precision == "no" or self.args.bf16 or self.args.fp16:
            return super().create_accelerator_and_postprocess()
        logger.warning(
            "%s=%s stands in the environment: an earlier TrainingArguments(%s=True) or accelerate launch has set it. %s goes by "
            "its ampkit_settings alone.",
            PRECISION_VARIABLE,
            precision,
            precision,
            type(self).__name__,
        )
        if hasattr(self.args, "mixed_precision"):  # transformers 5 has read the environment into it
            self.args.mixed_precision = "no"
        with mock.patch.dict(os.environ, {PRECISION_VARIABLE: "no"}):
            super().create_accelerator_and_postprocess()

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = super().create_optimizer(*args, **kwargs)
        inner = unwrapped(self.optimizer)
        if session_of(inner) is None:
            refuse_unfit(self.accelerator)
            initialize(self.model, inner, **self.ampkit_settings)
        if self.accelerator.scaler is None:
            attach(self.accelerator, session_of(inner))
        return optimizer

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the weights again after `create_optimizer`: the Trainer loaded them before, and a model in bfloat16 rounded them."""
        session = session_of(self.model)
        if checkpoint is not None and session is not None and session.incoming.dtypes_of(self.model):
            self._load_from_checkpoint(checkpoint, self.model)
        super()._load_optimizer_and_scheduler(checkpoint)

    def save_model(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        super().save_model(output_dir, *args, **kwargs)
        # transformers 5 loads weights in the dtype of config.json: the model's, although the saved weights are float32.
        config, session = getattr(self.model, "config", None), session_of(self.model)
        if session is not None and self.args.should_save and getattr(config, "dtype", None) is not None:
            config.dtype = "float32"
            config.save_pretrained(output_dir or self.args.output_dir)
