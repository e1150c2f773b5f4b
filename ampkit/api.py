"""The functions that a script calls. Each is a few lines over a `Session`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd import profiler

from . import validation
from .casting.decorators import CastsOfCallsDisabled, casts_of_calls_disabled
from .casting.engine import active_casting, switch_off_left_on
from .casting.tensors import cast_state, params_of, states_to_cast
from .compiling import uncompiled
from .devices import device_type_of
from .dtypes import LOWER_PRECISION
from .errors import ConfigurationError, NotInitializedError
from .iteration.loss_scale import DynamicLossScale, load_scalers, save_scalers
from .logs import logger
from .models.incoming import Incoming
from .patching import run_all
from .plan import SETTINGS, Plan, resolve
from .policy import Policy
from .registry import current_session, live_sessions, session_of, wrapper_of
from .session import Session, collect_orphans, refuse_second_lower_precision, sessions_sharing_with
from .sharding import is_sharded, norm_over_processes


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | DynamicLossScale | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    *,
    patch_torch_functions_type: torch.dtype | None = None,
    keep_fp32: Any = (),
    policy: str | Mapping[str, str] | Policy = "default",
    on_floor: str = "raise",
    scope: str = "process",
    lower_precision_weights: str = "float32",
    one_pass_step: bool = True,
    check_gradients: bool | None = None,
    process_group: Any = None,
) -> Any:
    """Make models and optimizers train in mixed precision, in place, and return them in the form they came in.

    ``models`` is an ``nn.Module`` or a list or tuple of them, compiled or not, and not yet wrapped in DataParallel or
    DistributedDataParallel. ``optimizers`` is an optimizer or a list or tuple of them, also in the wrappers of Accelerate and
    Lightning; with None only the models are returned. With ``enabled=False`` neither `initialize` nor `scale_loss` does anything.

    ``opt_level`` is ``"O0"`` to ``"O5"``. Every other setting that is None takes the level's default:

    - ``cast_model_type``: the lower precision that weights are stored in and calls are cast to (O2, O3).
    - ``patch_torch_functions``: whether calls are cast everywhere, over float32 weights (O1, O4; O5 casts inside of the models);
      ``patch_torch_functions_type``: their dtype.
    - ``keep_batchnorm_fp32``: whether every norm layer keeps float32 weights (O2, O3).
    - ``keep_fp32``: modules, types or name patterns that compute in float32 and return float32, at every level. The name of a
      layer's parameter names the layer. Any other parameter is stored in float32, and calls cast it as at O1.
    - ``master_weights``: whether weights in lower precision train in float32. The float32 value of a weight is the weight and a
      rest of 16 bits beside it. With Adam that is 14 bytes per parameter in bfloat16, and 16 in float16, whose gradient is float32.
    - ``loss_scale``: ``"dynamic"``, a `DynamicLossScale`, or a number, best a power of two: any other rounds bfloat16 gradients of
      stored weights once more (O2). ``num_losses`` scalers are made. A dynamic scale stays between ``min_loss_scale`` (2**-14) and
      ``max_loss_scale``; ``on_floor`` is ``"raise"`` or ``"warn"``.
    - ``cast_model_outputs``: the dtype of floating outputs of the models' forward.
    - ``lower_precision_weights``: how weights that come in float16 or bfloat16 train until the session closes. ``"float32"``
      trains them in float32 (O3 leaves them), ``"keep"`` leaves them in their dtype, and ``"refuse"`` is an error.
    - ``policy``: which tables casts of calls follow, ``"default"``, ``"apex"`` or ``"autocast"``; a dict changes single rows
      (``{"torch.nn.functional.gelu": "fp32"}``), and a `Policy` does both.
    - ``scope``: at O1 and O4, "process" casts every call of torch, as Apex did, and "forward" only those inside the forward
      passes of these models, whose outputs are then float32.
    - ``one_pass_step``: whether ``torch.optim.SGD``, ``Adam`` and ``AdamW`` update everything in one pass (O2, O4, O5). With False
      they make their own step; at O2 over float32 copies of the weights, as optimizers do that are neither these nor ampkit's.
    - ``check_gradients``: whether a step at loss scale 1, which no `scale_loss` block checks, is skipped for gradients that are not
      finite. By default it is with ampkit's optimizers, and with torch's in one pass, where the check costs no more than a norm.
      True checks before the step of any optimizer, which reads a number from the device. False checks nothing.
    - ``process_group``: the processes that step together or not at all. Scripts that average gradients by hand after the
      `scale_loss` block need it, and pipelines: when the block ends, an overflow in one process counts in all. DDP and FSDP2 need
      none.
    - ``verbosity``: 0 is silent, 1 logs settings and overflows, 2 also every cast.

    It may be called again for other models, and each call has its own loss scalers. A call for the same models closes their old
    session first. Raises `ConfigurationError` for settings that are wrong or contradict each other, and TypeError for arguments
    that are no model, no optimizer or no setting. Nothing is changed then.

    Source of the levels O0 to O3: NVIDIA's apex.amp; of O4 and O5: AMD's fork of it.
    """
    arguments = dict(locals())
    settings = {name: arguments[name] for name in SETTINGS}
    opt_level = opt_level.upper() if isinstance(opt_level, str) else opt_level
    switch_off_left_on()
    if enabled or isinstance(enabled, str):  # which is refused
        _initialize(models, optimizers, opt_level, settings, process_group)
    else:
        _track(models, optimizers)
    return models if optimizers is None else (models, optimizers)


def _track(models: Any, optimizers: Any) -> None:
    """Open a session that does nothing, so that `scale_loss` knows these objects. They may be of any type (``enabled=False``)."""
    things = [
        [validation.uncompiled(item) for item in validation.flatten(value) if type(item).__weakrefoffset__]
        for value in (models, optimizers)
    ]
    owners = [session_of(thing) for thing in (*things[0], *things[1])]
    for session in [live for live in live_sessions if live in owners or not (live.models or live.optimizers)]:
        session.close()
    Session(Plan(enabled=False)).prepare(*things)


def _initialize(models: Any, optimizers: Any, opt_level: str, settings: dict[str, Any], process_group: Any) -> None:
    model_list, optimizer_list = validation.models(models), validation.optimizers(optimizers)
    owners = filter(None, map(session_of, (*model_list, *optimizer_list)))
    earlier = list(dict.fromkeys((*owners, *sessions_sharing_with(model_list))))
    cast_before = [model for session in earlier if session.plan.casts_weights for model in session.models]
    recast = {tensor for model in cast_before for tensor in (*model.parameters(), *model.buffers())}
    if opt_level == "O3" and settings["cast_model_type"] is None:
        settings["cast_model_type"] = _lower_precision_of(model_list, earlier, recast)
    plan = resolve(opt_level, device_type_of(model_list), settings)
    validation.check(model_list, optimizer_list, plan, recast, process_group)
    collect_orphans(closing=earlier)
    refuse_second_lower_precision(plan, closing=earlier)
    # A cell that is run again builds its optimizer over the weights that an earlier session has cast.
    states = [pair for optimizer in optimizer_list for pair in states_to_cast(optimizer)]
    early_states = [(param, state) for param, state in states if param.dtype in LOWER_PRECISION]
    incoming = Incoming()
    for session in earlier:
        left = session.models_outside(model_list)
        incoming.inherit(session.incoming, model_list)
        session.close()
        if left:
            logger.warning(
                "initialize() closed the session of an earlier call, whose %s shares modules with this one's models and is not "
                "initialized any more. Pass models that share modules, and their optimizers, in one call.",
                ", ".join(type(model).__name__ for model in left),
            )
    for param, state in early_states:
        if param.dtype is torch.float32:
            state.update(cast_state(state, torch.float32))
    Session(plan, incoming, process_group).prepare(model_list, optimizer_list)


def scale_loss(
    loss: torch.Tensor,
    optimizers: Any = (),
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> AbstractContextManager[torch.Tensor]:
    """``with scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()``.

    Yields ``loss.float()`` (any shape) times the loss scale. On leaving, the gradients of ``optimizers`` (one, or a list or
    tuple) are unscaled and checked; if one is not finite, the next ``step()`` of these optimizers is skipped and a dynamic
    scale goes down. Gradients of several blocks add up, whatever their losses and scales.

    ``loss_id`` chooses the loss scaler, 0 to ``num_losses`` - 1. Optimizers of several ``initialize`` calls may share a loss; the
    scaler is then one of the first optimizer's call. ``delay_unscale=True`` leaves gradients scaled for a later block to unscale:
    cheaper accumulation, in the gradients' own precision. ``delay_overflow_check=True`` lets the next block report an overflow
    of this one. ``model`` is accepted for compatibility and unused. An exception inside leaves gradients and scale as
    they were before, except where gradients stay in ``.grad`` (``delay_unscale=True``, ``DDP.no_sync()``, and scale 1 over float32
    weights): what the failed backward pass had added to these stays.

    ``loss`` is a tensor of any floating dtype; the scaled loss is float32, on the same device. Raises

    - TypeError for a loss that is no tensor,
    - `NotInitializedError` for no optimizer, an optimizer without `initialize`, or one whose session was closed,
    - `LossIdError` for a ``loss_id`` that has no scaler,
    - `ConfigurationError` for a block inside another, or optimizers of which only some are enabled,
    - `LossScaleError` where the scale has been at its floor for 50 skips in a row, unless ``on_floor="warn"``.

    Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2.
    """
    switch_off_left_on()
    optimizer_list = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    wrappers = list(map(wrapper_of, optimizer_list))
    if not wrappers or None in wrappers:
        _refuse_uninitialized(optimizer_list, wrappers)
        return nullcontext(loss)
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"scale_loss expects the loss as a torch.Tensor, found {type(loss).__name__}. Pass the tensor itself."
        )
    session: Session = wrappers[0].owner
    return session.block(loss, wrappers, session.scaling.scaler(loss_id), delay_unscale, delay_overflow_check)


def master_params(optimizer: Any) -> Iterator[torch.Tensor]:
    """The float32 values that ``optimizer`` updates, as parameters with unscaled gradients in float32.

    Use it to clip by value: ``torch.nn.utils.clip_grad_value_(ampkit.master_params(optimizer), 0.5)``; `clip_grad_norm_` clips by
    norm without copies. The order is that of ``optimizer.param_groups``, and the shapes are those of the parameters. An optimizer
    that was not initialized gives its own parameters.

    Of weights in lower precision these are float32 copies. A value that a script writes to a copy reaches the weight when the next
    forward or step begins. A copy that a script keeps stays current, and a second call returns the same tensors. Raises TypeError
    for an argument that is no optimizer. Inside of a `scale_loss` block, after the backward pass, gradients are still scaled, and
    a warning says so once.
    """
    wrapper = wrapper_of(validation.optimizer(optimizer, "master_params"))
    yield from params_of(optimizer) if wrapper is None else wrapper.master_params()


@uncompiled
def clip_grad_norm_(
    optimizer: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Clip the gradients that ``optimizer`` will use by their norm, all of them together; returns the norm before.

    Call it after the `scale_loss` block, where gradients are unscaled, and after every other change of gradients. At O2 the
    factor is applied to gradients of stored weights inside ``step()``, and ``p.grad`` shows them unclipped. Only
    ``error_if_nonfinite=True`` waits for the device. Gradients that are not finite stay as they are, and the step is skipped
    where gradients are checked.

    ``max_norm`` is in units of the unscaled gradients. The norm returned is a float32 scalar on the gradients' device, 0 where
    there are none. Raises TypeError for an argument that is no optimizer, `ConfigurationError` for a ``max_norm`` that is no number
    of at least 0, and inside of a `scale_loss` block, where gradients are still scaled, and RuntimeError for a norm that is not
    finite with ``error_if_nonfinite=True``.
    """
    wrapper = wrapper_of(validation.optimizer(optimizer, "clip_grad_norm_"))
    if isinstance(max_norm, str) or max_norm is None or not float(max_norm) >= 0.0:
        raise ConfigurationError(
            f"clip_grad_norm_: max_norm={max_norm!r} is not accepted: expected a number of at least 0."
        )
    if wrapper is not None:
        wrapper.gradients.refuse("clip")
    if wrapper is None or norm_type != 2.0:
        params = params_of(validation.optimizer(optimizer, "clip_grad_norm_"))
        if wrapper is not None:
            wrapper.settle()
            wrapper.gradients.widen()
        grads = [param.grad for param in params if param.grad is not None]
        total = norm_over_processes if any(map(is_sharded, grads)) else torch.nn.utils.get_total_norm
        norm = total(grads, norm_type)
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, torch.where(norm.isfinite(), norm, 0.0))
    else:
        with profiler.record_function("ampkit: clip") if profiler._is_profiler_enabled else nullcontext():
            norm = wrapper.clip_grad_norm(float(max_norm))
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients is non-finite ({norm.item()}), so it cannot be clipped. Pass "
            "error_if_nonfinite=False to leave such gradients to the loss scale."
        )
    return norm


