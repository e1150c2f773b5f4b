"""Helpers that several test files share."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import itertools
import os
import signal
import subprocess
import sys
import traceback
import types
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

import ampkit
from ampkit.casting.engine import Casting

#: The folder that holds setup.py.
ROOT = Path(__file__).resolve().parents[1]


def python(*arguments: Any, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    """Run Python with these arguments; it imports this checkout from any folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=900)


def others_slow(*chosen, of: Iterable) -> list:
    """The values of a parameter: those ``chosen`` for `make test`, and the others, which `make test-all` takes too."""
    values = [(value, value if isinstance(value, tuple) else (value,)) for value in of]
    return [value if value in chosen else pytest.param(*each, marks=pytest.mark.slow) for value, each in values]


@contextlib.contextmanager
def o1(
    lower_precision: torch.dtype = torch.bfloat16, device_types: tuple[str, ...] = ("cpu",), **settings
) -> Iterator[Casting]:
    """An O1 engine, on the CPU or on other devices: installed, and taken back whatever happens."""
    casting = Casting(lower_precision, device_types=device_types, **settings)
    casting.install()
    try:
        yield casting
    finally:
        casting.close()


def casts_made(casting: Casting) -> int | None:
    """The number of casts of weights that the bfloat16 store has made; None without a store, where each use of a weight is cast."""
    store = casting.caches.of(torch.bfloat16)
    return None if store is None else store.casts_made


NAMESPACES = (
    *(torch, nn.functional, torch.Tensor, torch.Tensor.__base__, torch.linalg, torch.special, torch.fft, torch._VF),
    *(nn.RNNBase, torch.utils.data._utils.fetch._MapDatasetFetcher, torch.jit._recursive),
)


@contextlib.contextmanager
def torch_left_as_found() -> Iterator[None]:
    """Assert that the code inside leaves torch unchanged: every attribute, by identity."""
    before = [dict(vars(namespace)) for namespace in NAMESPACES]
    yield
    for namespace, attributes in zip(NAMESPACES, before):
        now = vars(namespace)
        changed = [name for name, value in attributes.items() if name not in now or now[name] is not value]
        # Modules that torch imports late become its attributes; copying a tensor leaves copyreg's cache on its class.
        new = now.keys() - attributes.keys() - {"__slotnames__"}
        added = [name for name in new if not isinstance(now[name], types.ModuleType)]
        assert not changed and not added, f"{namespace.__name__}: changed {changed}, added {added}"


LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
#: Among opt levels in tests: weights that are stored in bfloat16, with their float32 values beside them, and no loss scale.
STORED_BF16 = "O2 in bfloat16"


def at(level: str, **settings) -> dict[str, Any]:
    """The arguments of `ampkit.initialize` for an opt level or `STORED_BF16`; ``settings`` override those of the level."""
    stored = {"opt_level": "O2", "cast_model_type": torch.bfloat16, "loss_scale": 1.0}
    return {**(stored if level == STORED_BF16 else {"opt_level": level}), **settings}


def sgd(params: Iterable, lr: float = 0.1, **settings) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=lr, **settings)


def initialize_quietly(model: Any, make_optimizer: Callable, level: str, **settings) -> tuple[Any, Any]:
    """``ampkit.initialize`` of a model and of ``make_optimizer(model.parameters())``, without a word on standard output.

    Models in a list have an optimizer each.
    """
    several = isinstance(model, list)
    optimizers = [make_optimizer(one.parameters()) for one in (model if several else [model])]
    settings = at(level, **{"verbosity": 0, **settings})
    return ampkit.initialize(model, optimizers if several else optimizers[0], **settings)


def backward(loss: torch.Tensor, optimizers, **flags) -> None:
    with ampkit.scale_loss(loss, optimizers, **flags) as scaled:
        scaled.backward()


def iterate(loss_of: Callable[[], torch.Tensor], optimizer, times: int = 1, **flags) -> float:
    """Iterations as scripts write them: clear, compute the loss, backward, step. Returns the last loss."""
    for _ in range(times):
        optimizer.zero_grad()
        loss = loss_of()
        backward(loss, optimizer, **flags)
        optimizer.step()
    return loss.item()


def iterate_in_torch(loss_of: Callable[[], torch.Tensor], optimizer, times: int = 1) -> float:
    """Iterations without ampkit. Returns the last loss."""
    for _ in range(times):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
    return loss.item()


def one_weight(value: float = 1.0, make_optimizer: Callable = torch.optim.SGD, **settings) -> tuple[nn.Module, Any]:
    """A model y = w * x of one weight, and SGD with a rate of 1, so that a step is the gradient; initialized.

    At O2 the weight is in lower precision, which only Apex's rule stores a single one in. ``opt_level`` may be `STORED_BF16`.
    """
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    settings = {"verbosity": 0, **at(settings.pop("opt_level", "O1"), **settings)}
    settings.setdefault("policy", "apex" if settings["opt_level"] == "O2" else "default")
    return ampkit.initialize(model, make_optimizer(model.parameters(), lr=1.0), **settings)


