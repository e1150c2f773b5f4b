"""The loss scale on the device: an iteration that never asks the host, and a host that learns of it late and exactly."""

import math
import sys
import types
from contextlib import contextmanager, nullcontext

import pytest
import torch
from helpers import STORED_BF16, backward, everything, initialize_quietly, iterate, net_with_norm, random_batch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import ampkit
from ampkit.apex.optimizers import FusedAdagrad, FusedLAMB, FusedLARS, FusedNovoGrad
from ampkit.iteration import found_inf, optimizer_wrapper, running_statistics
from ampkit.iteration.loss_scale import HostCopy
from ampkit.optimizers import FusedAdam, FusedSGD

pytestmark = pytest.mark.switch

FUSED = {
    "FusedSGD": lambda p: FusedSGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "FusedAdam": lambda p: FusedAdam(p, lr=0.01, weight_decay=0.01),
    "FusedLAMB": lambda p: FusedLAMB(p, lr=0.01),
    "FusedNovoGrad": lambda p: FusedNovoGrad(p, lr=0.01),
    "FusedAdagrad": lambda p: FusedAdagrad(p, lr=0.01),
    "FusedLARS": lambda p: FusedLARS(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
}
READS = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "allclose")
# A tensor made of numbers on the host: on its way to a GPU it is copied from memory that is not pinned, which waits.
MADE_ON_HOST = ("lift_fresh", "lift")
# Functions that may read numbers, which have reached the host.
DOORS = ("is_known_clean", "read", "arrived")


@pytest.fixture
def host_copies(monkeypatch):
    """Control when numbers reach the host: whether copies have arrived, and what is known without waiting.

    On the CPU every copy arrives at once; with ``arrived`` set to False the CPU stands for a device that is far behind. ``read``
    lists the flags that the host waits for.
    """
    copies = types.SimpleNamespace(read=[], arrived=True)
    ready, known, is_set = HostCopy.ready, found_inf.is_known_clean, found_inf.is_set
    finite = running_statistics.is_known_finite
    monkeypatch.setattr(HostCopy, "ready", lambda copy: copies.arrived and ready(copy))
    monkeypatch.setattr(running_statistics, "is_known_finite", lambda those: copies.arrived and finite(those))
    for module in (found_inf, optimizer_wrapper):
        monkeypatch.setattr(module, "is_known_clean", lambda flag: copies.arrived and known(flag), raising=False)
        monkeypatch.setattr(module, "is_set", lambda flag: copies.read.append(flag) or is_set(flag), raising=False)
    return copies


class NoHostReads(TorchDispatchMode):
    """A mode that raises where an operation would make the host wait for values of a device, except in `DOORS`."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in READS and not _comes_from_doors():
            raise AssertionError(f"the host reads a tensor: {func}")
        if name in MADE_ON_HOST:
            raise AssertionError("a tensor is made of numbers on the host")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_reads(device, monkeypatch):
    """No operation reads, and no value leaves a tensor by another door, but for numbers that have reached the host."""
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__"):
            patch.setattr(torch.Tensor, name, _guarded(name, getattr(torch.Tensor, name)))
        original = HostCopy.read

        def read(copy, wait=False):
            assert not wait and copy.ready(), "the host waits for an iteration that has not ended"
            return original(copy)

        patch.setattr(HostCopy, "read", read)
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            with NoHostReads():
                yield
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")


def _guarded(name, original):
    def guarded(tensor, *args, **kwargs):
        assert _comes_from_doors(), f"Tensor.{name} was called"
        return original(tensor, *args, **kwargs)

    return guarded


def _comes_from_doors():
    """Whether one of `DOORS` is among the callers."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name not in DOORS:
        frame = frame.f_back
    return frame is not None


def batch(device="cpu"):
    return tuple(tensor.to(device) for tensor in random_batch())


