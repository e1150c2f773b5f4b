"""Whole iterations on GPUs: which device, which stream, and who waits. Run on real ones, or on the simulated ones of README.md."""

import ctypes
import math
import os
import subprocess
import sys
import weakref

import pytest
import torch
from helpers import ROOT, backward, initialize_quietly, net_with_norm, others_slow, random_batch
from torch import nn
from torch.nn import functional as F

import ampkit
from ampkit import kernels
from ampkit.apex import multi_tensor_steps
from ampkit.apex.optimizers import FusedLAMB, FusedNovoGrad
from ampkit.optimizers import FusedAdam, FusedSGD

TWO = pytest.mark.cuda(count=2)
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-4),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-4, fused=True),
    "FusedSGD": lambda p: FusedSGD(p, lr=0.05, momentum=0.9),
    "FusedAdam": lambda p: FusedAdam(p, lr=0.01),
    "FusedLAMB": lambda p: FusedLAMB(p, lr=0.01),
    "FusedNovoGrad": lambda p: FusedNovoGrad(p, lr=0.01),
}
BUILT = ROOT / "build" / "simulated"


class Halves(nn.Module):
    """A model with its first half on one device and its second on another."""

    def __init__(self):
        super().__init__()
        net = net_with_norm(hidden=16)
        self.first, self.second = net[:2].to("cuda:0"), net[2:].to("cuda:1")

    def forward(self, x):
        return self.second(self.first(x.to("cuda:0")).to("cuda:1"))


def train(model, optimizer, iterations=5, overflow_at=2):
    """Train; return the last loss, and the weights in float32 on the host. With a loss scale one iteration overflows."""
    device = next(reversed(list(model.parameters()))).device
    for number in range(iterations):
        x, y = (tensor.to(device) for tensor in random_batch(seed=number))
        optimizer.zero_grad()
        loss = F.mse_loss(model(x).float(), y)
        scales = ampkit.current_session().plan.loss_scale != 1.0
        backward(loss * (math.inf if scales and number == overflow_at else 1.0), optimizer)
        if number == 1:
            ampkit.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
    return loss.item(), [param.detach().float().cpu() for param in model.parameters()]


# A model on another device than the current one, and one on two devices; the levels of `make test`, and the tolerances.
PLACES = {
    "another": (lambda: net_with_norm(hidden=16).to("cuda:1"), ("O1", "O2"), dict(rtol=1e-3, atol=1e-4)),
    "two": (Halves, ("O2",), dict(rtol=1e-2, atol=1e-3)),
}
PLACED = [
    pytest.param(place, level, marks=() if level in always else pytest.mark.slow)
    for place, (_, always, _) in PLACES.items()
    for level in ("O0", "O1", "O2", "O3", "O4", "O5")
]


@TWO
@pytest.mark.parametrize("place, level", PLACED)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_model_trains_on_another_device_than_the_current_one_and_on_two(name, place, level):
    make, _, tolerance = PLACES[place]
    torch.cuda.set_device(0)
    loss, weights = train(*initialize_quietly(net_with_norm(hidden=16).cuda(), OPTIMIZERS[name], level))
    scale = ampkit.state_dict()
    ampkit.close()
    loss_there, weights_there = train(*initialize_quietly(make(), OPTIMIZERS[name], level))
    assert loss_there == pytest.approx(loss, rel=1e-3)
    torch.testing.assert_close(weights_there, weights, **tolerance)
    assert ampkit.state_dict() == scale
    assert torch.cuda.current_device() == 0


@TWO
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_masters_gradients_and_loss_scale_follow_a_model_to_another_device(level):
    model, optimizer = initialize_quietly(net_with_norm(hidden=16).cuda(), OPTIMIZERS["FusedSGD"], level)
    train(model, optimizer, iterations=2)
    model.to("cuda:1")
    for state in optimizer.state.values():
        state.update({name: value.to("cuda:1") for name, value in state.items() if isinstance(value, torch.Tensor)})
    train(model, optimizer, iterations=2, overflow_at=1)
    assert {master.device for master in ampkit.master_params(optimizer)} == {torch.device("cuda:1")}
    expected = {"O1": 2.0**15, "O2": 2.0**15, "O5": 1.0}[level]
    assert ampkit.state_dict()["loss_scaler0"]["loss_scale"] == expected


