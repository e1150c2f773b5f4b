"""A session: everything that one ``initialize`` did, and its undo.

`Session.prepare` casts the models, gives the optimizers masters and methods, and patches torch, in that order; `Session.close`
takes it all back in reverse. The session holds its models and optimizers weakly: when the last of them is gone, it
closes itself. Live sessions stand in `live_sessions`, oldest first.
"""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from . import models as model_casts
from .casting.engine import Casting, active_casting
from .compiling import compile_warning
from .errors import ConfigurationError, LossIdError, NotInitializedError
from .logs import logger, stdout_lines
from .loss_scale import DynamicScaler, LossScaler, StaticScaler, Verdict
from .models import Float32Value, ForwardCasts, Kept
from .optimizers import OptimizerAdapter, adapter_of
from .plan import LOWER_PRECISIONS, OPT_LEVELS, Plan, defaults_of

SKIPS_BEFORE_DIAGNOSIS = 25

live_sessions: list[Session] = []
"""Every session that is neither closed nor without models and optimizers, oldest first."""


class Session:
    """One ``initialize`` call, alive until `close` or until its models and optimizers are gone.

    ``plan`` holds its settings and ``scalers`` one loss scaler per loss. Usually made by ``ampkit.initialize``.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.scalers: list[LossScaler] = [_make_scaler(plan) for _ in range(plan.num_losses if plan.enabled else 0)]
        for loss_id, scaler in enumerate(self.scalers):
            scaler.loss_id = loss_id
        self.casting: Casting | None = None
        self._undo = ExitStack()
        self._models: list[weakref.ref[nn.Module]] = []
        self._optimizers: list[weakref.ref[Any]] = []
        self._left_as: weakref.WeakKeyDictionary[nn.Module, list[tuple[weakref.ref, torch.dtype]]] = weakref.WeakKeyDictionary()
        self._ddp: weakref.ref[DistributedDataParallel] | None = None
        self._runs_without_sync = False

    @property
    def models(self) -> list[nn.Module]:
        return [model for ref in self._models if (model := ref()) is not None]

    @property
    def optimizers(self) -> list[Any]:
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]

    @property
    def is_live(self) -> bool:
        return self in live_sessions

    @property
    def owns_nothing(self) -> bool:
        return not self.models and not self.optimizers

    # Preparing and closing

    def prepare(self, models: Sequence[nn.Module], optimizers: Sequence[Any]) -> None:
        """Touch models, optimizers and torch as the plan says. Whatever fails, nothing stays half-changed."""
        live_sessions.append(self)
        self._undo.callback(live_sessions.remove, self)
        try:
            for owned, refs in ((models, self._models), (optimizers, self._optimizers)):
                refs.extend(weakref.ref(thing, functools.partial(_close_if_orphaned, weakref.ref(self))) for thing in owned)
            if not self.plan.enabled:
                return
            if self.plan.verbosity >= 1:
                stdout_lines.attach()
                self._undo.callback(stdout_lines.detach)
                self._log_banner()
            values = self._prepare_models(models)
            self._prepare_optimizers(optimizers, values)
            if self.plan.patch_torch_functions:
                self._start_casting(models)
            compile_warning.acquire()
            self._undo.callback(compile_warning.release)
            self._settle(optimizers, values)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give torch, the models and the optimizers back as they were; parameters keep what they have learned, in float32.

        Closing twice does nothing the second time.
        """
        for scaler in self.scalers:
            scaler.settle()
        self._undo.close()
        self._models.clear()
        self._optimizers.clear()

    def on_close(self, undo: Callable[..., Any], *args: Any) -> None:
        """Have ``undo(*args)`` called when the session closes, before everything that `prepare` did is undone."""
        self._undo.callback(undo, *args)

    def _prepare_models(self, models: Sequence[nn.Module]) -> dict[torch.Tensor, Float32Value]:
        plan = self.plan
        casts = ForwardCasts(
            inputs=plan.cast_model_type,
            outputs=plan.cast_model_outputs or (torch.float32 if plan.cast_model_type is not None else None),
            patched=plan.patch_torch_functions,
        )
        values: dict[torch.Tensor, Float32Value] = {}
        kept = [Kept(model, bool(plan.keep_batchnorm_fp32), plan.keep_fp32) for model in models] if plan.casts_weights else []
        for model in models:
            self._undo.callback(_when_alive(model_casts.uninstall), weakref.ref(model))
            if plan.casts_weights:
                self._undo.callback(_when_alive(_restore_model), weakref.ref(model))
        for model, choice in zip(models, kept):
            model_casts.cast_weights(model, plan.cast_model_type, choice, values)
            for module in choice.outermost():
                model_casts.bridge(module, plan.cast_model_type)
        if plan.master_weights and not plan.casts_weights:
            for model in models:
                if any(param.dtype in LOWER_PRECISIONS.values() for param in model.parameters()):
                    self._undo.callback(_when_alive(model_casts.restore_weights), weakref.ref(model))
                    model_casts.cast_weights(model, _lower_precision_in(model), model_casts.AsTheyAre(model), values)
        if kept:
            logger.info("Kept in float32: %d modules.", sum(len(choice.modules) for choice in kept))
            logger.debug("Kept in float32: %s", ", ".join(name for choice in kept for name in choice.modules.values()))
        for model in models:
            if not plan.casts_weights:
                self._left_as[model] = [(weakref.ref(param), param.dtype) for param in model.parameters()]
            model_casts.install(model, casts)
            model_casts.watchers[model] = self._before_forward
        return values

    def _prepare_optimizers(self, optimizers: Sequence[Any], values: dict[torch.Tensor, Float32Value]) -> None:
        plan = self.plan
        for optimizer in optimizers:
            self._undo.callback(_when_alive(_detach_optimizer), weakref.ref(optimizer))
            OptimizerAdapter(
                optimizer,
                owner=self,
                values=values if plan.master_weights else {},
                refuse_closures=plan.has_dynamic_loss_scale,
            )

    def _settle(self, optimizers: Sequence[Any], values: dict[torch.Tensor, Float32Value]) -> None:
        """Let go of float32 values that nobody needs. Last of all: what failed before could still be undone exactly."""
        trained = {
            param
            for optimizer in optimizers
            for group in optimizer.param_groups
            for param in group["params"]
            if param.requires_grad
        }
        for optimizer in optimizers:
            adapter_of(optimizer).match_state()
        model_casts.settle_originals(values, self.plan.keep_originals, set() if self.plan.master_weights else trained)

    def _start_casting(self, models: Sequence[nn.Module]) -> None:
        plan = self.plan
        casting = active_casting()
        if casting is not None:
            refuse_second_lower_precision(plan)
        else:
            casting = Casting(plan.patch_torch_functions_type, policy=plan.policy, verbosity=plan.verbosity)
            casting.install()
        self.casting = casting
        self._undo.callback(self.stop_casting)
        self._restart_device_types()

    def stop_casting(self) -> None:
        """End O1's casts for this session, and with the last session that has them, for torch. The rest of it goes on."""
        casting, self.casting = self.casting, None
        if casting is None:
            return
        if any(session.casting is casting for session in live_sessions):
            self._restart_device_types()
        else:
            casting.close()

    @staticmethod
    def _restart_device_types() -> None:
        """The engine casts where the models of its sessions live, and of those only."""
        casting = active_casting()
        casting.device_types.clear()
        for session in live_sessions:
            if session.casting is casting:
                casting.device_types.update(device_types(session.models))

    # The iteration

    @contextmanager
    def scale_loss(
        self,
        loss: torch.Tensor,
        optimizers: Sequence[Any],
        loss_id: int,
        delay_unscale: bool,
        delay_overflow_check: bool,
        guests: Sequence[Any] = (),
    ) -> Iterator[torch.Tensor]:
        """See `ampkit.scale_loss`. ``guests`` are optimizers of other sessions, for which this session's loss scale holds here."""
        scaler = self.scaler(loss_id)
        adapters = [self._adapter(optimizer) for optimizer in optimizers] + [adapter_of(guest) for guest in guests]
        if not self._checks(scaler) and not self.plan.master_weights:
            try:
                yield loss.float()
            finally:
                self._end_of_casts(delay_unscale)
            return
        scale = scaler.loss_scale
        self._open(adapters, scale)
        try:
            yield loss.float() * scale
        except BaseException:
            for adapter in adapters:
                adapter.gradients.put_back()
            self._end_of_casts(keep=False)
            raise
        local, self._runs_without_sync = self._runs_without_sync, False
        if delay_unscale:
            for adapter in adapters:
                adapter.gradients.keep_scaled(scale)
                adapter.delayed_with = scaler
        else:
            self._collect(adapters, scaler, scale, local, delay_overflow_check)
        self._end_of_casts(delay_unscale)

    def scaler(self, loss_id: int) -> LossScaler:
        """The loss scaler of a loss, 0 to ``num_losses`` - 1."""
        if isinstance(loss_id, bool) or not isinstance(loss_id, int) or not 0 <= loss_id < len(self.scalers):
            raise LossIdError(
                f"loss_id={loss_id!r} is out of range: this session has num_losses={len(self.scalers)}, so loss_id goes from "
                f"0 to {len(self.scalers) - 1}. Pass num_losses= to initialize for more."
            )
        return self.scalers[loss_id]

    def _checks(self, scaler: LossScaler) -> bool:
        return self.plan.checks_gradients or scaler.loss_scale != 1.0  # it may have been set by hand

    def _adapter(self, optimizer: Any) -> OptimizerAdapter:
        adapter = adapter_of(optimizer)
        if adapter is None or adapter.owner is not self:
            raise not_initialized(optimizer)
        return adapter

    def _open(self, adapters: list[OptimizerAdapter], scale: float) -> None:
        if any(adapter.gradients.is_open for adapter in adapters):
            raise ConfigurationError(
                "scale_loss was entered twice for the same optimizer, one inside the other. Leave the first block before "
                "entering the second: gradients of several losses add up across blocks."
            )
        for adapter in adapters:
            adapter.gradients.drop_cleared()
        ddp = self._ddp() if self._ddp is not None else None
        for adapter in adapters:
            adapter.gradients.open(scale, copy_aside=ddp is not None and ddp.gradient_as_bucket_view)

    def _collect(
        self, adapters: list[OptimizerAdapter], scaler: LossScaler, scale: float, local: bool, delay_overflow_check: bool
    ) -> None:
        found_inf = self._found_inf(adapters, scaler) if self._checks(scaler) else None
        done: set[torch.Tensor] | None = set() if len(adapters) > 1 else None
        for adapter in adapters:
            adapter.gradients.collect(scale, found_inf, local=local, done=done)
        if found_inf is None:
            return
        if delay_overflow_check:
            scaler.carried_found_inf = found_inf
            return
        verdict = scaler.judge(found_inf, moves_scale=not local)
        for adapter in adapters:
            adapter.verdicts.append(verdict)

    @staticmethod
    def _found_inf(adapters: list[OptimizerAdapter], scaler: LossScaler) -> torch.Tensor:
        carried, scaler.carried_found_inf = scaler.carried_found_inf, None
        if carried is not None:
            return carried
        slot = next((slot for adapter in adapters for slot in adapter.gradients.slots), None)
        return torch.zeros(1, dtype=torch.float32, device=slot.param.device if slot is not None else "cpu")

    def _end_of_casts(self, keep: bool) -> None:
        casting = active_casting()
        if casting is not None and not keep:
            casting.drop_cache()

    # What adapters and models ask of their session

    def float32_values(self) -> dict[torch.Tensor, Float32Value]:
        """The float32 value of every lower-precision tensor of the models; empty where there are no masters."""
        if not self.plan.master_weights:
            return {}
        return {tensor: entry for model in self.models for _, _, tensor, entry in model_casts.lower_entries(model)}

    def finish_delayed(self, adapter: OptimizerAdapter) -> None:
        """A step while gradients still wait after ``delay_unscale=True``: end the iteration as ``scale_loss`` would have."""
        scaler = adapter.delayed_with or self.scalers[0]
        self._collect([adapter], scaler, adapter.gradients.waiting_scale, local=False, delay_overflow_check=False)

    def report_skip(self, adapter: OptimizerAdapter, verdict: Verdict) -> None:
        """Log a skipped step once, name the culprit when there were many, give up when it is hopeless."""
        if verdict.reported:
            return
        verdict.reported = True
        scaler = verdict.scaler
        if not verdict.moves_scale:
            logger.info("Gradient overflow under no_sync(): this step is skipped; the loss scale moves at the next sync.")
            return
        logger.info(scaler.overflow_line())
        if scaler.skips_in_a_row and scaler.skips_in_a_row % SKIPS_BEFORE_DIAGNOSIS == 0:
            logger.warning(
                "Loss scaler %d: %d steps in a row were skipped; the first parameter whose gradient is not finite is %s.",
                scaler.loss_id,
                scaler.skips_in_a_row,
                self._name_of(adapter.gradients.first_non_finite()),
            )
        scaler.raise_if_hopeless(self.plan.on_floor)

    def _name_of(self, param: torch.Tensor | None) -> str:
        if param is None:
            return "not found (the gradients were cleared or changed since)"
        models = self.models
        for index, model in enumerate(models):
            for name, candidate in model.named_parameters():
                if candidate is param:
                    return repr(name) if len(models) == 1 else f"{name!r} of model {index}"
        return f"one of shape {tuple(param.shape)} that is in none of the models given to initialize()"

    def _before_forward(self, model: nn.Module) -> None:
        if self.plan.casts_weights:
            model_casts.bring_into_agreement(model)
        else:
            _refuse_changed_dtype(model, self._left_as[model])
        if self.casting is not None:
            self.casting.device_types.update(device_types([model], at_most=1))
        ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)
        if ddp is not None and torch.is_grad_enabled():
            self._ddp = weakref.ref(ddp)
            self._runs_without_sync = not ddp.require_backward_grad_sync

    def _log_banner(self) -> None:
        plan, defaults = self.plan, defaults_of(self.plan.opt_level, device_type_of(self.models))
        logger.info("Selected optimization level %s", OPT_LEVELS[plan.opt_level].brief)
        logger.info("Defaults for this optimization level are:")
        for name, value in defaults.banner_rows():
            logger.info(f"{name:22} : {value}")
        logger.info("After processing overrides, optimization options are:")
        for name, value in plan.banner_rows():
            logger.info(f"{name:22} : {value}")