def iteration(model, optimizer, x, y, factor=1.0, clip=None, micro_batches=1, delayed=False, clear=None):
    (clear or optimizer.zero_grad)()
    for index in range(micro_batches):
        last = index == micro_batches - 1
        backward(F.mse_loss(model(x).float(), y) * factor, optimizer, delay_unscale=delayed and not last)
    if clip is not None:
        ampkit.clip_grad_norm_(optimizer, clip)
    optimizer.step()


def float32_values(model):
    return [value.clone() for value in model.state_dict().values() if value.is_floating_point()]


def initialized_on(device, make, level="O2", **settings):
    return initialize_quietly(net_with_norm(hidden=16).to(device), make, level, **settings)


def test_the_guard_against_reads_can_fail(monkeypatch):
    for read in (
        *(lambda t: t.item(), lambda t: bool(t > 0), lambda t: t.tolist(), lambda t: torch.equal(t, t)),
        *(lambda t: torch.nonzero(t), lambda t: t.numpy(), lambda t: torch.add(t, t, alpha=t)),
        lambda t: torch.tensor(1.0).to(t),
    ):
        with pytest.raises(AssertionError), no_host_reads(torch.device("cpu"), monkeypatch):
            read(torch.ones(()))


@pytest.mark.parametrize(
    "name, level",
    [*((name, "O2") for name in FUSED), *(("FusedAdam", x) for x in ("O0", "O1", STORED_BF16, "O3", "O4", "O5"))],
)
def test_an_iteration_with_a_fused_optimizer_reads_nothing(name, level, device, monkeypatch):
    model, optimizer = initialized_on(device, FUSED[name], level)
    x, y = batch(device)
    iteration(model, optimizer, x, y, clip=1.0)
    with no_host_reads(device, monkeypatch):
        for _ in range(2):
            iteration(model, optimizer, x, y)
            iteration(model, optimizer, x, y, clip=1.0, clear=lambda: optimizer.zero_grad(set_to_none=False))
            iteration(model, optimizer, x, y, clip=1.0, micro_batches=3)
            iteration(model, optimizer, x, y, clip=1.0, micro_batches=3, delayed=True)


@pytest.mark.parametrize("name, loss_scale", [*((name, "dynamic") for name in FUSED), ("FusedAdam", 64.0)])
def test_an_overflow_is_skipped_without_a_read(name, loss_scale, device, monkeypatch, host_copies):
    model, optimizer = initialized_on(device, FUSED[name], "O2", loss_scale=loss_scale)
    x, y = batch(device)
    host_copies.arrived = False
    iteration(model, optimizer, x, y)
    before, values = everything(model, optimizer), float32_values(model)
    with no_host_reads(device, monkeypatch):
        for factor in (math.inf, math.nan, math.inf):
            iteration(model, optimizer, x, y, factor, clip=1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, everything(model, optimizer), strict=True))
    with no_host_reads(device, monkeypatch):
        iteration(model, optimizer, x, y)
    assert not any(torch.equal(a, b) for a, b in zip(values, model.state_dict().values()))
    scale = 2.0**13 if loss_scale == "dynamic" else 64.0
    assert ampkit.state_dict()["loss_scaler0"] == {"loss_scale": scale, "unskipped": 1}


@pytest.mark.parametrize(
    "make", [FUSED["FusedAdam"], lambda p: torch.optim.AdamW(p, fused=True)], ids=["ours", "torch"]
)
def test_running_statistics_go_back_without_a_read(make, device, monkeypatch, host_copies):
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.utils.parametrizations.spectral_norm(nn.Linear(8, 3)))
    model, optimizer = initialize_quietly(model.to(device), make, "O1")
    x, y = batch(device)
    host_copies.arrived = False
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)  # where it is true the host skips the steps of torch's itself
    iteration(model, optimizer, x, y)
    before = [value.clone() for value in (model[1].running_mean, model[1].running_var)]
    bad = x.clone()
    bad[1, 2] = math.inf
    with no_host_reads(device, monkeypatch):
        iteration(model, optimizer, bad, y, micro_batches=2)
    after = model[1].running_mean, model[1].running_var
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert int(model[1].num_batches_tracked) == 3
    with no_host_reads(device, monkeypatch):
        iteration(model, optimizer, x, y)
        iteration(model, optimizer, x, y, math.inf)  # whose forward is finite
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(buffer.isfinite().all() for buffer in model.buffers()) and int(model[1].num_batches_tracked) == 5


