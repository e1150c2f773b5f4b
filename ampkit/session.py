"""A session: everything that one ``initialize`` did, and its undo. It holds its models and optimizers weakly."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from . import patching, registry, validation
from .casting import cpp_wrappers as in_cpp
from .casting.engine import Casting, active_casting, switch_off_left_on
from .casting.narrow_gradients import getter, take_narrow_gradients
from .casting.state import out_of_modes
from .compiling import compiled_models, forget_traces, is_compiling_here
from .devices import device_type_of, device_types
from .dtypes import LOWER_PRECISION
from .errors import ConfigurationError
from .events import listeners, tell
from .iteration.block import Block, LossScaling, calls_of_torch
from .iteration.loss_scale import LossScaler
from .iteration.optimizer_wrapper import OptimizerWrapper
from .iteration.reach import retained_results, torchs_clipping
from .iteration.running_statistics import RunningStatistics
from .iteration.ways import one_pass_steps
from .kernels.backend import implementation
from .libraries import BUILD, SWITCHED_OFF
from .logs import logger, stdout_lines
from .models.float32_values import value_of
from .models.forward import ParameterRecord, parameters_now, sync_weights
from .models.incoming import Incoming
from .models.preparing import prepare_models
from .models.torch_integration import around_stored_weights, exports, weights_by_address
from .patching import Undo
from .plan import OPT_LEVELS, Plan, defaults_of
from .registry import live_sessions, watchers, wrapper_of, wrappers
from .sharding import fsdp_modules, unsharded_params


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    try:
        with patching.changing, out_of_modes():
            yield
    finally:
        switch_off_left_on()  # undoes what another thread could not undo meanwhile


class Session:
    """The changes of one ``initialize`` call, alive until `close` or until its models and optimizers are gone.

    ``plan`` holds its settings, ``scalers`` one loss scaler per loss, ``incoming`` the dtypes that earlier sessions noted.
    """

    def __init__(self, plan: Plan, incoming: Incoming | None = None, process_group: Any = None) -> None:
        self.plan = plan
        self.process_group = process_group
        self.sharded_at_first: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._knows_sharding = False
        self.incoming = incoming or Incoming()
        self.scaling = LossScaling(plan)
        self.scalers = self.scaling.scalers
        self.statistics = RunningStatistics()
        self.casting: Casting | None = None
        self._undo = Undo()
        self._models: list[weakref.ref[nn.Module]] = []
        self._optimizers: list[weakref.ref[Any]] = []
        self._records: weakref.WeakKeyDictionary[nn.Module, list[ParameterRecord]] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        if not self.is_live:
            return f"<Session {self.plan.opt_level}: closed>"
        owned = ((len(self.models), "model"), (len(self.optimizers), "optimizer"))
        return f"<Session {self.plan.opt_level}: {', '.join(f'{n} {noun}' + 's' * (n != 1) for n, noun in owned)}>"

    def __str__(self) -> str:
        """The table of `ampkit.explain`, asked of the package: no room of the core imports insight/."""
        return str(sys.modules["ampkit"].explain(self))

    @property
    def models(self) -> list[nn.Module]:
        return [model for ref in self._models if (model := ref()) is not None]

    @property
    def optimizers(self) -> list[Any]:
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]

    @property
    def wrappers(self) -> list[OptimizerWrapper]:
        return [wrapper for wrapper in wrappers() if wrapper.owner is self]

    @property
    def is_live(self) -> bool:
        return self in live_sessions

    def owns(self, thing: Any) -> bool:
        """Whether this model or optimizer belongs to the session."""
        return any(ref() is thing for ref in (*self._optimizers, *self._models))

    def models_outside(self, models: Sequence[nn.Module]) -> list[nn.Module]:
        """The models of this session that are no part of ``models`` and yet share modules or parameters with them."""
        parts = _parts(models)
        return [model for model in self.models if model not in parts and not parts.isdisjoint(_parts([model]))]

    # Preparing and closing

    @_one_at_a_time()
    def prepare(self, models: Sequence[nn.Module], optimizers: Sequence[Any]) -> None:
        """Change models, optimizers and torch as the plan says. Where a change fails, all are undone."""
        live_sessions.append(self)
        self._undo.callback(live_sessions.remove, self)
        try:
            gone = functools.partial(_close_if_orphaned, weakref.ref(self))
            self._models.extend(weakref.ref(model, gone) for model in models)
            self._optimizers.extend(weakref.ref(optimizer, gone) for optimizer in optimizers)
            if self.plan.enabled:
                self._prepare(models, optimizers)
        except BaseException:
            self.close()
            raise

    def _prepare(self, models: Sequence[nn.Module], optimizers: Sequence[Any]) -> None:
        plan, undo = self.plan, self._undo
        undo.callback(forget_traces)  # compiled code must hold the forwards of these models as they are now
        if plan.verbosity >= 1:
            stdout_lines.acquire(undo)
            self._log_banner()
        self.sharded_at_first.update(module for model in models for module in fsdp_modules(model))
        undo.callback(lambda: self.incoming.give_back(self.optimizers))
        if plan.lower_precision_weights == "float32":
            self.incoming.widen(models, optimizers, plan)
        originals = prepare_models(models, optimizers, plan, undo)
        for model in models:
            self._records[model] = parameters_now(model)
            watchers[model] = self
        self.statistics.add(models)
        self._patch_torch()
        self._prepare_optimizers(optimizers)
        if plan.casts_calls:
            self._start_casting()
        forget_traces()
        weights_by_address.clear()
        casts = [pair for wrapper in self.wrappers for pair in wrapper.state_cast()]
        for state, cast in casts:  # all memory is allocated by now
            state.update(cast)
        originals.clear()  # last of all: what failed before could still be undone exactly

    def _patch_torch(self) -> None:
        """Patch what several sessions share, beside the functions that `Casting` patches."""
        plan = self.plan
        for patches, wanted in (
            (getter, plan.casts_calls),
            (torchs_clipping, plan.has_narrow_gradients),
            (patching.swaps, True),
            (exports, True),
            (calls_of_torch, True),
            (around_stored_weights, plan.stores_weights),
            (one_pass_steps, plan.stores_weights or plan.steps_in_one_pass),
            (retained_results, not all(scaler.is_one for scaler in self.scalers)),
        ):
            if wanted:
                patches.acquire(self._undo)

    @_one_at_a_time()
    def close(self) -> None:
        """Undo every change to torch, the models and the optimizers. Parameters keep what they have learned."""
        self._undo.callback(self.statistics.keep_finite)
        self._undo.callback(self.scaling.synchronize)  # first of all
        try:
            self._undo.close()
        finally:
            self._models.clear()
            self._optimizers.clear()

    def on_close(self, undo: Callable[..., Any], *args: Any) -> None:
        """Register ``undo(*args)`` to run when the session closes, before the changes of `prepare` are undone."""
        self._undo.callback(undo, *args)

    def train(self, params: Sequence[torch.Tensor]) -> None:
        """Prepare parameters of an optimizer: those in lower precision train in float32 from now on; gradients may be narrow."""
        lower = [param for param in params if param.dtype in LOWER_PRECISION and value_of(param) is None]
        if not self.plan.stores_weights and any(value_of(param) is not None for param in params):
            raise ConfigurationError(
                f"An optimizer at {self.plan.opt_level} was given a weight that another session stores in lower precision: its "
                "step would lose small updates. Give one initialize() call all models that it trains, or use O5 for both."
            )
        if lower and self.plan.lower_precision_weights == "float32" and not self.plan.lowers_all:
            late, parts = set(lower), (part for model in self._records for part in model.modules())
            beside = self.incoming.lower_buffers(m for m in parts if not late.isdisjoint(m._parameters.values()))
            self.incoming.widen_tensors(lower, beside, self.optimizers)
            for model in self._records:
                self._records[model] = parameters_now(model)
        if self.plan.has_narrow_gradients:
            take_narrow_gradients(params, self._undo)

    def _prepare_optimizers(self, optimizers: Sequence[Any]) -> None:
        for optimizer in optimizers:
            self._undo.if_alive(_detach_optimizer, optimizer)
            OptimizerWrapper(optimizer, self)
        for wrapper in self.wrappers:
            if not (wrapper.traits.takes_inputs or self.plan.master_weights):  # ampkit's: float32 moments
                self.scaling.advice.before_training(wrapper.optimizer(), self.plan.opt_level)
        unchecked = [
            wrapper.optimizer() for wrapper in self.wrappers if not (wrapper.checks_step() or wrapper.has_scale)
        ]
        if unchecked and self.plan.opt_level in ("O4", "O5") and self.plan.check_gradients is None:
            logger.info(
                "Nothing checks the gradients of %s for inf and NaN at loss scale 1: check_gradients=True does, and reads a number "
                "from the device at each step.",
                ", ".join(type(optimizer).__name__ for optimizer in unchecked),
            )

    def _start_casting(self) -> None:
        plan = self.plan
        before = casting = active_casting()
        refuse_second_lower_precision(plan)
        scope = plan.scope if plan.patch_torch_functions else "forward"
        leads = plan.patch_torch_functions and not any(s.plan.patch_torch_functions for s in _sessions_of(before))
        if casting is None or (leads and casting.lower_precision is not plan.lower_precision):
            casting = Casting(plan.lower_precision, policy=plan.policy, verbosity=plan.verbosity, scope=scope)
        elif leads:
            casting.scope = scope
        self.casting = casting
        self._undo.callback(self.stop_casting)
        if casting is not before:
            if before is not None:
                before.close()
                for session in _sessions_of(before):
                    session.casting = casting
            casting.install()
        self._follow_sessions()
        casting.switch_on_here()

    def stop_casting(self) -> None:
        """End the casts of calls for this session. The last such session also restores torch's functions. All else goes on."""
        casting, self.casting = self.casting, None
        if casting is None:
            return
        if (sessions := _sessions_of(casting)) and not casting.closed:  # as it is in a forked child
            if not any(session.plan.patch_torch_functions for session in sessions):
                casting.end_scope_of_process()
            self._follow_sessions()
        else:
            casting.close()

    @staticmethod
    def _follow_sessions() -> None:
        """Let the engine cast for the sessions that it has now."""
        casting = active_casting()
        sessions = _sessions_of(casting)
        model_types = device_types([model for session in sessions for model in session.models])
        casting.cast_on(model_types, stores=any(session.plan.has_narrow_results for session in sessions))
        casting.on_float16_region = None
        for session in sessions:
            if session.plan.loss_scale == 1.0:
                tell = session.scaling.advice.tell
                casting.on_float16_region = functools.partial(tell, "float16 region", session.plan.opt_level)

    # The iteration

    def block(
        self,
        loss: torch.Tensor,
        wrappers: list[OptimizerWrapper],
        scaler: LossScaler,
        delay_unscale: bool = False,
        delay_overflow_check: bool = False,
    ) -> Block:
        """Return the block of `ampkit.scale_loss`. ``wrappers`` may belong to several sessions, which then share ``scaler``."""
        if listeners and (stand_in := tell("block_begins", loss, scaler)) is not None:
            return stand_in
        for wrapper in wrappers:
            wrapper.follow_groups()
        if not self._knows_sharding:
            validation.changed_since(self.models, self.sharded_at_first, self.plan)
            self._knows_sharding = True
        if loss.dtype in LOWER_PRECISION and self.casting is not None:
            if self.casting.leaves_out_this_thread:
                self.scaling.advice.tell("thread", self.plan.opt_level)
            elif self.plan.has_narrow_results and not self.plan.casts_weights:
                self.scaling.advice.tell("lower loss", loss.dtype)
        named = list(dict.fromkeys(wrappers))
        return Block(self.scaling, loss, named, scaler, delay_unscale, delay_overflow_check)

    def gathered_params(self) -> set[int]:
        """The ids of the whole parameters that FSDP2 puts in place of sharded ones: it reduces their gradients itself."""
        return {id(param) for model in self.models for m in fsdp_modules(model) for param in unsharded_params(m)}

    # For the session's wrappers and models

    def name_of(self, param: torch.Tensor) -> str:
        """The parameter's name in its model, for the log."""
        models = self.models
        for index, model in enumerate(models):
            for name, candidate in model.named_parameters():
                if candidate is param:
                    return repr(name) if len(models) == 1 else f"{name!r} of model {index}"
        return f"one of shape {tuple(param.shape)} that is in none of the models given to initialize()"

    def before_forward(self, model: nn.Module) -> None:
        records, casting = self._records[model], self.casting
        if sync_weights(model, records):
            self.scaling.advice.tell("assigned", self.plan.opt_level)
        weights_by_address.clear()
        if casting is not None:
            # One parameter tells whether the model has moved; the noted one is found sooner than the model's first.
            first = records[0][0]() if records else next(model.parameters(), None)
            if first is None or first.device.type not in casting.device_types:
                casting.cast_on(casting.device_types | device_types([model]))
            casting.catch_up()
        if self.statistics.are_there or self.statistics.additions != registry.additions:
            self.statistics.before_forward(model)
        if (ddp := DistributedDataParallel._active_ddp_module) is not None:
            self.scaling.note_forward(ddp)

    def before_compiled_forward(self, model: nn.Module) -> None:
        self.before_forward(model)
        for wrapper in self.wrappers:
            wrapper.gradients.set_aside()

    def after_zero_grad(self, model: nn.Module) -> None:
        params = set(model.parameters())
        for wrapper in self.wrappers:
            for slot in wrapper.gradients.slots:
                if slot.stash is not None and slot.param in params:
                    slot.drop_stash()
            wrapper.hand_gradients()
            if not wrapper.gradients.has_fresh or params.issuperset(wrapper.gradients.params):  # cleared, or zeros
                wrapper.findings.forget()

    def before_apply(self) -> None:
        for wrapper in self.wrappers:  # torch may swap gradients, if nothing refers to them
            wrapper.findings.look_again()
            wrapper.gradients.clipped.clear()

    def _log_banner(self) -> None:
        plan, defaults = self.plan, defaults_of(self.plan.opt_level, device_type_of(self.models))
        logger.info("Selected optimization level %s", OPT_LEVELS[plan.opt_level].brief)
        logger.info("In use: %s", plan.in_words())
        changes = [plan.changes_of(defaults)]
        if self.process_group is not None:
            changes.append(f"process_group=<{type(self.process_group).__name__}>")
        if any(changes):
            logger.info("Changed from the level's defaults: %s", ", ".join(filter(None, changes)))
        _log_missing_libraries()