def step_was_skipped(optimizer: Any) -> bool:
    """Whether the last ``optimizer.step()`` was skipped for an overflow. Lets a script hold back its scheduler.

    Waits for the device where the device decides, as with fused optimizers. False before the first step, and for an optimizer
    that was not initialized. Raises TypeError for an argument that is no optimizer.
    """
    wrapper = wrapper_of(validation.optimizer(optimizer, "step_was_skipped"))
    return wrapper is not None and wrapper.findings.skipped


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, dict[str, float | int]]:
    """The state of every loss scaler, ``{"loss_scaler0": {"loss_scale": float, "unskipped": int}, ...}``.

    Scalers of all live sessions are numbered in the order of ``initialize``; without a session the dict is empty. Entries are added
    to ``destination`` where one is given. Keys and values are those of Apex's checkpoints; with several sessions alive, each entry
    also has the number of its session. Waits for the device. ``loss_scale`` is the factor itself, and
    ``unskipped`` counts iterations since the last overflow or growth. With a hysteresis entries also have ``overflows_left``.
    Raises nothing of its own.
    """
    destination = OrderedDict() if destination is None else destination
    collect_orphans(closing=live_sessions[-1:])
    for live in live_sessions:
        live.scaling.synchronize()
    save_scalers([live.scalers for live in live_sessions], destination)
    return destination


