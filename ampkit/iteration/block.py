"""The ``with scale_loss(...)`` blocks of a session: a `Block` is one of them, `LossScaling` the state that they share.

While a session lives, `calls_of_torch` notifies blocks of each backward pass, by a patch of torch's.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.nn.parallel import DistributedDataParallel

from ..casting.engine import active_casting
from ..errors import ConfigurationError, LossIdError, NotInitializedError
from ..events import listeners, tell
from ..optimizers.scales import Scale, moved_to
from ..patching import PatchSet, SharedPatches
from ..registry import live_sessions, wrapper_refs, wrappers
from ..sharding import is_unreduced
from . import reach
from .advice import Advice
from .found_inf import FoundInf, Slot, inverse
from .gradients import Gradients, State
from .loss_scale import LossScaler
from .optimizer_wrapper import OptimizerWrapper

_NO_DDP = weakref.ref(set())  # a dead reference
_compiling = torch.compiler.is_dynamo_compiling
_running_backward = torch._C._current_graph_task_id  # -1 outside of a backward pass

#: The open blocks, in all threads, innermost last.
open_blocks: list[Block] = []


@dataclass(eq=False)
class Block:
    """A ``with scale_loss(...)`` block: it holds the gradients of the sessions of ``named``, and all that its passes reach."""

    scaling: LossScaling
    loss: torch.Tensor
    named: list[OptimizerWrapper]
    scaler: LossScaler
    delay_unscale: bool
    delay_overflow_check: bool
    scale: Scale = 1.0

    def backward(self, *_: object, **__: object) -> None:
        """Raise for a script that writes ``scale_loss(loss, optimizer).backward()``, as with GradScaler.scale."""
        raise TypeError(
            "scale_loss is entered by 'with', since something is to be done after the backward pass: "
            "'with ampkit.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()'."
        )

    def __enter__(self) -> torch.Tensor:
        if _compiling():  # what a block does is no part of a graph
            return torch._dynamo.disable(Block.__enter__)(self)
        self._held: list[OptimizerWrapper] = []
        self._ran = self.has_python = False  # a backward pass, and one over functions in Python
        self.thread = threading.get_ident()
        self.scaled = self.loss.float()
        self._is_one = self.scaler.is_one
        self.is_plain = self._is_one and not self.scaling.plan.master_weights
        for wrapper in self.named:
            if not wrapper.active:
                raise NotInitializedError(
                    f"The session of this {type(wrapper.optimizer()).__name__} was closed. Call initialize() again, or leave out "
                    "scale_loss."
                )
            if wrapper.gradients.state is State.IN_BLOCK:
                wrapper.gradients.refuse("open")
        try:
            open_blocks.append(self)
            for scaler in self.scaling.scalers:
                if scaler.has_news:
                    scaler.report()
            return self._begin()
        except BaseException as error:
            self._leave(error)
            raise

    def _begin(self) -> torch.Tensor:
        if self.delay_unscale and (casting := active_casting()) is not None:
            casting.caches.keep_to_step(tuple(param for wrapper in self.named for param in wrapper.gradients.params))
        for wrapper in self.named:
            wrapper.findings.begin(self.scaler, self.named if self.is_plain else ())
        if self.is_plain:
            return self.scaled
        scaling = self.scaling
        held = scaling.held_scale
        self.scale = self.scaler.current(self.named[0].gradients.device) if held is None else held
        self.scaled = scaled = self.scaled * moved_to(self.scale, self.scaled.device)
        self._hold(self.named)
        if self.delay_unscale or scaling.outside.slots:
            self._hold_outside(scaling.find_unowned(self.named[0].owner) if self.delay_unscale else ())
        if not self._is_one and (self.delay_unscale or not scaling.advice.scaled_loss_was_used):
            scaling.advice.before_backward(self.named, scaled)
        return scaled

    def __exit__(self, error_type: object, error: object, traceback: object) -> None:
        if _compiling():
            return torch._dynamo.disable(Block.__exit__)(self, error_type, error, traceback)
        if error is None and not self.is_plain:
            try:
                self._end()
            except BaseException as failure:
                self._leave(failure)
                raise
        self._leave(error)

    def _leave(self, error: object) -> None:
        """Close the block, and keep running statistics finite. After an ``error`` put gradients back."""
        if self in open_blocks:
            open_blocks.remove(self)
        for session in {wrapper.owner for wrapper in self._held or self.named}:
            if session.statistics.are_there:
                session.statistics.end_block()
        if error is not None:
            self._put_back()

    # The gradients that a block holds

    def _hold(self, reached: Sequence[OptimizerWrapper], is_guess: bool = False) -> None:
        """Stash the gradients of all optimizers in the sessions of ``reached``, or refuse before one is touched.

        A use of a guess, which a function in Python may reach, releases it while it has no gradient.
        """
        fresh = reached
        if len(wrapper_refs) > len(reached):
            sessions = [wrapper.owner for wrapper in reached]
            fresh = [each for each in wrappers() if each.owner in sessions and each not in self._held]
        for wrapper in fresh:
            if wrapper.gradients.state is State.IN_BLOCK:
                wrapper.gradients.refuse("open")
        for wrapper in fresh:
            if wrapper.settle(finishes=False):
                wrapper.findings.before_sum()
        ddp = self.scaling.ddp()
        for wrapper in fresh:
            self._held.append(wrapper)
            wrapper.gradients.open(self.scale, ddp is not None and ddp.gradient_as_bucket_view, self, is_guess)

    def _hold_outside(self, tensors: Iterable[torch.Tensor]) -> None:
        """Stash the gradients of tensors that no initialized optimizer updates."""
        outside = self.scaling.outside
        held: set[int] = set().union(*[wrapper.gradients.ids for wrapper in self._held])
        kept = [slot for slot in outside.slots if id(slot.param) not in held]
        ids = {id(slot.param) for slot in kept}
        fresh = [Slot(tensor) for key, tensor in {id(x): x for x in tensors}.items() if key not in ids]
        for other in [session.scaling for session in live_sessions if session.scaling is not self.scaling]:
            if not other.outside.ids.isdisjoint(id(slot.param) for slot in fresh):
                raise ConfigurationError(
                    "A scale_loss block came to a tensor whose gradient waits at the loss scale of another initialize() call "
                    "(delay_unscale=True). Step that call's optimizer first, or give both optimizers to each block."
                )
        outside.hold([*kept, *fresh])
        if outside.state is State.IN_BLOCK:
            outside.stash(fresh)
        else:
            outside.settle()
            outside.open(self.scale, holder=self)

    def before_backward(self, roots: Sequence[Any], inputs: Any, scaled: Sequence[Block]) -> None:
        """Hold what a backward pass from ``roots`` will write to; ``scaled`` are the blocks whose scaled losses it comes from.

        Raises `ConfigurationError` for a pass that reaches optimizers of other sessions past these losses.
        """
        self._ran = True
        reached = reach.Reached(*reach.leaves_behind([self.scaled] if self in scaled else []))
        if inputs is not None:
            reached = reach.Reached([inputs] if isinstance(inputs, torch.Tensor) else list(inputs), False)
        every = wrappers() if len(wrapper_refs) > len(self._held) else self._held
        if every is not self._held:
            self._hold_other_sessions(reached, roots if inputs is None else (), scaled)
        self.has_python = self.has_python or reached.has_python
        results = reach.retained(self.scaled) if reach.retaining and inputs is None else []
        self.hold_leaves(reached.leaves + results, every, reached.has_python)

    def hold_leaves(self, leaves: list[torch.Tensor], every: list[OptimizerWrapper], has_python: bool = False) -> None:
        """Hold the leaves that no wrapper of ``every`` updates, and with ``has_python`` all such parameters of the models.

        Except what FSDP2 has gathered. With Apex's policy only warn: its scripts divide these gradients by the scale themselves.
        """
        owned: set[int] = set()
        for wrapper in every:
            owned |= wrapper.gradients.ids
        outside = [leaf for leaf in leaves if id(leaf) not in owned]
        for session in dict.fromkeys([wrapper.owner for wrapper in self._held]) if outside or has_python else ():
            if has_python:
                outside += self.scaling.find_unowned(session)
            gathered = session.gathered_params()
            outside = [leaf for leaf in outside if id(leaf) not in gathered]
        is_apex = self.scaling.plan.policy.base == "apex"
        if outside and is_apex and not self._is_one:
            session, ids = self.named[0].owner, {id(leaf) for leaf in outside}
            first = next((param for param in self.scaling.find_unowned(session) if id(param) in ids), outside[0])
            is_parameter = isinstance(first, torch.nn.Parameter)
            label = f"Parameter {session.name_of(first)}" if is_parameter else f"A tensor of shape {tuple(first.shape)}"
            self.scaling.advice.tell("unowned", label)
        elif outside and not is_apex:
            self._hold_outside(outside)

    def _hold_other_sessions(self, reached: reach.Reached, roots: Sequence[Any], scaled: Sequence[Block]) -> None:
        """Hold the optimizers of other sessions that the scaled loss reaches. Raises where other roots reach further ones."""
        candidates = [wrapper for wrapper in wrappers() if wrapper.gradients.state is not State.IN_BLOCK]
        to_hold = [wrapper for wrapper in candidates if reached.has(wrapper.gradients.ids)]
        losses = {block.scaled.grad_fn for block in scaled}
        if any(reach.node_of(root) not in losses for root in roots):
            beside = reach.leaves_of(roots, past=losses)
            further = [wrapper for wrapper in candidates if wrapper not in to_hold]
            if any(beside.has_python or beside.has(wrapper.gradients.ids) for wrapper in further):
                raise ConfigurationError(
                    "A backward pass inside of a scale_loss block did not come from the scaled loss alone, and reaches parameters "
                    "of another initialize() call, whose optimizer the block was not given. Go backward there outside of the "
                    "block, or in one of its own, or add its loss to the one that scale_loss is given, with both optimizers."
                )
        self._hold(to_hold)
        if reached.has_python:
            self._hold([wrapper for wrapper in candidates if wrapper not in self._held], is_guess=True)

    # The end of a block

    def _put_back(self) -> None:
        done: set[Slot] = set()
        for gradients in (*[wrapper.gradients for wrapper in self._held], self.scaling.outside):
            if gradients.holder is self:
                gradients.put_back(done)
        if self.scaling.outside.state is not State.WAITING:
            self.scaling.outside.hold(())

    def _end(self) -> None:
        scaling, scale, session = self.scaling, self.scale, self.named[0].owner
        if not (self._is_one or self.named[0].active):
            raise ConfigurationError(
                "The session was closed inside of this scale_loss block, so nothing unscales its gradients: they are multiplied "
                "by the loss scale. Leave the block before close() or another initialize(), and clear the gradients now."
            )
        self._held = [wrapper for wrapper in self._held if wrapper.gradients.holder is self]  # no released guesses
        is_to_look = not (self.delay_unscale or self._is_one or scaling.advice.scaled_loss_was_used)
        if is_to_look and self.scaled.requires_grad:
            scaling.advice.after_backward(self.named)
        is_local = scaling.backward_was_local()
        scaling.held_scale = scale if session.sharded_at_first and any(map(is_unreduced, session.models)) else None
        if self.delay_unscale:
            for wrapper in self._held:
                if wrapper in self.named or wrapper.gradients.has_fresh:
                    wrapper.gradients.keep_scaled(scale)
                    wrapper.delayed_with = self.scaler
                else:
                    wrapper.gradients.put_back()
            if scaling.outside.holder is self:
                scaling.outside.keep_scaled(scale)
        elif scaling.held_scale is not None or not (
            # A script may leave a block early, ``continue``. Processes that agree all collect.
            self._ran or any(wrapper.gradients.has_fresh or wrapper.gradients.process_groups for wrapper in self._held)
        ):
            self._put_back()
        else:
            unnamed = [wrapper for wrapper in self._held if wrapper not in self.named]
            finding = scaling.collect(scale, self.named, self.scaler, unnamed, is_local)
            if finding is not None:
                if not finding.is_clean:
                    finding.loss = self.loss.detach()
                if self.delay_overflow_check:
                    self.scaler.delayed_check, finding.scaler = finding, self.scaler
                else:
                    self.scaler.update(finding, moves_scale=not is_local)
            for wrapper in self._held:
                if wrapper.has_lent:
                    wrapper.hand_gradients()


class LossScaling:
    """The state that the blocks of one session share, and the methods that its GradScaler calls in their place."""

    def __init__(self, plan: Any) -> None:
        self.plan = plan
        bounds = (plan.min_loss_scale, plan.max_loss_scale)
        number = plan.num_losses if plan.enabled else 0
        settings = (plan.on_floor, plan.policy.base == "apex")
        self.scalers = [LossScaler(plan.loss_scale, *bounds, loss_id, *settings) for loss_id in range(number)]
        self.ddp: Callable[[], DistributedDataParallel | None] = _NO_DDP  # whose forward ran last
        self._runs_without_sync = False
        self.held_scale: Scale | None = None  # of gradients that FSDP2 has yet to reduce
        #: Those of tensors without an initialized optimizer, while a block holds them or they wait at its scale.
        self.outside = Gradients()
        #: By the id of a parameter: one for all optimizers of the session that update it.
        self.slots: MutableMapping[int, Slot] = weakref.WeakValueDictionary()
        self.advice = Advice()

    def scaler(self, loss_id: int) -> LossScaler:
        """The loss scaler of a loss, 0 to ``num_losses`` - 1."""
        if isinstance(loss_id, bool) or not isinstance(loss_id, int) or not 0 <= loss_id < len(self.scalers):
            raise LossIdError(
                f"loss_id={loss_id!r} is out of range: this session has num_losses={len(self.scalers)}, so loss_id goes from "
                f"0 to {len(self.scalers) - 1}. Pass num_losses= to initialize for more."
            )
        return self.scalers[loss_id]

    def find_unowned(self, session: Any) -> list[torch.Tensor]:
        """The parameters of the session's models that no initialized optimizer updates: scripts clip them with the others."""
        ids = {key for wrapper in wrappers() for key in wrapper.gradients.ids}.union(session.gathered_params())
        return [param for model in session.models for param in model.parameters() if id(param) not in ids]

    def note_forward(self, ddp: DistributedDataParallel) -> None:
        """Note the DDP whose forward pass runs, and whether it will reduce gradients."""
        if torch.is_grad_enabled():
            self.ddp = weakref.ref(ddp)
            self._runs_without_sync = not ddp.require_backward_grad_sync

    def backward_was_local(self) -> bool:
        """Whether the backward pass left gradients unreduced: torch's DDP decides in its forward, the drop-in's in each pass."""
        was_local, self._runs_without_sync = self._runs_without_sync, False
        said = getattr(self.ddp(), "last_backward_was_local", None)
        return was_local if said is None else said

    def collect(
        self,
        scale: Scale,
        named: Sequence[OptimizerWrapper],
        scaler: LossScaler,
        unnamed: Sequence[OptimizerWrapper] = (),
        is_local: bool = False,
    ) -> FoundInf | None:
        """Unscale, check and add up the gradients that a backward pass has made; None where nothing is checked."""
        # The flag of blocks with delay_overflow_check=True belongs to this iteration.
        finding = None if scaler.is_one else scaler.delayed_check or named[0].findings.clear_flag()
        inv, done = inverse(scale), set() if unnamed or len(named) > 1 else None
        if self.outside.state is not State.READY:
            self.outside.collect(inv, finding, is_local, done)
        for wrapper in named:
            wrapper.gradients.collect(inv, finding, is_local, done)
        for wrapper in unnamed:
            gradients = wrapper.gradients
            # Processes that step together must all ask.
            if not (gradients.has_fresh or gradients.process_groups):
                gradients.put_back(done)
                continue
            its_own = None if finding is None else named[0].findings.clear_flag()
            gradients.collect(inv, its_own, is_local, done)
            if its_own is not None:
                its_own.agree(gradients.process_groups)
            wrapper.findings.add(its_own)
            if any([slot.owners > 1 for slot in gradients.slots]):
                wrapper.findings.shared = finding
        if finding is not None:
            finding.agree(dict.fromkeys([group for wrapper in named for group in wrapper.gradients.process_groups]))
        for wrapper in named:  # not before: the flag covers all of them
            wrapper.findings.add(finding)
        if finding is not None and not finding.is_clean:
            self.outside.zero_where(finding.flag)  # no optimizer clears these
            for wrapper in named:  # nor gradients that another optimizer's block would add to
                wrapper.gradients.zero_where(finding.flag, all_of_them=False)
        if self.outside.slots:
            self.outside.hold(())
        return finding

    def finish_delayed(self, wrapper: OptimizerWrapper) -> None:
        """End the iteration at a step, as a block would, while gradients wait after ``delay_unscale=True``."""
        scaler = wrapper.delayed_with or self.scalers[0]
        if (finding := self.collect(wrapper.gradients.scale, [wrapper], scaler)) is not None:
            scaler.update(finding)

    def unscale(self, wrapper: OptimizerWrapper, scaler: LossScaler) -> FoundInf | None:
        """Unscale gradients that wait in ``.grad``, and check them without ending the iteration; None where nothing is checked."""
        wrapper.settle(finishes=False)
        gradients = wrapper.gradients
        if gradients.state is not State.WAITING:  # this process may have none, and others some
            if scaler.is_one or gradients.has_fresh or not gradients.process_groups:
                return None
        finding = None if scaler.is_one else wrapper.findings.clear_flag()
        for waiting in (gradients, self.outside):
            waiting.collect(inverse(waiting.scale), finding)
        if finding is not None:
            finding.agree(gradients.process_groups)
            if not finding.is_clean:
                self.outside.zero_where(finding.flag)
        self.outside.hold(())
        return finding

    def synchronize(self) -> None:
        """Wait for every iteration, and log the skipped ones. An error is left for the next block to raise."""
        for scaler in self.scalers:
            scaler.report(wait=True, raises=False)