def backward_of_one_weight(model: nn.Module, optimizer, slope: float, **flags) -> None:
    """A backward pass that leaves ``slope`` as the gradient of the weight."""
    backward(model(torch.ones(1, 1)).float().sum() * slope, optimizer, **flags)


def everything(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """Copies of what a step changes: weights, their float32 values, moments and step counts."""
    values = [model.state_dict()[name] for name, _ in model.named_parameters()]
    states = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    return [x.detach().clone() for x in (*model.parameters(), *values, *states)]


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(actual: Any, expected: Any) -> None:
    """Assert the same tensors in two lists or dicts: names, dtypes and every bit."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def assert_skips(model: nn.Module, optimizer: Any, step: Callable[[], object] | None = None) -> None:
    before = everything(model, optimizer)
    (step or optimizer.step)()
    assert ampkit.step_was_skipped(optimizer)
    assert all(torch.equal(x, y) for x, y in zip(before, everything(model, optimizer), strict=True))


def in_threads(*works: Callable[[], object]) -> None:
    with ThreadPoolExecutor(len(works)) as threads:
        for running in [threads.submit(work) for work in works]:
            running.result(60)


def net_with_norm(inputs: int = 6, hidden: int = 8, outputs: int = 3, seed: int = 0) -> nn.Sequential:
    """Weights that O2 casts, around a norm layer that it keeps float32; the same numbers each time."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.LayerNorm(hidden), nn.Tanh(), nn.Linear(hidden, outputs))


def random_batch(seed: int = 1, rows: int = 4, inputs: int = 6, outputs: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, inputs, generator=generator), torch.randn(rows, outputs, generator=generator)


# For optimizers on their own: parameters, gradients drawn for each step, and steps with them.


def several_params(dtype: torch.dtype, device="cpu") -> list[nn.Parameter]:
    """Parameters of several shapes, a scalar among them; the same numbers each time."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(3, 4), (7,), (1,), (2, 3, 2, 2), ()]
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes]


def drawn_gradients(step: int, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of one step, the same for the same step whatever the precision of the parameters."""
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=generator).to(p.device, p.dtype) for p in params]


def take_steps(optimizer, params: Iterable[torch.Tensor], steps: Iterable[int]) -> None:
    for step in steps:
        for param, gradient in zip(params, drawn_gradients(step, params)):
            param.grad = gradient
        optimizer.step()


def assert_all_close(actual: Iterable[torch.Tensor], expected: Iterable[torch.Tensor], tolerance: float) -> None:
    """Assert each tensor within ``tolerance``, relative or absolute, of the expected one. Dtypes may differ."""
    for x, y in zip(actual, expected, strict=True):
        assert torch.allclose(x.double(), y.double(), rtol=tolerance, atol=tolerance), (x, y)


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    total = 0
    for tensor in tensors:
        total = zlib.crc32(tensor.view(-1).view(torch.uint8).numpy().tobytes(), total)
    return total


def saved_and_loaded(thing: Any, weights_only: bool = True) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def replica(module: nn.Module) -> nn.Module:
    made = module._replicate_for_data_parallel()
    made._former_parameters = dict(module._parameters)
    for name, param in module._parameters.items():
        setattr(made, name, param.view_as(param))
    for name, child in module._modules.items():
        setattr(made, name, replica(child))
    return made


#: The fused optimizers by name, with settings that make each of them use all its state.
FUSED_SETTINGS = {
    "FusedSGD": dict(lr=0.1, momentum=0.9),
    "FusedAdam": {},
    "FusedLAMB": {},
    "FusedNovoGrad": {},
    "FusedAdagrad": {},
    "FusedMixedPrecisionLamb": {},
    "FusedLARS": dict(lr=0.1, momentum=0.9),
}


def fused_class(name: str) -> type:
    """The fused optimizer of this name: ampkit's, or one that only the drop-in has."""
    return getattr(ampkit.optimizers, name, None) or getattr(importlib.import_module("ampkit.apex.optimizers"), name)


Params = list[nn.Parameter]


def params_after_handing_on(dtype: torch.dtype, first: Callable, second: Callable) -> tuple[Params, Params]:
    """Steps of ``first``, whose state ``second`` then loads from a checkpoint; where both come to from there."""
    params = several_params(dtype)
    optimizer = first(params)
    take_steps(optimizer, params, range(3))
    again = [nn.Parameter(p.detach().clone()) for p in params]
    resumed = second(again)
    resumed.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    take_steps(optimizer, params, range(3, 6))
    take_steps(resumed, again, range(3, 6))
    return params, again