@functools.cache  # once in a process
def _log_missing_libraries() -> None:
    """Log which compiled libraries are missing, since pip hides it. The import has warned of broken ones."""
    kernels = implementation()
    libraries = {"compiled kernels": (kernels.name == "extension", kernels.why)}
    libraries["O1's wrappers in C++"] = in_cpp.library is not None, in_cpp.why
    missing = [name for name, (is_here, why) in libraries.items() if not is_here and why != SWITCHED_OFF]
    if missing:
        logger.info(
            "The %s are missing: every feature works, slower. '%s' builds them; 'ampkit info' says more.",
            " and ".join(missing),
            BUILD,
        )


def sessions_sharing_with(models: Sequence[nn.Module]) -> list[Session]:
    """The live sessions that have initialized a module or a parameter of ``models`` as part of another model."""
    parts = _parts(models)
    return [session for session in live_sessions if any(part in parts for part in _parts(session.models))]


def _parts(models: Sequence[nn.Module]) -> set[Any]:
    return {part for model in models for part in (*model.modules(), *model.parameters())}


def collect_orphans(closing: Sequence[Session]) -> None:
    """Collect garbage if a session outside of ``closing`` lives: sessions close whose objects only reference cycles keep alive."""
    if any(session not in closing for session in live_sessions):
        gc.collect()