@pytest.mark.cuda
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", ["FusedAdam", "AdamW fused", "SGD"])
def test_iterations_may_take_turns_on_two_streams(name, level):
    expected = train(*initialize_quietly(net_with_norm(hidden=16).cuda(), OPTIMIZERS[name], level), iterations=4)
    ampkit.close()
    model, optimizer = initialize_quietly(net_with_norm(hidden=16).cuda(), OPTIMIZERS[name], level)
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    for number in range(4):
        stream, other_stream = (main, side) if number % 2 else (side, main)
        x, y = (tensor.cuda() for tensor in random_batch(seed=number))
        stream.wait_stream(other_stream)
        with torch.cuda.stream(stream):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x).float(), y)
            backward(loss * (math.inf if number == 2 else 1.0), optimizer)
            if number == 1:
                ampkit.clip_grad_norm_(optimizer, 1.0)
        other_stream.wait_stream(stream)
        with torch.cuda.stream(other_stream):
            optimizer.step()
        main.wait_stream(side)
    weights = [param.detach().float().cpu() for param in model.parameters()]
    torch.testing.assert_close((loss.item(), weights), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["FusedAdam", "AdamW fused"])
@pytest.mark.parametrize("level", others_slow("O2", of=["O1", "O2"]))
def test_nothing_waits_for_the_device_between_backward_and_step(name, level):
    model, optimizer = initialize_quietly(net_with_norm(hidden=16).cuda(), OPTIMIZERS[name], level)
    train(model, optimizer)
    simulated = ctypes.CDLL(None)
    if not hasattr(simulated, "simulated_waits"):
        pytest.skip("a real device counts no waits; test_device_loss_scale.py has torch tell of them")
    x, y = (tensor.cuda() for tensor in random_batch())
    before = simulated.simulated_waits()
    for _ in range(4):
        optimizer.zero_grad()
        backward(F.mse_loss(model(x).float(), y), optimizer)
        ampkit.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
    assert simulated.simulated_waits() == before
    float(optimizer.param_groups[0]["params"][0].sum())
    assert simulated.simulated_waits() == before + 1  # it can count


@TWO
@pytest.mark.slow
def test_no_other_device_is_touched():
    # In a process of its own: once a device is in use, it stays so. `_cuda_hasPrimaryContext` is torch's question.
    script = (
        "import torch, ampkit; model = torch.nn.Linear(4, 4).to('cuda:1')\n"
        "model, optimizer = ampkit.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level='O2', verbosity=0)\n"
        "with ampkit.scale_loss(model(torch.ones(2, 4, device='cuda:1')).sum(), optimizer) as loss: loss.backward()\n"
        "optimizer.step(); ampkit.state_dict()\n"
        "print([torch._C._cuda_hasPrimaryContext(device) for device in range(2)])"
    )
    if "libruntime" in os.environ.get("LD_PRELOAD", ""):
        script = f"import simulated_cuda; {script}"
    path = os.pathsep.join(str(ROOT / part) for part in ("", "tests/simulated"))
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.stdout.split("\n")[0] == "[False, True]", done.stderr


