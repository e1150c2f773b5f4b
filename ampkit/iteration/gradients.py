"""The gradients of one optimizer, from the backward pass to the step.

After a `scale_loss` block ``param.grad`` is the unscaled gradient, and the only one: what a script writes there counts at the
step as it does in torch. It is float32 where the weight's precision cannot hold it, which ``Tensor.grad_dtype`` allows.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any

import torch

from .. import kernels
from ..casting.narrow_gradients import is_set_aside, note_set_aside, stored_gradient
from ..dtypes import LOWER_PRECISION
from ..errors import ConfigurationError
from ..models.float32_values import Float32Value, forget_gradient, put_gradient, value_of
from ..optimizers.scales import Scale, norm_of, on, ratio
from ..patching import PatchSet, Reference, SharedPatches
from ..sharding import process_groups
from .found_inf import BackwardPass, FoundInf, add_to_stashes, bring_to, is_sparse, places_for, unscale, values_of
from .reach import are_still, seen

_CPU = torch.device("cpu")


class Slot:
    """One parameter, and where its gradient is: unscaled in ``param.grad`` after a block, in ``stash`` while another one is open.

    ``entry`` has its float32 value, where the model computes with it in lower precision and trains it in float32; then the
    gradient may be float32 too. ``owners`` counts the optimizers that update the parameter.
    """

    __slots__ = ("__weakref__", "entry", "owners", "param", "stash")

    def __init__(self, param: torch.Tensor, entry: Float32Value | None = None) -> None:
        self.param = param
        self.entry = entry
        self.owners = 0
        self.stash: torch.Tensor | None = None

    @property
    def gradient(self) -> torch.Tensor | None:
        """``param.grad`` as it is stored: a script that reads that of a float32 weight gets it in float32."""
        return stored_gradient(self.param)


class Slots:
    """The slots of a session, one for each parameter, however many optimizers update it; ``with_rests`` where those have rests."""

    def __init__(self, with_rests: bool) -> None:
        self._with_rests = with_rests
        self._slots: MutableMapping[int, Slot] = weakref.WeakValueDictionary()  # by the parameter's id

    def of(self, params: Iterable[torch.Tensor]) -> Iterator[Slot]:
        for param in params:
            slot = self._slots.get(id(param))
            if slot is None:
                entry = value_of(param) if self._with_rests else None
                if entry is not None and entry.rest is None:  # made of cast weights since, by a parametrization
                    entry.rest = torch.zeros_like(param, dtype=torch.int16, requires_grad=False)
                slot = self._slots[id(param)] = Slot(param, entry)
            yield slot


class State(enum.Enum):
    """Where the gradients of an optimizer are, between two backward passes and while a block is open."""

    READY = "unscaled in p.grad, or cleared"
    LOCAL = "unscaled in p.grad; made under no_sync(), and reduced with those of the next backward pass"
    WAITING = "in p.grad at a loss scale, until a block or a step unscales them (delay_unscale=True)"
    IN_BLOCK = "earlier ones in stashes, or with the fresh ones in p.grad; fresh ones at the scale of the block"


#: What a script may not do in a state, by the verb: every other transition is allowed.
_REFUSED = {
    ("step", State.IN_BLOCK): (
        "optimizer.step() was called inside the scale_loss block, where gradients are still scaled. End the block first: step() "
        "belongs on the level of `with`, not inside it."
    ),
    ("clip", State.IN_BLOCK): (
        "clip_grad_norm_ was called inside the scale_loss block, where gradients are still scaled. End the block first."
    ),
    ("open", State.IN_BLOCK): (
        "scale_loss was entered inside of another scale_loss block. Leave the first block before entering the second: gradients of "
        "several losses add up across blocks. Of threads that train at once, each calls initialize() for its own models and "
        "optimizers."
    ),
}


class Clipping:
    """What ``clip_grad_norm_`` has yet to do to the gradients of weights with rests: the step does it while it reads them.

    ``pending`` is the product of all clippings since the gradients came, None without any: every step over the same gradients
    multiplies what it reads by it. The gradients of the next block are added to clipped ones, see `Gradients.widen`.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Other gradients come, or none."""
        self.pending: torch.Tensor | None = None
        self._clipped: list[tuple[Slot, Any]] = []  # and their gradients as they were then
        self._is_used = False

    def add(self, coefficient: torch.Tensor, slots: Iterable[Slot]) -> None:
        """Clip the gradients of these slots by this too."""
        self.pending = coefficient if self.pending is None else self.pending * coefficient
        self._clipped = [(slot, seen([slot.param])) for slot in slots]
        self._is_used = False

    def check_writes(self, refuses: bool = True) -> None:
        """Raise where a script wrote to gradients between their clipping and a step. After a step, forget the clipping."""
        for slot, before in self._clipped:
            if are_still(before, [slot.param]):
                continue
            if self._is_used:
                return self.forget()
            if refuses and slot.gradient is not None:
                raise ConfigurationError(
                    f"The gradient of a parameter of shape {tuple(slot.param.shape)} was written to after "
                    "ampkit.clip_grad_norm_. Clip last, after every backward pass and every change of gradients."
                )
        return None

    def hold_none(self) -> None:
        """Hold no gradient as it was: writes since are not noticed."""
        self._clipped = []

    def end_step(self) -> None:
        """A step has used it."""
        self._is_used = True


def _clip_narrow_gradients(
    original: Callable, parameters: Any, max_norm: float, norm_type: float = 2.0, *args: Any, **kwargs: Any
) -> Any:
    """torch's ``clip_grad_norm_``, reading narrow gradients as they are: their norm is float32."""
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    gradients = [gradient for param in params if (gradient := stored_gradient(param)) is not None]
    is_plain = all(type(one) is torch.Tensor and one.layout is torch.strided for one in gradients)
    has_narrow = any(one.dtype in LOWER_PRECISION for one in gradients) and len({one.device for one in gradients}) == 1
    if args or kwargs or norm_type != 2.0 or not is_plain or not has_narrow:
        return original(params, max_norm, norm_type, *args, **kwargs)
    norm = kernels.multi_tensor_l2norm(gradients)[0].reshape(())
    kernels.multi_tensor_scale(gradients, gradients, kernels.clip_coefficient(norm, max_norm))
    return norm