def load_state_dict(state: Mapping[str, Any]) -> None:
    """Load what `state_dict` returned, entry by entry in the order of the mapping.

    If the numbers of entries and of loss scalers differ, a warning says so and the surplus is ignored. If another number of
    sessions was alive when the state was saved (models of earlier folds, say), the newest session gets the state of the newest.
    Raises `CheckpointError` for keys or values that are no loss scaler's, and loads nothing then.
    """
    collect_orphans(closing=live_sessions[-1:])
    disabled = bool(live_sessions) and not any(live.plan.enabled for live in live_sessions)
    load_scalers(None if disabled else [live.scalers for live in live_sessions], state)


def disable_casts() -> Any:
    """``with disable_casts():`` switches casts of calls off, in this thread; nests, and survives exceptions. Also a decorator.

    ``with torch.autocast(device_type, enabled=False):`` does the same, and so the body of a compiled function may use either.
    Weights that are stored in lower precision take part with their float32 values, where there are any (O2). Without a
    session it does nothing. Raises nothing of its own.
    """
    switch_off_left_on()
    return casts_of_calls_disabled() if torch.compiler.is_compiling() else CastsOfCallsDisabled()


def keep_casts(models: Any) -> AbstractContextManager[None]:
    """``with keep_casts(model):`` casts each weight of these models once, for loops by hand that write no weight.

    Decoding and rollouts call a model many times. Inside, casts that this thread makes of its weights serve all the calls;
    otherwise a cast lives to the end of the call. Takes a module, or a list or tuple of them, which need not be initialized;
    blocks nest. Gradients of the calls add up in float32. Writes that torch counts, and steps of torch's optimizers, are seen
    inside; a write through an alias from before (a NumPy view, a kept ``.data``) is not. Without casts of calls it does nothing.
    """
    params = tuple(param for module in validation.flatten(models) for param in module.parameters())
    casting = None if torch.compiler.is_compiling() else active_casting()
    return nullcontext() if casting is None else casting.caches.keep(params)