@TWO
def test_kernels_run_on_the_device_and_the_stream_of_their_tensors():
    """The stream is one of cuda:1, and not its default stream, while cuda:0 is the current device."""
    stream = torch.cuda.Stream("cuda:1")
    before = torch.cuda.current_stream("cuda:1")
    torch.cuda.set_stream(stream)
    torch.cuda.set_device(0)
    try:
        x, y, m, v = (torch.full((70_000,), value, device="cuda:1") for value in (4.0, 1.0, 0.0, 0.0))
        kernels.multi_tensor_scale([x], [x], 0.5)
        kernels.multi_tensor_axpby([x], [y], [y], 1.0, 3.0)
        norm, _ = kernels.multi_tensor_l2norm([y])
        weight, rest = torch.empty_like(y, dtype=torch.bfloat16), torch.empty_like(y, dtype=torch.int16)
        kernels.multi_tensor_split([y], [weight], [rest])
        kernels.multi_tensor_join([weight], [rest], [x])
        rule = dict(lr=1.0, betas=(0.5, 0.5), eps=0.0, step=1.0)
        kernels.multi_tensor_adam([x], [y], [m], [v], decoupled=True, **rule)
        multi_tensor_steps.multi_tensor_lamb([x], [y], [m], [v], weight_decay=0.0, **rule)
        state = torch.tensor([0x41000000, 0, 1, 0, 0, 0, 0], dtype=torch.int32, device="cuda:1")  # a scale of 8
        kernels.update_scale(state, torch.ones(1, device="cuda:1"))
        assert torch.cuda.current_device() == 0
        assert norm.device == x.device and norm.item() == pytest.approx(5.0 * 70_000**0.5, rel=1e-6)
        assert bool((x == 5.0).all()) and state[0].item() == 0x40800000
        assert bool((m == 3.75).all()) and bool((v == 18.75).all())
        # 5 - 1, and as the ratio is |4| / |u|, 4 - 4.
        torch.testing.assert_close(y, torch.zeros_like(y), rtol=0, atol=1e-5)
    finally:
        torch.cuda.set_stream(before)
        torch.cuda.set_device(0)


@pytest.mark.cuda
def test_a_finding_is_not_read_before_it_has_arrived():
    model, optimizer = initialize_quietly(net_with_norm(hidden=16).cuda(), OPTIMIZERS["FusedAdam"], "O2")
    x, y = (tensor.cuda() for tensor in random_batch())
    scales = []
    for factor in (1.0, math.inf, 1.0, math.inf):
        optimizer.zero_grad()
        backward(F.mse_loss(model(x).float(), y) * factor, optimizer)
        optimizer.step()
        scales.append(ampkit.state_dict()["loss_scaler0"]["loss_scale"])
    assert scales == [2.0**16, 2.0**15, 2.0**15, 2.0**14]
    alive = weakref.ref(optimizer)
    del model, optimizer
    ampkit.close()
    assert alive() is None


@pytest.mark.cuda
@pytest.mark.parametrize(
    "name, level, missing",
    [
        ("AdamW fused", "O2", "the loss scale"),
        ("FusedAdam", "O5", "the optimizer's state"),
        ("FusedSGD", "O5", "the opt"),
    ],
)
def test_a_graph_is_not_captured_before_the_first_iteration(name, level, missing):
    """Every replay would begin with the loss scale and the moments of the first."""
    settings = {"check_gradients": False} if level == "O5" else {}  # a check counts skips where the loss scale is
    model, optimizer = initialize_quietly(net_with_norm(hidden=16).cuda(), OPTIMIZERS[name], level, **settings)
    x, y = (tensor.cuda() for tensor in random_batch())
    refused = pytest.raises(ampkit.ConfigurationError, match=rf"before the first iteration.*{missing}")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        backward(F.mse_loss(model(x).float(), y), optimizer)
        optimizer.step()


def are_built():
    made_for = BUILT / "torch.txt"
    return made_for.exists() and made_for.read_text() == torch.__version__


@pytest.mark.skipif(not are_built(), reason="make test builds them, where torch is for CUDA 13")
@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there are devices")
def test_on_simulated_devices():
    environment = {
        **os.environ,
        "LD_PRELOAD": str(BUILT / "libruntime.so"),
        "LD_LIBRARY_PATH": str(BUILT),
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "simulated"))),
    }
    options = "-q -p simulated_cuda -p no:cacheprovider".split()
    command = [sys.executable, "-m", "pytest", *options, "-m", "cuda and not slow", __file__]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout + done.stderr