def session_of(thing: Any) -> Session | None:
    """The live session that owns a model or an optimizer."""
    for session in reversed(live_sessions):
        if any(owned is thing for owned in (*session.models, *session.optimizers)):
            return session
    return None


def current_session() -> Session | None:
    """The newest live session, or None."""
    return live_sessions[-1] if live_sessions else None


def collect_orphans(closing: Sequence[Session]) -> None:
    """Let sessions of models and optimizers that only reference cycles keep alive close before a new one starts.

    Sessions in ``closing`` are about to be closed and no reason to collect.
    """
    if any(session not in closing for session in live_sessions):
        gc.collect()


def not_initialized(optimizer: Any) -> NotInitializedError:
    """The error for an optimizer that no live session owns."""
    if not live_sessions:
        return NotInitializedError(
            "scale_loss was used before initialize. Call model, optimizer = ampkit.initialize(model, optimizer, opt_level=...) "
            "first."
        )
    return NotInitializedError(
        f"This {type(optimizer).__name__} was not passed to initialize(), or its session was closed. Pass every optimizer "
        "that scale_loss will see: ampkit.initialize(model, [optimizer, ...])."
    )


def refuse_second_lower_precision(plan: Plan, closing: Sequence[Session] = ()) -> None:
    """O1's patches are process-wide: two sessions can share them only with the same tables and the same precision.

    Sessions in ``closing`` will be gone by then.
    """
    casting = active_casting()
    stays = any(session.casting is casting for session in live_sessions if session not in closing)
    if casting is not None and stays and plan.patch_torch_functions:
        for name, wanted, active in (
            ("patch_torch_functions_type", plan.patch_torch_functions_type, casting.lower_precision),
            ("policy", plan.policy, casting.policy),
        ):
            if wanted != active:
                raise ConfigurationError(
                    f"{name}={wanted!r}: a live session patches torch functions with {active!r}, and the patches are "
                    "process-wide. Use the same value, or close that session first (ampkit.close())."
                )