@pytest.mark.parametrize("name", [*FUSED, "with dampening"])
def test_first_step_skipped_leaves_no_trace(name):
    """A skipped first step must leave the state as if it had not been: compared with a run without the overflow."""
    make, results = FUSED.get(name, lambda p: FusedSGD(p, lr=0.1, momentum=0.9, dampening=0.5)), []
    for factors in ((math.inf, 1.0, 1.0), (1.0, 1.0)):
        # The scale is static: both runs round alike.
        model, optimizer = initialized_on("cpu", make, "O2", loss_scale=128.0)
        for factor in factors:
            iteration(model, optimizer, *batch(), factor, clip=5.0)
        results.append([p.detach().clone() for p in ampkit.master_params(optimizer)])
        ampkit.close()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_ordinary_optimizer_reads_once_at_its_step(level, host_copies):
    model, optimizer = initialized_on("cpu", lambda p: torch.optim.RMSprop(p, lr=0.01), level)
    host_copies.arrived = False  # where a flag is on the CPU, the end of the block knows it, and nothing is read
    x, y = batch()
    for count in range(1, 4):
        optimizer.zero_grad(set_to_none=count == 1)
        backward(F.mse_loss(model(x).float(), y), optimizer)
        assert len(host_copies.read) == count - 1
        optimizer.step()
        assert len(host_copies.read) == count


@pytest.mark.parametrize("fused", [False, True], ids=["one pass", "fused"])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("level", ["O1", "O2", STORED_BF16, "O4", "O5"])
def test_torchs_optimizers_are_not_read_either(make, level, fused, device, monkeypatch, host_copies):
    """On the CPU a skip is reported at once, without a wait, but by fused steps where tensors say that they are elsewhere."""
    model, optimizer = initialized_on(device, lambda p: make(p, lr=0.01, fused=fused), level)
    if fused:
        monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    x, y = batch(device)
    iteration(model, optimizer, x, y)
    before = float32_values(model)
    with no_host_reads(device, monkeypatch) if fused or device.type == "cuda" else nullcontext():
        iteration(model, optimizer, x, y, math.inf, clip=1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, float32_values(model)))
    with no_host_reads(device, monkeypatch):
        for clears in (optimizer, model):
            iteration(model, optimizer, x, y, clip=1.0, clear=lambda: clears.zero_grad(set_to_none=False))  # noqa: B023
    assert not any(torch.equal(a, b) for a, b in zip(before, float32_values(model)))
    assert host_copies.read == [] and not ampkit.step_was_skipped(optimizer)
    if fused and make is not torch.optim.SGD:
        assert {int(state["step"]) for state in optimizer.state.values()} == {3}


LINE = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to"


def initialized_aloud(capsys):
    model, optimizer = initialized_on("cpu", FUSED["FusedAdam"], verbosity=1)
    capsys.readouterr()
    return model, optimizer


def test_the_overflow_line_comes_late_and_with_its_own_numbers(capsys):
    model, optimizer = initialized_aloud(capsys)
    iteration(model, optimizer, *batch(), math.inf)
    assert capsys.readouterr().out == ""
    iteration(model, optimizer, *batch(), math.inf)
    assert capsys.readouterr().out == f"{LINE} 32768.0 (iteration 1: the loss is inf)\n"
    ampkit.state_dict()
    assert capsys.readouterr().out == f"{LINE} 16384.0 (iteration 2: the loss is inf)\n"
    iteration(model, optimizer, *batch(), math.inf)
    ampkit.close()
    assert capsys.readouterr().out == f"{LINE} 8192.0 (iteration 3: the loss is inf)\n"