# Backward passes


def reaching_backward(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``torch.autograd.backward``: blocks first hold what a pass will write to, wrappers note passes outside of blocks."""

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if _compiling():  # dynamo would guard every gradient
            return torch._dynamo.disable(backward)(tensors, *args, **kwargs)
        roots = [tensors] if isinstance(tensors, (torch.Tensor, GradientEdge)) else list(tensors)
        if _running_backward() != -1:  # a part of the pass around it, as in torch.utils.checkpoint
            around = [block for block in open_blocks if block.has_python]
            if len(around) == 1:
                around[0].hold_leaves(reach.leaves_of(roots).leaves, wrappers())
            return original(roots, *args, **kwargs)
        if listeners:
            tell("backward_begins", roots)
        inputs = kwargs.get("inputs", args[4] if len(args) > 4 else None)
        reached = [] if open_blocks and _notify_blocks(roots, inputs) else _reached_outside(roots, inputs)
        original(roots, *args, **kwargs)
        if listeners:
            tell("backward_ends")
        for wrapper, passes in reached:
            wrapper.note_outside(passes)

    return backward


def _notify_blocks(roots: list[Any], inputs: Any) -> bool:
    """Let the blocks whose scaled losses a backward pass comes from hold what it will write to, whatever the thread.

    Returns whether there are such blocks, or the pass runs inside of a block of this thread all the same.
    """
    ids = set(map(id, roots))
    reached = [block for block in open_blocks if id(block.scaled) in ids]
    if len(reached) < len(roots):
        nodes = reach.leaves_of(roots).nodes
        reached = [block for block in open_blocks if block.scaled.grad_fn in nodes]
    for block in reached:
        if not block.is_plain:
            block.before_backward(roots, inputs, reached)
    if reached:
        return True
    around = [block for block in open_blocks if block.thread == threading.get_ident()]
    for block in [block for block in around if not block.is_plain][-1:]:
        block.before_backward(roots, inputs, ())
    return bool(around)


def _reached_outside(roots: list[Any], inputs: Any) -> list[tuple[Any, int]]:
    """The optimizers with a loss scale that a backward pass outside of all blocks reaches, and their counts of scaled passes."""
    loose = [wrapper for wrapper in wrappers() if wrapper.gradients.state is not State.IN_BLOCK]
    scaled = [wrapper for wrapper in loose if wrapper.has_scale and not wrapper.findings.came_through_no_block]
    if not scaled:
        return []
    if inputs is not None:
        leaves = [inputs] if isinstance(inputs, torch.Tensor) else inputs
    elif all([isinstance(root, torch.Tensor) for root in roots]):
        leaves, _ = reach.leaves_behind(roots)
    else:
        leaves = reach.leaves_of(roots).leaves
    ids = {id(leaf) for leaf in leaves}
    return [(wrapper, wrapper.advice.passes) for wrapper in scaled if not ids.isdisjoint(wrapper.gradients.ids)]


def _patch(patches: PatchSet) -> None:
    patches.set(torch.autograd, "backward", reaching_backward(torch.autograd.backward))
    patches.put_around(
        sys.modules["torch.nn.utils.clip_grad"], "_group_tensors_by_device_and_dtype", reach.refuse_scaled
    )
    patches.put_around(torch.amp.grad_scaler.GradScaler, "_unscale_grads_", reach.warn_of_grad_scaler)


calls_of_torch = SharedPatches(_patch)