def device_types(models: Sequence[nn.Module], at_most: int | None = None) -> set[str]:
    """The device types that the models' (first ``at_most``) parameters live on; their buffers, where there are none."""
    found = {param.device.type for model in models for param in itertools.islice(model.parameters(), at_most)}
    found = found or {buffer.device.type for model in models for buffer in model.buffers()}
    return found or {"cpu"}


def device_type_of(models: Sequence[nn.Module]) -> str:
    """The device type that decides the lower precision: an accelerator wherever there is one."""
    return next(iter(sorted(device_types(models) - {"cpu", "meta"})), "cpu")


def _make_scaler(plan: Plan) -> LossScaler:
    if plan.has_dynamic_loss_scale:
        return DynamicScaler(plan.loss_scale, plan.min_loss_scale, plan.max_loss_scale)
    return StaticScaler(plan.loss_scale)


def _lower_precision_in(model: nn.Module) -> torch.dtype:
    return next(param.dtype for param in model.parameters() if param.dtype in LOWER_PRECISIONS.values())


def _close_if_orphaned(session: weakref.ref[Session], _: weakref.ref) -> None:
    orphan = session()
    if orphan is not None and orphan.owns_nothing:
        orphan.close()


def _when_alive(undo):
    """An undo that does nothing once its object is gone."""

    def run(ref: weakref.ref) -> None:
        thing = ref()
        if thing is not None:
            undo(thing)

    return run


def _restore_model(model: nn.Module) -> None:
    model_casts.restore_weights(model)
    for module in model.modules():
        model_casts.unbridge(module)


def _detach_optimizer(optimizer: Any) -> None:
    adapter = adapter_of(optimizer)
    if adapter is not None:
        adapter.detach()


def _refuse_changed_dtype(model: nn.Module, left_as: list[tuple[weakref.ref, torch.dtype]]) -> None:
    changed = ((param, dtype) for ref, dtype in left_as if (param := ref()) is not None and param.dtype is not dtype)
    found, dtype = next(changed, (None, None))
    if found is None:
        return
    name = next((name for name, param in model.named_parameters() if param is found), None)
    if name is None:  # it was taken out of the model
        return
    raise ConfigurationError(
        f"{name!r} is {found.dtype}, initialize() left it {dtype}. Do not change the dtype of an initialized model "
        "(.half(), .to(dtype)): call ampkit.close() first, or initialize again with O2, O3 or O5, which cast it."
    )