def fill_gradients(params: Iterable[torch.Tensor], seed: int) -> None:
    """Set the same gradients in any precision of the parameters: each precision holds eighths from -4 to 4 exactly."""
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = (torch.randint(-32, 33, param.shape, generator=generator) / 8.0).to(param.dtype)


def _steps_with(optimizer: Any, model: nn.Module, seeds: Iterable[int]) -> None:
    for seed in seeds:
        fill_gradients(model.parameters(), seed)
        optimizer.step()


def assert_same_state(actual: Any, expected: Any, tolerance: float) -> None:
    """Assert that the state of two optimizers has the same names, shapes and dtypes, and values within ``tolerance``."""
    assert actual.keys() == expected.keys()
    for index, state in actual.items():
        assert list(state) == list(expected[index])
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(value, expected[index][name], rtol=tolerance, atol=tolerance)
            else:
                assert type(value) is type(expected[index][name]), name
                assert value == pytest.approx(expected[index][name], rel=tolerance), name


def assert_steps_as_over_float32(model: nn.Module, make_optimizer: Callable, level: str, tolerance: float) -> None:
    """Steps of any optimizer at O2 are those over float32 parameters with the same gradients: float32 values within
    ``tolerance``, relative or absolute, and states of the same shapes and dtypes; and either run goes on from the other's state.
    """
    expected: list[nn.Module] = [copy.deepcopy(model)]
    plain = copy.deepcopy(model)  # alone: beside a session a plain optimizer's step is cast like any other code
    optimizer = make_optimizer(plain.parameters())
    _steps_with(optimizer, plain, range(6))
    expected.append(copy.deepcopy(plain))
    state = saved_and_loaded(optimizer.state_dict())
    _steps_with(optimizer, plain, range(6, 9))
    expected.append(plain)
    for before, after in itertools.pairwise(expected):
        for x, y in zip(before.parameters(), after.parameters()):
            assert (x - y).abs().max() > 100 * tolerance, "steps that nobody would miss"

    model, optimizer = initialize_quietly(model, make_optimizer, level, loss_scale=1.0)
    assert {p.dtype for p in model.parameters()} & {torch.bfloat16, torch.float16}
    _steps_with(optimizer, model, range(6))
    assert_all_close(ampkit.master_params(optimizer), expected[1].parameters(), tolerance)
    assert_same_state(optimizer.state_dict()["state"], state["state"], 10 * tolerance)
    saved, values = saved_and_loaded(optimizer.state_dict()), copy.deepcopy(expected[1])
    with torch.no_grad():
        for value, lent in zip(values.parameters(), ampkit.master_params(optimizer)):
            value.copy_(lent)
    _steps_with(optimizer, model, range(6, 9))
    assert_all_close(ampkit.master_params(optimizer), expected[2].parameters(), tolerance)
    ampkit.close()

    optimizer = make_optimizer(values.parameters())
    optimizer.load_state_dict(saved)
    loaded = copy.deepcopy(optimizer.state_dict()["state"])
    _steps_with(optimizer, values, range(6, 9))
    assert_all_close(values.parameters(), expected[2].parameters(), tolerance)

    model, optimizer = initialize_quietly(expected[1], make_optimizer, level, loss_scale=1.0)
    optimizer.load_state_dict(state)
    assert_same_state(optimizer.state_dict()["state"], loaded, 10 * tolerance)
    _steps_with(optimizer, model, range(6, 9))
    assert_all_close(ampkit.master_params(optimizer), expected[2].parameters(), tolerance)
    ampkit.close()


class ScaleOnPaper:
    """The rule of a dynamic loss scale in plain numbers: ``scale``, and ``clean`` iterations since it last moved."""

    def __init__(self, rule: ampkit.DynamicLossScale, floor: float, ceiling: float) -> None:
        self.rule, self.floor, self.ceiling = rule, floor, ceiling
        self.scale = min(max(rule.init_scale, floor), ceiling)
        self.clean, self.overflows_left = 0, rule.hysteresis

    def after(self, overflow: bool) -> None:
        rule = self.rule
        if overflow:
            self.clean, self.overflows_left = 0, self.overflows_left - 1
            if self.overflows_left <= 0:
                self.scale = max(self.floor, self.scale * rule.backoff_factor)
        else:
            self.clean, self.overflows_left = self.clean + 1, rule.hysteresis
            if self.clean >= rule.growth_interval:
                self.scale, self.clean = min(max(self.ceiling, self.scale), self.scale * rule.growth_factor), 0


# For tests on several processes, mostly two: the test file runs itself as a script on each.