def test_nothing_is_lost_when_the_device_is_far_behind(capsys, host_copies):
    model, optimizer = initialized_aloud(capsys)
    host_copies.arrived = False
    for factor in (math.inf, 1.0, math.inf, 1.0, 1.0):
        iteration(model, optimizer, *batch(), factor)
    assert capsys.readouterr().out == ""
    host_copies.arrived = True
    iteration(model, optimizer, *batch())
    assert capsys.readouterr().out == f"{LINE} 16384.0 (2 steps, iteration 3: the loss is inf)\n"
    assert ampkit.state_dict()["loss_scaler0"] == {"loss_scale": 16384.0, "unskipped": 3}


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="a torch for CPUs only has no fake tensors on CUDA")
def test_what_asks_the_host_while_a_graph_is_captured_is_told_what_to_do(monkeypatch):
    """CUDA's own error says only that the operation is not permitted. A fake tensor stands for one on CUDA."""
    with FakeTensorMode():
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        found = found_inf.FoundInf(torch.zeros((), device="cuda"))
        with pytest.raises(ampkit.ConfigurationError, match=r"captured.*fused=True"):
            _ = found.overflowed


CAPTURED = {
    "FusedAdam": FUSED["FusedAdam"],
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, capturable=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, capturable=True),
    "AdamW, rate in a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01, device="cuda"), capturable=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True, capturable=True),
}


