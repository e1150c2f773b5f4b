"""The training runs that are attacked: small, drawn at random, and the same each time, so that two can be compared bit for bit.

A `Recipe` is what is drawn; `Run` trains it, one `iterate(number)` at a time. An iteration is a function of the run's state and its
number: batches, latent vectors and dropout are drawn from that; running statistics are written, and no training reads them. `Fault`
is a bad value in an iteration. `Run.state` is all that an iteration may change, for `assert_same`; `Run.trained` is the part that
a skipped iteration leaves as it was.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

import ampkit
from ampkit.models.float32_values import stored_weights
from ampkit.optimizers import FusedAdam, FusedSGD
from ampkit.registry import session_of

# Models


def conv_net() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()),
        *(nn.Conv2d(6, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
    )


def perceptron(inputs: int, activation: nn.Module, outputs: int) -> nn.Module:
    """Make the generator or the critic of a GAN."""
    return nn.Sequential(nn.Linear(inputs, 12), nn.BatchNorm1d(12), activation, nn.Linear(12, outputs))


class Llama(nn.Module):
    """RMSNorm, rotary positions, causal attention, SwiGLU, and a head that is the embedding."""

    def __init__(self, vocabulary: int = 16, width: int = 16, hidden: int = 24) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.norms, self.dropout = nn.ModuleList(nn.RMSNorm(width) for _ in range(3)), nn.Dropout(0.1)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)  # two heads
        attention = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        normed = self.norms[1](x)
        x = x + self.dropout(self.down(F.silu(self.gate(normed)) * self.up(normed)))
        return self.head(self.norms[2](x))


def rotated(x: torch.Tensor) -> torch.Tensor:
    """[batch, heads, time, width], each pair of features turned by an angle that grows with time."""
    time, width = x.shape[-2:]
    angles = torch.arange(time)[:, None] / 100.0 ** (torch.arange(0, width, 2) / width)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


# Optimizers, each with the optimizer of plain torch that does the same in float32; None where torch has none


@dataclass(frozen=True)
class Maker:
    make: Callable[[Any], Any]
    plain: Callable[[Any], torch.optim.Optimizer] | None = None

    @classmethod
    def of_torch(cls, kind: type, **settings: Any) -> Maker:
        return cls(lambda params: kind(params, **settings), lambda params: kind(params, **{**settings, "fused": None}))


SGD, ADAMW = dict(lr=0.05, momentum=0.9), dict(lr=2e-3, weight_decay=0.1)
OPTIMIZERS = {
    "SGD": Maker.of_torch(torch.optim.SGD, **SGD, foreach=False),
    "SGD foreach": Maker.of_torch(torch.optim.SGD, **SGD, foreach=True),
    "SGD fused": Maker.of_torch(torch.optim.SGD, **SGD, fused=True),
    "Adam": Maker.of_torch(torch.optim.Adam, lr=2e-3),
    "AdamW foreach": Maker.of_torch(torch.optim.AdamW, **ADAMW, foreach=True),
    "AdamW fused": Maker.of_torch(torch.optim.AdamW, **ADAMW, fused=True),
    "RMSprop": Maker(*2 * (lambda params: torch.optim.RMSprop(params, lr=1e-3),)),
    "FusedSGD": Maker(
        lambda params: FusedSGD(params, **SGD, set_grad_none=True), lambda params: torch.optim.SGD(params, **SGD)
    ),
    "FusedAdam": Maker(lambda params: FusedAdam(params, **ADAMW), lambda params: torch.optim.AdamW(params, **ADAMW)),
    "FusedAdam int8": Maker(lambda params: FusedAdam(params, **ADAMW, state_dtype="int8")),
    "FusedAdam bfloat16": Maker(lambda params: FusedAdam(params, **ADAMW, state_dtype="bfloat16")),
    "FusedSGD int8": Maker(lambda params: FusedSGD(params, **SGD, set_grad_none=True, state_dtype="int8")),
}

#: Where weights are stored without float32 values: in float16 Adam's eps is 0, and torch's fused SGD is refused on the CPU.
AT_O3 = {
    torch.bfloat16: OPTIMIZERS.keys() - {"SGD fused"},
    torch.float16: {"SGD", "SGD foreach", "FusedSGD", "FusedAdam", "FusedSGD int8"},
}

# Runs

#: For each level that may train in either precision, the setting that chooses it.
PRECISION = {"O1": "patch_torch_functions_type", "O2": "cast_model_type", "O3": "cast_model_type"}
RULE = dict(growth_factor=2.0, backoff_factor=0.5)


@dataclass(frozen=True)
class Recipe:
    """The random choices of a run. ``rule`` drives a dynamic loss scale; without one the scale is 1, and steps check gradients."""

    model: str
    level: str
    dtype: torch.dtype
    optimizer: str
    rule: ampkit.DynamicLossScale | None
    parts: int = 1  # blocks per step
    max_norm: float | None = None
    seed: int = 0

    @classmethod
    def drawn(cls, draw: random.Random, **fixed: Any) -> Recipe:
        level = fixed.get("level") or draw.choice(["O0", "O1", "O2", "O3", "O4", "O5"])
        narrow = draw.choice([torch.bfloat16, torch.bfloat16, torch.float16]) if level in PRECISION else torch.bfloat16
        scaled = level in ("O1", "O2") or draw.random() < 0.3
        rule = ampkit.DynamicLossScale(
            2.0 ** draw.randint(0, 10 if narrow is torch.float16 else 16),
            growth_interval=draw.choice([3, 7, 2000]),
            hysteresis=draw.choice([1, 1, 2]),
            **RULE,
        )
        drawn = cls(
            model=draw.choice(["cnn", "llama", "gan"]),
            level=level,
            dtype=narrow,
            optimizer=draw.choice([name for name in OPTIMIZERS if level != "O3" or name in AT_O3[narrow]]),
            rule=rule if scaled else None,
            parts=draw.choice([1, 1, 2, 3]),
            max_norm=draw.choice([None, 0.5]),
            seed=draw.randrange(1000),
        )
        return replace(drawn, **fixed)

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments for `ampkit.initialize`."""
        highest = 2.0**12 if self.dtype is torch.float16 else 2.0**20  # at which these gradients are finite
        settings: dict[str, Any] = {"opt_level": self.level, "verbosity": 0, "max_loss_scale": highest}
        if self.level in PRECISION:
            settings[PRECISION[self.level]] = self.dtype
        if self.rule is None:
            return {**settings, "loss_scale": 1.0, "check_gradients": True}
        return {**settings, "loss_scale": self.rule, "num_losses": 2 if self.model == "gan" else 1}