def results_of_ranks(script: str, folder: Path, count: int = 2) -> list[Any]:
    """Run ``script``, which calls `as_one_of_two_ranks`, in ``count`` processes; return the result of each."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    files = [folder / f"rank{rank}.pt" for rank in range(count)]
    for _ in range(2):  # gloo may abort once a process is done: its file counts, and one retry is allowed
        (folder / "rendezvous").unlink(missing_ok=True)
        ranks = subprocess.Popen(
            [sys.executable, script, str(folder), str(count)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output = ranks.communicate(timeout=300)[0].decode()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(ranks.pid, signal.SIGKILL)
        if all(file.exists() for file in files):
            return [torch.load(file, weights_only=True) for file in files]
    pytest.fail(output)


def as_one_of_two_ranks(work: Callable[[int], Any]) -> None:
    """In the process of `results_of_ranks`: hand ``work(rank)`` of each rank back, and end.

    The ranks are forks of it, since torch and what optimizers, DDP and FSDP2 import takes seconds of work to load.
    """
    import torch._dynamo
    import torch.distributed.fsdp  # noqa: F401

    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    ranks = set()
    for rank in range(count):
        ranks.add(pid := os.fork())
        if pid == 0:
            try:
                _be_rank(work, rank, count, folder)
            except BaseException:
                traceback.print_exc()
            finally:  # not to what a fork must not do a second time
                sys.stdout.flush()
                os._exit(1)
    while ranks:
        ended, status = os.wait()
        ranks.discard(ended)
        if status != 0:  # the others would wait for it; all have handed back what they found before one may end
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _be_rank(work: Callable[[int], Any], rank: int, count: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=count)
    torch.save(work(rank), folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


def whole(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Plain copies of tensors, gathered where they are sharded."""
    return {k: getattr(v, "full_tensor", lambda v=v: v)().detach().clone() for k, v in values.items()}


def assert_moved_alike(found: dict, expected: dict, start: dict, tolerance: float) -> None:
    """Assert that weights have come from ``start`` to where the expected ones are, within ``tolerance`` of their way."""
    one, other = (torch.cat([(v[n].double() - start[n].double()).flatten() for n in start]) for v in (found, expected))
    assert other.norm() > 0 and (one - other).norm() <= tolerance * other.norm(), (one - other).norm() / other.norm()


class Operators(TorchDispatchMode):
    """The names of the operators that run inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class ResNet(nn.Sequential):
    """For 8 images of 8 x 8: statistics over hundreds of numbers, since over two, gradients would hang on a rounding."""

    def __init__(self, width=8):
        stem = nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()
        head = nn.AvgPool2d(8), nn.Flatten(), nn.Linear(width, 4)
        super().__init__(*stem, Residual(width), Residual(width), *head)

    def forward(self, x):
        return super().forward(x)


class GatedBlock(nn.Module):
    """A norm, layers, and a buffer that meets lower precision. The gate has one element: of several processes one holds it."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gate = nn.Parameter(torch.ones(1))
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, x):
        return x + self.gate * self.scale * self.down(torch.tanh(self.up(self.norm(x))))


class GatedNet(nn.Module):
    """Two blocks, for FSDP2 to shard, between a layer for 6 numbers and a head of 3."""

    def __init__(self, width=7, batch_norm=False):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, width)
        self.blocks = nn.ModuleList(GatedBlock(width) for _ in range(2))
        self.norm, self.head = (nn.BatchNorm1d if batch_norm else nn.LayerNorm)(width), nn.Linear(width, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class RowClassifier(nn.Module):
    """A bit of everything that `initialize` treats in its own way; in training, forward writes to one of the buffers."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 6), nn.LayerNorm(6)
        self.batch_norm, self.rnn = nn.BatchNorm1d(6), nn.LSTM(6, 5, batch_first=True)
        self.frozen, self.last = nn.Linear(5, 5).requires_grad_(False), nn.Linear(5, 2)
        self.register_buffer("offset", torch.full((2,), 0.1))
        self.register_buffer("average", torch.zeros(2))

    def forward(self, x):
        hidden = self.batch_norm(self.norm(self.first(x))).unsqueeze(1)
        y = self.last(self.frozen(self.rnn(hidden)[0][:, -1])) + self.offset
        if self.training:
            self.average.mul_(0.5).add_(y.detach().mean(0), alpha=0.5)
        return y


ROWS = torch.linspace(-1, 1, 12).reshape(3, 4)


def classify_rows(model, optimizer, times=1, run=iterate):
    return run(lambda: F.cross_entropy(model(ROWS).float(), torch.tensor([0, 1, 0])), optimizer, times)


def trained_params(model):
    return [param for param in model.parameters() if param.requires_grad]


def outputs_after_close(forward, recompile, *inputs):
    """Outputs of code that was compiled in a session. torch refuses it from 2.13 on if only torch's own is left: compiled again."""
    try:
        return forward(*inputs)
    except RuntimeError as refused:
        assert "found no compiled frames" in str(refused) and TorchVersion(torch.__version__) >= "2.13"
        return recompile()(*inputs)
