"""What `ampkit.recording` says of parameters, loss scale and memory, beside float64 and sums on paper; and its advice."""

import inspect
import itertools
import json
import pickle
from dataclasses import replace
from math import isnan, nan

import pytest
import torch
from helpers import initialize_quietly
from torch import nn
from torch.nn import functional as F

import ampkit
from ampkit.insight.record.data import TensorRow
from ampkit.insight.record.record import Record

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def recorded(iteration, times=1):
    with ampkit.recording() as record:
        for _ in range(times):
            iteration()
    return record


def scaled_backward(loss, optimizer):
    with ampkit.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()


# Parameters


class Products(nn.Module):
    """A loss whose gradients are ``factors``, and a matrix product beside it that says what the lower precision is."""

    def __init__(self, factors):
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.ones(len(factors))), nn.Linear(8, 8)
        self.factors = torch.tensor(factors)

    def forward(self):
        return (self.weight * self.factors).sum() + 0 * self.layer(torch.ones(8)).float().sum()


def test_underflow_and_the_largest_values_at_a_loss_scale_of_four():
    # In float16 2^-24 is the smallest number: four times these are 2^-13, 2^-20, 2^-24, 2^-26.
    model = Products([2.0**-15, 2.0**-22, 2.0**-26, 2.0**-28, 0.0])
    settings = {"patch_torch_functions_type": FP16, "loss_scale": 4.0}
    model, optimizer = initialize_quietly(model, lambda params: torch.optim.SGD(params, 0.125), "O1", **settings)
    with torch.no_grad():
        model.weight[0] = -3.0

    def iteration():
        optimizer.zero_grad()
        scaled_backward(model(), optimizer)
        optimizer.step()

    row = recorded(iteration, times=2).tensors["weight"]
    assert row.underflow == 1 / 4
    assert row.absmax == 3.0 + 0.125 * 2 * 2.0**-15 and row.grad_absmax == 2.0**-15
    assert (row.elements, row.dtype) == (5, FP32)