@dataclass(frozen=True)
class Fault:
    """A bad ``value`` in the turn of a player in an iteration: at a ``place``, in the block with number ``part``."""

    place: str
    value: float
    player: int = 0
    part: int = 0
    where: int = 0  # which parameter, and which element

    PLACES = ("batch", "loss", "element", "gradient", "every gradient")

    @classmethod
    def drawn(cls, draw: random.Random, recipe: Recipe) -> Fault:
        player = draw.randrange(2 if recipe.model == "gan" else 1)
        place = draw.choice(cls.PLACES[recipe.model == "llama" :])  # whose batches are integers
        value = draw.choice([math.inf, -math.inf, math.nan])
        return cls(place, value, player, draw.randrange(recipe.parts), draw.randrange(10**6))

    def in_batch(self, batch: torch.Tensor) -> torch.Tensor:
        if self.place != "batch":
            return batch
        spoiled = batch.clone()
        spoiled.view(-1)[self.where % spoiled.numel()] = self.value
        return spoiled

    def in_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.value if self.place == "loss" else loss

    def in_gradients(self, params: list[nn.Parameter]) -> None:
        grads = [param.grad for param in params if param.grad is not None]
        target = grads[self.where % len(grads)]
        if self.place == "element":
            target.view(-1)[self.where % target.numel()] = self.value
        elif self.place == "gradient":
            target.fill_(self.value)
        elif self.place == "every gradient":
            for grad in grads:
                grad.fill_(self.value)