def captured(run, optimizer):
    """Return a graph of ``run``, an iteration, after three of them on a stream of their own."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        run()
    return graph


@pytest.mark.cuda
@pytest.mark.parametrize("level", ["O2", STORED_BF16, "O5"])
@pytest.mark.parametrize("name", CAPTURED)
def test_an_iteration_can_be_captured_in_a_graph(name, level):
    """Each replay is an iteration, and skips if its gradients are not finite. Without a loss scale the step checks them itself."""
    x, y = batch("cuda")
    model, optimizer = initialized_on("cuda", CAPTURED[name], level)
    (scaler,) = ampkit.current_session().scalers
    twin, twin_optimizer = initialized_on("cuda", CAPTURED[name], level)
    factor = torch.ones((), device="cuda")
    graph = captured(lambda: iteration(model, optimizer, x, y, factor, clip=1.0), optimizer)
    for value in (1.0, math.inf, 1.0):
        factor.fill_(value)
        graph.replay()
    for value in (1.0, 1.0, 1.0, 1.0, math.inf, 1.0):
        iteration(twin, twin_optimizer, x, y, value, clip=1.0)
    for mine, theirs in zip(ampkit.master_params(optimizer), ampkit.master_params(twin_optimizer)):
        torch.testing.assert_close(mine, theirs)
    assert scaler.state_dict()["loss_scale"] == (32768.0 if level == "O2" else 1.0)
    assert {int(state["step"]) for state in optimizer.state_dict()["state"].values()} == {5}


@pytest.mark.cuda
@pytest.mark.parametrize(
    "level, settings",
    [("O2", {}), (STORED_BF16, {"check_gradients": True}), ("O5", {"check_gradients": True}), ("O1", {})],
)
@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.RMSprop(p, lr=0.01, foreach=False), lambda p: torch.optim.Adagrad(p, foreach=False)]
)
def test_a_step_that_the_host_decides_is_refused_while_a_graph_is_captured(make, level, settings):
    """A replay would be taken or skipped as the captured step was."""
    model, optimizer = initialized_on("cuda", make, level, **settings)
    x, y = batch("cuda")
    for _ in range(2):
        iteration(model, optimizer, x, y)
    with (
        pytest.raises(ampkit.ConfigurationError, match=r"CUDA graph is captured.*check_gradients=False"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        iteration(model, optimizer, x, y)


@pytest.mark.cuda
def test_unchecked_steps_are_captured_where_torchs_are():
    """SGD counts no steps. AdamW without ``capturable`` does, on the host, and torch itself refuses."""
    x, y = batch("cuda")
    make = {"SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01)}
    values, graph = [], torch.cuda.CUDAGraph()
    for captured in (True, False):
        model, optimizer = initialized_on("cuda", make["SGD"], "O5", check_gradients=False)
        for _ in range(2 if captured else 5):
            iteration(model, optimizer, x, y)
        if captured:
            optimizer.zero_grad()
            with torch.cuda.graph(graph):
                iteration(model, optimizer, x, y)
            for _ in range(3):
                graph.replay()
        values.append([value.clone() for value in ampkit.master_params(optimizer)])
        ampkit.close()
    torch.testing.assert_close(*values)
    model, optimizer = initialized_on("cuda", make["AdamW"], "O5", check_gradients=False)
    iteration(model, optimizer, x, y)
    with pytest.raises(RuntimeError, match="capturable is False"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        iteration(model, optimizer, x, y)


@pytest.mark.cuda
def test_running_statistics_go_back_in_a_captured_iteration():
    norm = nn.BatchNorm1d(6)
    model, optimizer = initialize_quietly(nn.Sequential(norm, nn.Linear(6, 3)).cuda(), FUSED["FusedAdam"], "O2")
    good, y = batch("cuda")
    x, weight = good.clone(), model[1].weight
    graph = captured(lambda: iteration(model, optimizer, x, y), optimizer)
    for value, count in ((1.0, 4), (math.inf, 5), (1.0, 6)):
        before = weight.clone(), norm.running_mean.clone(), norm.running_var.clone()
        x.copy_(good)
        x[0, 1] *= value
        graph.replay()
        assert int(norm.num_batches_tracked) == count
        is_same = [old == new for old, new in zip(before, (weight, norm.running_mean, norm.running_var), strict=True)]
        if value == math.inf:  # in one channel
            assert is_same[0].all() and all(same.tolist() == [index == 1 for index in range(6)] for same in is_same[1:])
        else:
            assert not any(same.any() for same in is_same[1:]) and not is_same[0].all()


@pytest.mark.cuda(count=2)
def test_an_overflow_on_one_device_skips_on_all():
    torch.manual_seed(0)
    first, second = nn.Linear(6, 8, device="cuda:0"), nn.Linear(8, 3, device="cuda:1")
    params = [*first.parameters(), *second.parameters()]
    optimizer = FusedAdam(params, lr=0.1)
    ampkit.initialize([first, second], optimizer, opt_level="O1", verbosity=0)
    before = [p.detach().clone() for p in params]
    for bad in (first, second):
        handle = bad.weight.register_hook(lambda gradient: gradient * math.inf)
        optimizer.zero_grad()
        backward(second(first(torch.ones(2, 6, device="cuda:0")).to("cuda:1")).sum(), optimizer)
        handle.remove()
        optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(before, params))
    assert ampkit.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**14


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_torchs_fused_sgd_begins_its_momentum_after_a_skipped_first_step(level):
    """A fused step that is told on the device to skip leaves momentum uninitialized: torch takes memory as it is."""
    held = [torch.full((64,), 1e30) for _ in range(50)]  # what that memory holds
    del held
    model = nn.Linear(64, 1, bias=False)
    start = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5, dampening=0.25, fused=True)
    ampkit.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    for factor in (math.inf, 1.0, 1.0):
        iterate(lambda factor=factor: model.weight.float().sum() * factor, optimizer)
    # The first momentum is the first gradient taken, 1; the second one 0.5 * 1 + 0.75 * 1.
    assert torch.equal(optimizer.state[model.weight]["momentum_buffer"], torch.full((1, 64), 1.25))
    assert torch.equal(model.weight.detach(), start - 0.5 - 0.5 * 1.25)