@contextmanager
def session(models: Any, optimizers: Any = None, opt_level: str = "O1", **settings: Any) -> Iterator[Any]:
    """``with session(model, optimizer, "O1") as (model, optimizer):`` initializes, and closes at the end of the block.

    Takes the settings of `initialize` as keywords, yields what it returns, and raises what it raises.
    """
    initialized = initialize(models, optimizers, opt_level=opt_level, **settings)
    opened = current_session()
    try:
        yield initialized
    finally:
        opened.close()


def close() -> None:
    """Close every live session, newest first: torch, models and optimizers are as they were, weights as trained.

    Weights get back the dtype that they came in. It may be called twice, and without a session; it raises nothing of its own. If
    another thread called `initialize` at O1, casts end there as soon as Python allows (the main thread), or at its next call of
    ampkit.
    """
    switch_off_left_on()
    run_all((session.close,) for session in reversed(live_sessions[:]))


def _refuse_uninitialized(optimizers: Sequence[Any], wrappers: Sequence[Any]) -> None:
    """Raise for optimizers that no enabled session owns, unless all that are in play are disabled."""
    owners = [session_of(optimizer) for optimizer in optimizers]
    newest = current_session()
    if not any(wrappers) and newest is not None and not newest.plan.enabled and set(owners) <= {None, newest}:
        return
    for optimizer, owner, wrapper in zip(optimizers, owners, wrappers):
        if wrapper is None and (owner is None or owner.plan.enabled):
            raise validation.not_initialized(optimizer)
    if not owners:
        raise NotInitializedError(
            "scale_loss was given no optimizer. Pass the optimizer, or a list: scale_loss(loss, optimizer)."
        )
    if any(owner.plan.enabled for owner in owners):
        raise ConfigurationError(
            "scale_loss was given optimizers of which some went through initialize(enabled=False), and would step with scaled "
            "gradients. Use the same enabled= in every initialize call whose optimizers share a loss."
        )


def _lower_precision_of(
    models: Sequence[nn.Module], earlier: Sequence[Session], recast: set[torch.Tensor]
) -> torch.dtype | None:
    """The lower precision that all of these models came in, or None: O3 leaves them in it."""
    dtypes: set[torch.dtype | None] = set()
    for model in models:
        lower = {param.dtype for param in model.parameters() if param not in recast}
        lower = lower.union(*(s.incoming.dtypes_of(model) for s in earlier)).intersection(LOWER_PRECISION)
        dtypes |= lower or {None}
    return dtypes.pop() if len(dtypes) == 1 else None