@dataclass
class Player:
    """A model, its optimizer, and its loss function: ``loss(batch)``."""

    model: nn.Module
    optimizer: Any
    loss: Callable[[torch.Tensor], torch.Tensor]
    loss_id: int = 0


class Run:
    """A recipe in training. ``scales`` are the loss scales of its blocks so far; a run that receives them uses the same scales."""

    def __init__(self, recipe: Recipe, scales: dict[Any, float] | None = None, initializes: bool = True) -> None:
        self.recipe = recipe
        torch.manual_seed(recipe.seed)
        build = {"cnn": self._classifier, "llama": self._language_model, "gan": self._adversaries}
        self.players: list[Player] = build[recipe.model]()
        self.given, self.scales = scales, {}
        if initializes:
            self.initialize()

    def initialize(self, **changes: Any) -> None:
        models, optimizers = [player.model for player in self.players], [player.optimizer for player in self.players]
        ampkit.initialize(models, optimizers, **{**self.recipe.settings, **changes})
        self.session = session_of(optimizers[0])  # other threads may have initialized since

    def _optimizer(self, model: nn.Module) -> Any:
        return OPTIMIZERS[self.recipe.optimizer].make(model.parameters())

    def _classifier(self) -> list[Player]:
        model = conv_net()
        return [Player(model, self._optimizer(model), lambda x: F.cross_entropy(model(x).float(), labels_of(x)))]

    def _language_model(self) -> list[Player]:
        model = Llama()

        def loss(tokens: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())

        return [Player(model, self._optimizer(model), loss)]

    def _adversaries(self) -> list[Player]:
        critic, generator = perceptron(6, nn.LeakyReLU(0.2), 1), perceptron(4, nn.ReLU(), 6)

        def of_critic(real: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                fake = generator(torch.randn(4, 4))
            return F.softplus(-critic(real).float()).mean() + F.softplus(critic(fake).float()).mean()

        def of_generator(z: torch.Tensor) -> torch.Tensor:
            return F.softplus(-critic(generator(z)).float()).mean()

        last = 1 if self.recipe.rule is not None else 0
        return [
            Player(critic, self._optimizer(critic), of_critic),
            Player(generator, self._optimizer(generator), of_generator, last),
        ]

    def batch(self, number: int, player: int, part: int) -> torch.Tensor:
        drawn = torch.Generator().manual_seed(1000 * number + 10 * player + part)
        if self.recipe.model == "llama":
            return torch.randint(0, 16, (2, 7), generator=drawn)
        shape = {"cnn": (4, 3, 6, 6), "gan": ((4, 6), (4, 4))[player]}[self.recipe.model]
        return torch.randn(shape, generator=drawn)

    def iterate(self, number: int, fault: Fault | None = None, leaves_out: int | None = None) -> list[bool]:
        """Run an iteration with ``fault``, without the turn of player ``leaves_out``; return which players skipped their steps."""
        return [
            self.turn(number, player, fault if fault is not None and fault.player == player else None)
            for player in range(len(self.players))
            if player != leaves_out
        ]

    def turn(self, number: int, player: int, fault: Fault | None = None) -> bool:
        """Run the turn of one player: clear, blocks, clip, step. Return whether the step was skipped."""
        active = self.players[player]
        active.optimizer.zero_grad()
        for part in range(self.recipe.parts):
            self.block(number, player, part, fault if fault is not None and fault.part == part else None)
        if self.recipe.max_norm is not None:
            ampkit.clip_grad_norm_(active.optimizer, self.recipe.max_norm)
        active.optimizer.step()
        return ampkit.step_was_skipped(active.optimizer)

    def block(self, number: int, player: int, part: int, fault: Fault | None = None) -> None:
        """Run forward and backward of one micro-batch."""
        active, key = self.players[player], (number, player, part)
        torch.manual_seed(1000 * number + 10 * player + part)
        batch = self.batch(number, player, part)
        loss = active.loss(batch if fault is None else fault.in_batch(batch)) / self.recipe.parts
        if self.recipe.rule is not None:
            scaler = self.session.scalers[active.loss_id]
            if self.given is not None:
                scaler.loss_scale = self.given[key]
            self.scales[key] = scaler.loss_scale
        with ampkit.scale_loss(
            loss if fault is None else fault.in_loss(loss), active.optimizer, loss_id=active.loss_id
        ) as scaled:
            scaled.backward()
            if fault is not None:
                fault.in_gradients(list(active.model.parameters()))

    def state(self) -> dict[str, Any]:
        """All that an iteration may change, by name: weights and what their rounding left, optimizer state, running statistics."""
        return {**self.trained(), **self.statistics()}

    def statistics(self) -> dict[str, torch.Tensor]:
        """The buffers of all players."""
        return {
            f"{index} {name}": buffer.clone()
            for index, player in enumerate(self.players)
            for name, buffer in player.model.named_buffers()
        }

    def trained(self) -> dict[str, Any]:
        """The part of `state` that a skipped step leaves as it was: all but running statistics, which stay finite."""
        kept: dict[str, Any] = {}
        for index, player in enumerate(self.players):
            for name, value in player.model.named_parameters():
                kept[f"{index} {name}"] = value.detach().clone()
            for place, (_, stored) in enumerate(stored_weights(player.model)):
                kept[f"{index} rest {place}"] = None if stored.rest is None else stored.rest.clone()
            for place, param in enumerate(player.model.parameters()):
                for name, value in player.optimizer.state.get(param, {}).items():
                    kept[f"{index} state {place} {name}"] = value.clone() if isinstance(value, torch.Tensor) else value
        return kept

    def checkpoint(self) -> dict[str, Any]:
        """The checkpoint that a script saves."""
        return {
            "models": [player.model.state_dict() for player in self.players],
            "optimizers": [player.optimizer.state_dict() for player in self.players],
            "ampkit": ampkit.state_dict(),
        }

    def resume(self, checkpoint: dict[str, Any]) -> None:
        for player, model, optimizer in zip(self.players, checkpoint["models"], checkpoint["optimizers"]):
            player.model.load_state_dict(model)
            player.optimizer.load_state_dict(optimizer)
        ampkit.load_state_dict(checkpoint["ampkit"])


def labels_of(images: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(images)) % 4


# Comparing


def bits(value: Any) -> Any:
    """A value that is equal only if every bit is, NaN and -0.0 included."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.dtype, value.shape, value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def differences(actual: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Names of what differs by a bit; a parameter that one optimizer has not stepped yet may have zeros in the other."""
    pairs = {name: (actual.get(name), wanted.get(name)) for name in wanted.keys() | actual.keys()}
    return [name for name, pair in pairs.items() if bits(pair[0]) != bits(pair[1]) and not all(map(is_nothing, pair))]


def assert_same(actual: dict[str, Any], wanted: dict[str, Any], case: Any) -> None:
    """Compare two states bit for bit."""
    for name in differences(actual, wanted):
        raise AssertionError(f"{name} differs: {actual.get(name)} is not {wanted.get(name)}\n{case}")


def assert_finite(buffers: dict[str, torch.Tensor], case: Any) -> None:
    """Check that running statistics are finite, so they can be saved."""
    for name, value in buffers.items():
        assert value.isfinite().all(), f"{name} is {value}\n{case}"


def is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, torch.Tensor) and not value.any())


def copied(value: Any) -> Any:
    """A deep copy of nested dicts and lists of tensors and numbers."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), value)