def lost_by_hand(before, after, gradient, dtype):
    """Updates that weights of a dtype, without float32 values, would have lost; in float64."""
    rounded = before.to(dtype).double()
    stays = (rounded + (after.double() - before.double())).to(dtype).double() == rounded
    return (stays & (gradient != 0)).sum().item() / max(1, (gradient != 0).sum().item())


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_lost_updates_agree_with_float64(level):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8))
    setting = {"O1": "patch_torch_functions_type", "O2": "cast_model_type"}.get(level)
    settings = {setting: BF16} if setting else {}
    model, optimizer = initialize_quietly(model, lambda params: torch.optim.AdamW(params, 1e-4), level, **settings)
    x = torch.randn(4, 16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = {}

    def iteration():
        scaled_backward(model(x).float().square().mean(), optimizer)
        gradients.update((name, param.grad.clone()) for name, param in model.named_parameters())
        optimizer.step()

    record = recorded(iteration)
    after = model.state_dict()
    for name, row in record.tensors.items():
        wanted = lost_by_hand(before[name], after[name], gradients[name], BF16)
        assert row.lost_without_masters == pytest.approx(wanted, abs=1e-6), name
        stays = (after[name] == before[name]) & (gradients[name] != 0)
        assert row.lost_updates == pytest.approx(stays.double().mean().item(), abs=1e-6), name
    assert record.tensors["1.weight"].lost_without_masters == 1.0  # 1 + 1e-4 is 1 in bfloat16
    assert record.tensors["1.weight"].lost_updates == 0.0


@pytest.mark.parametrize(("lr", "lost"), [(1e-5, 1.0), (1.0, 0.0)])
def test_weights_in_bfloat16_that_do_not_move_are_found_and_advised_about(lr, lost):
    norm = nn.LayerNorm(64, dtype=BF16)
    optimizer = torch.optim.SGD(norm.named_parameters(), lr)

    def iteration():
        norm(torch.randn(4, 64, dtype=BF16)).float().square().mean().backward()
        optimizer.step()

    record = recorded(iteration)
    assert record.tensors["weight"].lost_updates == lost
    found = [(one.found.partition(": ")[0], '"O5"' in one.change) for one in record.advice if "updates" in one.found]
    assert found == [("100% of the updates of 'weight' (bfloat16) are lost", True)] * (lost > 0)


def test_a_share_of_a_large_tensor_is_of_a_sample():
    half = torch.cat([torch.ones(100_000), torch.zeros(100_000)])[torch.randperm(200_000)].to(BF16)
    weight = nn.Parameter(half)
    optimizer = torch.optim.SGD([weight], 2.0**-12)

    def iteration():
        weight.grad = torch.ones_like(weight)
        optimizer.step()

    (row,) = recorded(iteration).tensors.values()
    assert row.lost_updates == pytest.approx(
        0.5, abs=0.04
    )  # five standard errors: 1 - 2^-12 is 1 in bfloat16, 0 - 2^-12 is not 0


@pytest.mark.parametrize(
    "level, weight, master, gradient, casts", [("O1", 4, 0, 4, 2), ("O2", 2, 2, 2, 0), ("O5", 4, 0, 4, 2)]
)
def test_bytes_of_a_weight(level, weight, master, gradient, casts):
    setting = {"O1": "patch_torch_functions_type", "O2": "cast_model_type"}.get(level)
    model, optimizer = initialize_quietly(
        nn.Linear(16, 8), lambda params: torch.optim.AdamW(params, 1e-4), level, **({setting: BF16} if setting else {})
    )

    def iteration():
        optimizer.zero_grad()
        scaled_backward(model(torch.randn(4, 16)).float().square().mean(), optimizer)
        optimizer.step()

    iteration()
    found = recorded(iteration).tensors["weight"].bytes
    each = {"weight": weight, "gradient": gradient, "master": master, "moments": 8, "casts": casts}
    moments = found.pop("moments")
    assert 0 <= moments - 8 * 16 * 8 <= 4  # and the count of steps
    assert found == {name: size * 16 * 8 for name, size in each.items() if name != "moments"}


def test_what_an_optimizer_holds_outside_of_modules_is_a_weight_too():
    weight = nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.SGD([weight], 0.1)

    def iteration():
        (weight * 2).sum().backward()
        optimizer.step()

    assert recorded(iteration).memory["weights and buffers"] == 4000


# Loss scale


def test_steps_have_their_scale_and_what_skipped_them():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model, optimizer = initialize_quietly(
        model, lambda params: torch.optim.SGD(params, 0.1), "O1", patch_torch_functions_type=BF16
    )
    batches = iter([1.0, float("inf"), 1.0])

    def iteration():
        optimizer.zero_grad()
        loss = (model(torch.ones(2, 4)).float() * next(batches)).sum()
        scaled_backward(loss, optimizer)
        optimizer.step()

    steps = recorded(iteration, times=3).scale
    assert [(step.iteration, step.loss_scale, step.skipped) for step in steps] == [
        (1, 65536.0, False),
        (2, 65536.0, True),
        (3, 32768.0, False),
    ]
    assert [step.nonfinite for step in steps] == [None, "0.weight", None]


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_of_torch_is_seen(fused):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    batches = iter([1.0, float("inf"), 1.0])

    def iteration():
        optimizer.zero_grad()
        with torch.autocast("cpu", BF16):
            y = model(torch.ones(2, 4))
        scaler.scale((y.float() * next(batches)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    record = recorded(iteration, times=3)
    assert [(step.loss_scale, step.skipped, step.nonfinite) for step in record.scale] == [
        (1024.0, False, None),
        (1024.0, True, "weight"),
        (512.0, False, None),
    ]
    assert record.tensors["weight"].grad_absmax == 2.0 and record.iterations == 3


# Memory


def test_memory_at_the_peak_is_counted_by_kind():
    model = nn.Linear(1000, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.ones(10, 1000)

    def iteration():
        y = x * 2
        z = y + 1
        del y
        model(z)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        weight.grad = None

    (weight,) = model.parameters()
    iteration()
    # While z is made of y.
    wanted = {"activations and temporaries": 2 * 40_000, "inputs and others": 40_000, "weights and buffers": 4_000}
    record = recorded(iteration)
    assert record.memory == wanted and record.peak_bytes == 124_000
    assert recorded(lambda: x + 1).memory == {"activations and temporaries": 40_000, "inputs and others": 40_000}


# Advice


def a_region():
    model, _ = initialize_quietly(
        nn.Linear(64, 64), lambda params: torch.optim.SGD(params, 0.1), "O1", patch_torch_functions_type=BF16
    )

    def iteration():
        x = model(torch.randn(8, 64)).float()
        with torch.autocast("cpu", enabled=False):
            model(x)  # here

    return iteration


def a_vocabulary():
    weight = nn.Parameter(torch.randn(1001, 1000))

    def iteration():
        with torch.autocast("cpu", BF16):
            F.linear(torch.randn(8, 1000), weight)  # here

    return iteration


def all_in_float32():
    x = torch.randn(64, 64)
    return lambda: x @ x


def ping_pong():
    model, _ = initialize_quietly(
        nn.Linear(64, 64), lambda params: torch.optim.SGD(params, 0.1), "O1", patch_torch_functions_type=BF16
    )

    def iteration():
        x = model(torch.randn(64, 64))
        x = F.softplus(x)  # here
        model(x)

    return iteration


# case: what is found, and what to change
ADVICE = {
    a_region: ("linear computes in float32 (50% of FLOPs): region at", "end the region before it, or leave it out"),
    a_vocabulary: ("linear (100% of FLOPs): N = 1001 is no multiple of 8", "pad it to 1008"),
    ping_pong: (
        "activations go bfloat16 -> float32 -> bfloat16 around softplus (24.6 kB an iteration)",  # 64 x 64 x (4 + 2) bytes
        'policy={"torch.nn.functional.softplus": "native"}, if bfloat16 does for it',
    ),
    all_in_float32: (
        "every matrix product computes in float32",
        'model, optimizer = ampkit.initialize(model, optimizer, opt_level="O1")',
    ),
}


@pytest.mark.parametrize("case", ADVICE, ids=lambda case: case.__name__)
def test_advice_names_line_figure_and_change(case):
    found, change = ADVICE[case]
    record = recorded(case())
    advice = record.advice
    lines, first = inspect.getsourcelines(case)
    here = [first + i for i, line in enumerate(lines) if line.endswith("# here\n")]
    (one,) = [one for one in advice if one.found.startswith(found)]
    assert one.change == change
    assert one.site == (f"test_recording_tensors.py:{here[0]}" if here else "")
    assert [one.gain for one in advice] == sorted((one.gain for one in advice), reverse=True)
    words = " ".join(str(record).split())
    assert all(part in words for part in (one.site, one.found, one.change))


# Out


def test_json_has_all_rows_in_plain_words(tmp_path):
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def iteration():
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()

    record = recorded(iteration)
    record.to_json(tmp_path / "record.json")
    found = json.loads((tmp_path / "record.json").read_text())
    assert found["iterations"] == 1 and found["tensors"]["weight"]["dtype"] == "float32"
    linear = next(row for row in found["calls"] if row["function"] == "linear" and row["phase"] == "forward")
    assert linear["dtypes_in"] == ["float32"] and linear["flops"] == 2 * 4 * 8 * 8
    assert linear["reason"] == "float32: as given" and linear["site"].startswith("test_recording_tensors.py:")


def test_records_of_several_processes_become_one():
    x = torch.randn(4, 8)

    def iteration():
        x @ x.t()

    first = recorded(iteration)
    second = pickle.loads(pickle.dumps(recorded(iteration)))
    both = first.merge([second])
    assert both.ranks == 2 and len(both.calls) == 1
    assert both.flops == 2 * first.flops and both.calls[0].calls == 2
    assert both.seconds == pytest.approx(first.seconds + second.seconds)
    assert first.calls[0].calls == 1  # and these are as they were


def of_a_rank(absmax, grad_absmax, underflow, lost, **memory):
    row = TensorRow("weight", 4, FP32, absmax, grad_absmax, underflow, lost, None, {"weight": 16}, 1.0)
    return Record(tensors={"weight": row}, memory=memory)


def test_tensors_of_several_processes_become_one():
    first = of_a_rank(2.0, 0.5, 0.25, 0.5, moments=100, gradients=20)
    second = of_a_rank(3.0, nan, None, 1.0, moments=90, gradients=50)
    second.tensors["expert"] = replace(second.tensors["weight"], name="expert")
    ruined = of_a_rank(nan, 4.0, 0.75, 0.0)
    for ranks in itertools.permutations([first, second, ruined]):
        both = ranks[0].merge(ranks[1:])
        row = both.tensors["weight"]
        assert isnan(row.absmax) and row.grad_absmax == 4.0 and both.ranks == 3
        # Means of those that measured them: of 1/4 and 3/4, of 1/2, 1 and 0, and of none.
        assert (row.underflow, row.lost_updates, row.lost_without_masters) == (0.5, 0.5, None)
        assert (row.elements, row.bytes, row.casts) == (4, {"weight": 16}, 1.0)
        assert both.memory == {"moments": 90, "gradients": 50}  # 140 bytes, the most of any
        assert isnan(both.tensors["expert"].grad_absmax) and both.tensors["expert"].absmax == 3.0
    assert first.merge([second]).tensors["weight"].absmax == 3.0


class Slow(nn.Module):
    """What keeps a product out of lower precision: a scale that the script makes float32."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(64, 60), nn.Linear(60, 64), nn.Parameter(torch.ones(60))

    def forward(self, x):
        h = self.up(x)
        h = h * self.scale.float()  # the cause
        return torch.einsum("bi,oi->bo", h, self.down.weight.to(h.dtype))


@pytest.mark.parametrize("way", ["float16", "bfloat16", "autocast"])
def test_a_culprit_for_slow_is_named_in_scripts_without_ampkit(way):
    dtype = torch.float16 if way == "float16" else BF16
    model = Slow() if way == "autocast" else Slow().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def iteration():
        optimizer.zero_grad()
        if way == "autocast":
            with torch.autocast("cpu", BF16):
                y = model(torch.randn(16, 64))
                with torch.autocast("cpu", enabled=False):  # the cause
                    y = y.float() @ torch.ones(64, 64)
        else:
            y = model(torch.randn(16, 64).to(dtype)).float()
        y.square().mean().backward()
        optimizer.step()

    found = [f"{one.site}: {one.found} -> {one.change}" for one in recorded(iteration).advice]
    words = "region at test_recording_tensors.py:" if way == "autocast" else "promoted at test_recording_tensors.py:"
    (culprit,) = [line for line in found if "computes in float32" in line]
    assert words in culprit and ("matmul" if way == "autocast" else "einsum") in culprit
    assert way == "autocast" or "by .float() at test_recording_tensors.py:" in culprit
    assert any("linear in 'up'" in line and "N = 60 is no multiple of 8 -> pad it to 64" in line for line in found)