def refuse_second_lower_precision(plan: Plan, closing: Sequence[Session] = ()) -> None:
    """Refuse other tables, and at O1 another precision, than those of live sessions that are not in ``closing``."""
    casting = active_casting()
    sessions = [session for session in _sessions_of(casting) if session not in closing]
    if not sessions or not plan.casts_calls:
        return
    settings = [("policy", plan.policy, casting.policy)]
    if plan.patch_torch_functions and any(session.plan.patch_torch_functions for session in sessions):
        settings.append(("patch_torch_functions_type", plan.patch_torch_functions_type, casting.lower_precision))
        settings.append(("scope", plan.scope, casting.scope))
    for name, wanted, active in settings:
        if wanted != active:
            raise ConfigurationError(
                f"{name}={wanted!r}: a live session patches torch functions with {active!r}, and the patches are "
                "process-wide. Use the same value, or close that session first (ampkit.close())."
            )


def _sessions_of(casting: Casting | None) -> list[Session]:
    """The live sessions whose casts an engine makes."""
    return [session for session in live_sessions if casting is not None and session.casting is casting]


def _close_if_orphaned(session: weakref.ref[Session], _: Any = None) -> None:
    compiled_models.not_before_calls(session)
    orphan = session()
    # When the process ends, parts of torch are gone already, and nothing has to be undone.
    if orphan is not None and not (orphan.models or orphan.optimizers) and not sys.is_finalizing():
        if is_compiling_here():  # which allocates much, so that the collector runs: torch may not change under a trace
            compiled_models.before_each_call(functools.partial(_close_if_orphaned, session), session)
        else:
            orphan.close()


def _detach_optimizer(optimizer: Any) -> None:
    if (wrapper := wrapper_of(optimizer)) is not None:
        wrapper.detach()