def _patch_clipping(patches: PatchSet) -> None:
    for module in (torch.nn.utils.clip_grad, torch.nn.utils):
        patches.put_around(module, "clip_grad_norm_", _clip_narrow_gradients)


torchs_clipping = SharedPatches(_patch_clipping)


class Gradients:
    """Those of one optimizer: a `State`, and the verbs that lead from one to the next (docs/architecture.md draws them).

    ``scale`` is that of the block, or at which gradients wait. ``process_groups`` are the groups of processes that have to agree
    whether to step: the ``process_group`` of `initialize`, and those that the parameters lie on.
    """

    def __init__(self, process_group: Any = None) -> None:
        self.slots: list[Slot] = []
        self.stored: list[Slot] = []  # those of weights in lower precision with rests
        self.params: list[torch.Tensor] = []  # theirs, and the ids of these
        self.ids: set[int] = set()
        self.process_groups = self._of_script = [] if process_group is None else [process_group]
        self.state = State.READY
        self.scale: Scale = 1.0
        self._before = State.READY  # the block that is open
        self.holder: Any = None  # this block, and whether it only may come here
        self._is_guess = False
        self.judged: tuple[Slot, Reference] | None = None  # the first gradient that a block has judged
        self.clipping = Clipping()

    def add(self, slots: Iterable[Slot]) -> None:
        """From now on these parameters' gradients too, once each; where ``slots`` raises, those before stay added."""
        known = set(self.slots)
        for slot in slots:
            if slot not in known:
                known.add(slot)
                slot.owners += 1
                self.slots.append(slot)
                self.params.append(slot.param)
                self.ids.add(id(slot.param))
                if slot.entry is not None:
                    self.stored.append(slot)
        self.process_groups = list(
            dict.fromkeys([*process_groups(slot.param for slot in self.slots), *self._of_script])
        )

    @property
    def device(self) -> torch.device:
        """Where what is found about them is kept."""
        return self.slots[0].param.device if self.slots else _CPU

    def drop(self, ids: set[int]) -> None:
        """Leave these parameters to another."""
        if ids:
            kept = [slot for slot in self.slots if id(slot.param) not in ids]
            self.forget_slots()
            self.add(kept)

    def forget_slots(self) -> None:
        """No parameters any more."""
        for slot in self.slots:
            slot.owners -= 1
        self.slots.clear()
        self.stored.clear()
        self.params.clear()
        self.ids.clear()

    def refuse(self, verb: str) -> None:
        """Raise `ConfigurationError` where a script may not do this now. What a block holds by a guess it lets go for it."""
        if self._is_guess and self.state is State.IN_BLOCK and not self.has_fresh:
            self.put_back(BackwardPass(self.scale))
        if (verb, self.state) in _REFUSED:
            raise ConfigurationError(_REFUSED[verb, self.state])

    @property
    def stay(self) -> bool:
        """Whether those of before are in ``param.grad`` while the backward pass of the open block adds to them."""
        return self._before is not State.READY

    @property
    def has_fresh(self) -> bool:
        """Whether there are gradients in ``param.grad``: in a block, of the backward pass that just ran."""
        for slot in self.slots:
            if stored_gradient(slot.param) is not None:
                return True
        return False

    # The backward pass

    def open(self, scale: Scale, copies: bool = False, holder: Any = None, is_guess: bool = False) -> None:
        """Before a backward pass at ``scale``: stash the gradients that are there, or bring those that stay to it.

        With ``copies`` gradients are views of DDP's buckets, which the next backward pass overwrites.
        """
        if self.state is State.IN_BLOCK:
            self.refuse("open")
        if self.clipping.pending is not None:
            self.widen()
        # First: whatever interrupts the rest, it is undone.
        self._before, self.holder, self._is_guess = self.state, holder, is_guess
        if self.state is State.READY:
            self.stash(self.slots, copies)
        else:
            bring_to(self.slots, ratio(scale, self.scale if self.state is State.WAITING else 1.0))
        self.state, self.scale = State.IN_BLOCK, scale

    @staticmethod
    def stash(slots: Iterable[Slot], copies: bool = False) -> None:
        """Set gradients aside, so that fresh ones arrive unmixed."""
        for slot in slots:
            if stored_gradient(slot.param) is None:
                continue
            gradient = slot.stash = slot.param.grad
            forget_gradient(slot.param)
            note_set_aside(slot.param)
            if copies and gradient.dtype is slot.param.dtype:
                slot.stash = gradient.clone()

    def put_back(self, backward: BackwardPass) -> None:
        """After a backward pass that failed, or did not come here: the gradients as they were before it.

        Where gradients stayed in ``param.grad``, what the pass had added to them stays too, unscaled.
        """
        if self._before is State.LOCAL:
            self.collect(BackwardPass(backward.scale, local=True), None)
        elif self._before is State.READY:
            for slot in backward.take(self.slots):
                stash, slot.stash = slot.stash, None
                put_gradient(slot.param, stash)
        self.state, self.holder = self._before, None

    def keep_scaled(self, scale: Scale) -> None:
        """After a backward pass with ``delay_unscale=True``: leave everything in ``param.grad``, at ``scale``."""
        fresh, stashes = [], []
        for slot in self.slots:
            gradient, stash, slot.stash = slot.param.grad, slot.stash, None
            if stash is None or not is_set_aside(slot.param):
                continue
            if gradient is None:
                gradient = slot.param.grad = torch.zeros_like(stash, dtype=slot.param.dtype)
            if gradient.layout is stash.layout is torch.strided:
                fresh.append(gradient)
                stashes.append(stash)
            else:
                slot.param.grad = gradient + (stash * on(scale, stash.device)).to(gradient.dtype)
        kernels.multi_tensor_axpby(fresh, stashes, fresh, 1.0, scale)
        self.state, self.scale, self.holder = State.WAITING, scale, None

    def collect(self, backward: BackwardPass, found: FoundInf | None) -> None:
        """After a backward pass: unscale fresh gradients, add them to those before, and check them on the way."""
        fresh, sums = [], []
        for slot in backward.take(self.slots):
            gradient, stash = slot.param.grad, slot.stash
            if stash is None:
                if gradient is not None:
                    fresh.append((slot, gradient))
            elif gradient is not None:
                sums.append((slot, gradient))
            else:
                slot.stash = None
                put_gradient(slot.param, stash)
        if fresh:
            unscale(fresh, backward, found)
        if sums:
            add_to_stashes(sums, backward, found)
        self.state, self.holder = State.LOCAL if backward.local else State.READY, None

    # Between the block and the step

    def settle(self, refuses: bool = True) -> bool:
        """Have ``param.grad`` hold what there is: what was set aside for dynamo comes back, and a clipping goes with its gradients.

        Returns whether there are gradients. Raises `ConfigurationError` for a write to clipped gradients, where it ``refuses``.
        """
        if self.clipping.pending is not None:
            self.clipping.check_writes(refuses)
        if self.state is State.IN_BLOCK:
            return True
        for slot in self.stored:
            if slot.stash is not None:
                if slot.param.grad is None:
                    put_gradient(slot.param, slot.stash)
                slot.stash = None
        if self.has_fresh:
            return True
        self.forget()
        return False

    def set_aside(self) -> None:
        """Stash gradients in another dtype than their weights', with which dynamo does not trace. `settle` brings them back."""
        for slot in self.stored if self.state is State.READY else ():
            gradient = slot.param.grad
            if gradient is not None and gradient.dtype is not slot.param.dtype:
                slot.stash = gradient
                forget_gradient(slot.param)

    def in_float32(self) -> dict[Slot, torch.Tensor]:
        """The gradients of weights with rests in float32, clipped: ``param.grad`` itself where it is that."""
        clip, found = self.clipping.pending, {}
        inputs, outputs = [], []
        for slot in self.stored:
            gradient = slot.param.grad
            if gradient is None:
                continue
            if gradient.dtype is torch.float32 and clip is None:
                found[slot] = gradient
            elif is_sparse(gradient):
                found[slot] = gradient.float() if clip is None else gradient.float() * on(clip, gradient.device)
            else:
                found[slot] = torch.empty_like(gradient, dtype=torch.float32)
                inputs.append(gradient)
                outputs.append(found[slot])
        kernels.multi_tensor_scale(inputs, outputs, 1.0 if clip is None else clip)
        return found

    def widen(self) -> None:
        """Have ``param.grad`` of weights with rests be float32, and clipped: scripts read them as gradients of float32 values."""
        if self.state is State.IN_BLOCK or self.state is State.WAITING:
            return  # there is nothing to be seen in a backward pass, nor while gradients wait at their scale
        are_judged = self.are_judged
        for slot, gradient in self.in_float32().items():
            put_gradient(slot.param, gradient)
        self.clipping.forget()
        if are_judged:
            self.note_judged()

    def note_judged(self) -> None:
        """A block has judged the gradients of now."""
        self.judged = None
        for slot in self.slots:
            if (gradient := stored_gradient(slot.param)) is not None:
                self.judged = slot, Reference(gradient)
                return

    @property
    def are_judged(self) -> bool:
        """Whether these are the gradients that a block has judged, written to or not."""
        return self.judged is not None and stored_gradient(self.judged[0].param) is self.judged[1]()

    def clip_by(self, coefficient: torch.Tensor) -> None:
        """Have every gradient multiplied by this: those of weights with rests by the step."""
        own = [slot.gradient for slot in self.slots if slot.entry is None and slot.gradient is not None]
        own = list(map(values_of, own))
        kernels.multi_tensor_scale(own, own, coefficient)
        if self.stored:
            self.clipping.add(coefficient, self.stored)
            if any(slot.owners > 1 for slot in self.stored):
                self.widen()

    def check(self, found: FoundInf) -> None:
        """Note in ``found`` what is not finite among the gradients of now, on this process."""
        params, gradients = [], []
        for slot in self.slots:
            gradient = stored_gradient(slot.param)
            if gradient is not None:
                params.append(slot.param)
                gradients.append(gradient if gradient.layout is torch.strided else gradient._values())
        flag, first_bad = places_for(found, params)
        kernels.multi_tensor_unscale_l2norm(gradients, found_inf=flag, first_bad=first_bad)

    def total_norm(self) -> torch.Tensor | None:
        """The Euclidean norm of all gradients, unscaled and clipped so far: float32, shape [1]; None without gradients."""
        clip = self.clipping.pending
        own, clipped = [], []
        for slot in self.slots:
            if (gradient := slot.gradient) is not None:
                (own if clip is None or slot.entry is None else clipped).append(values_of(gradient))
        norms = [norm for norm in (norm_of(own), norm_of(clipped)) if norm is not None]
        if clipped:
            norms[-1] = norms[-1] * on(clip, norms[-1].device)
        if len(norms) > 1:
            return kernels.multi_tensor_l2norm([on(norm, norms[0].device) for norm in norms])[0]
        return norms[0] if norms else None

    # Clearing

    def clear(self, set_to_none: bool, own: bool) -> None:
        """What ``zero_grad`` of torch does not see: stashed gradients, and the model's where the optimizer steps over others.

        With ``own`` it clears parameters without rests too, else the optimizer's own ``zero_grad`` does.
        """
        self.forget()
        for slot in self.slots:
            slot.stash = None
            if own or slot.entry is not None:
                if set_to_none and slot.entry is None:
                    slot.param.grad = None
                elif set_to_none:
                    forget_gradient(slot.param)
                elif (gradient := slot.gradient) is not None:
                    if gradient.grad_fn is not None:
                        gradient.detach_()
                    gradient.requires_grad_(False).zero_()  # views cannot be detached in place

    def forget(self) -> None:
        """The gradients are gone."""
        if self.state is State.IN_BLOCK:
            self._before = State.READY
        else:
            self.state = State.READY
        if self.clipping.pending is not None:
            self.clipping.forget()

    def zero_where(self, flag: torch.Tensor, all_of_them: bool = True) -> None:
        """Write zeros where ``flag`` is not 0, on its device: to all gradients, or to those that several optimizers share."""
        for slot in self.slots:
            if slot.gradient is not None and (all_of_them or slot.owners > 1):
                gradient = values_of(slot.gradient).detach()
                gradient.masked_fill_(on(flag, gradient.device) != 0, 0.0)
