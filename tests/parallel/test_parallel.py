"""Synchronised batch norm on the CPU, judged by float64 batch norm over the joined batch."""

import pytest
import torch
from helpers import as_one_of_two_ranks
from torch import nn

from ampkit.parallel import SyncBatchNorm, convert_syncbn_model

# name: (local batch sizes, shape after the channels, input dtype, settings of the layer, tolerance)
CASES = {
    "images": ((3, 3), (5, 4), torch.float32, {}, 1e-5),
    "unequal_batches": ((5, 2), (3, 3), torch.float32, {}, 1e-5),
    "an_empty_batch": ((4, 0), (3,), torch.float32, {}, 1e-5),
    "one_sample_each": ((1, 1), (), torch.float32, {}, 1e-4),  # two values: the gradient nearly cancels
    "cumulative_average": ((3, 4), (2, 2), torch.float32, {"momentum": None}, 1e-5),
    "not_affine": ((3, 4), (2, 2), torch.float32, {"affine": False}, 1e-5),
    "no_running_stats": ((3, 4), (2, 2), torch.float32, {"track_running_stats": False}, 1e-5),
    "bfloat16": ((3, 4), (4, 4), torch.bfloat16, {}, 2e-2),
    "float16": ((3, 4), (4, 4), torch.float16, {}, 2e-3),
    "float64": ((3, 4), (4, 4), torch.float64, {"dtype": torch.float64}, 1e-12),
}
CHANNELS, STEPS, OFFSET = 3, 2, 30.0  # a mean far from 0 shows cancellation


def batches(case: str) -> list[list[torch.Tensor]]:
    """For each step, each rank's local batch: the same on every process."""
    sizes, spatial, dtype, _, _ = CASES[case]
    generator = torch.Generator().manual_seed(1)
    return [
        [(torch.randn(n, CHANNELS, *spatial, generator=generator) * 2 + OFFSET).to(dtype) for n in sizes]
        for _ in range(STEPS)
    ]


def layer(settings: dict, cls: type = SyncBatchNorm) -> nn.Module:
    norm = cls(CHANNELS, **settings)
    if norm.affine:
        with torch.no_grad():
            norm.weight.copy_(torch.tensor([0.5, 1.0, 2.0]))
            norm.bias.copy_(torch.tensor([-1.0, 0.0, 3.0]))
    return norm


def run_steps(norm: nn.Module, inputs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Train on each input with a loss that weighs every element differently, then evaluate the last one."""
    results = {}
    for step, x in enumerate(inputs):
        x = x.clone().requires_grad_()
        output = norm(x)
        norm.zero_grad()
        (output.double() * x.detach().double().cos()).sum().backward()
        results |= {f"output{step}": output.detach(), f"grad_input{step}": x.grad}
        results |= {f"grad_{name}{step}": p.grad.clone() for name, p in norm.named_parameters()}
    results |= {name: buffer.clone() for name, buffer in norm.named_buffers()}
    if norm.track_running_stats:  # without them, eval mode means the local batch alone
        results["evaluated"] = norm.eval()(inputs[-1]).detach()
    return results


def work(rank: int) -> dict:
    results = {
        case: run_steps(layer(settings), [step[rank] for step in batches(case)])
        for case, (_, _, _, settings, _) in CASES.items()
    }
    try:
        SyncBatchNorm(CHANNELS)(torch.ones(1 - rank, CHANNELS))
    except ValueError as error:
        results["too_small"] = str(error)

    model = convert_syncbn_model(convolution())  # DDP refuses torch's own class here
    parallel = nn.parallel.DistributedDataParallel(model)
    loss_of(parallel, images()[rank]).backward()
    results["ddp"] = model[0].weight.grad
    return results


def convolution() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, CHANNELS, 3), nn.BatchNorm2d(CHANNELS))


def images() -> list[torch.Tensor]:
    """Two images of each rank, of different size."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(2, 1, 5, 5, generator=generator) * (1 + rank) for rank in range(2)]


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).relu().square().mean()


@pytest.mark.parametrize("case", CASES)
def test_syncbn_equals_float64_batch_norm_over_the_joined_batch(ranks, case):
    sizes, _, dtype, settings, tolerance = CASES[case]
    joined = [torch.cat(step).double() for step in batches(case)]
    plain = nn.BatchNorm2d if joined[0].dim() == 4 else nn.BatchNorm1d
    expected = run_steps(layer(settings | {"dtype": torch.float64}, plain).double(), joined)

    for name, value in expected.items():
        parts = [rank[case][name] for rank in ranks]
        if name.startswith(("output", "grad_input", "evaluated")):
            assert all(part.dtype == dtype for part in parts)
            assert [len(part) for part in parts] == list(sizes)
            actual = torch.cat(parts)
        elif name.startswith("grad_"):
            actual = parts[0] + parts[1]  # each rank holds its own samples' share, which DDP then averages
        else:
            assert torch.equal(parts[0], parts[1])
            actual = parts[0]
        scale = value.double().abs().max().clamp(min=1.0)
        assert (actual.double() - value.double()).abs().max() <= tolerance * scale, name


def test_syncbn_when_the_joined_batch_has_one_value_says_so(ranks):
    for rank in ranks:
        assert "1 value per channel over all processes" in rank["too_small"]


def test_converted_model_in_ddp_on_the_cpu_has_the_gradients_of_the_joined_batch(ranks):
    exact = convolution().double()
    loss_of(exact, torch.cat(images()).double()).backward()
    for rank in ranks:
        torch.testing.assert_close(rank["ddp"].double(), exact[0].weight.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("settings", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}])
def test_syncbn_with_one_process_is_batch_norm(settings):
    inputs = [torch.randn(4, CHANNELS, 5, 5) for _ in range(STEPS)]
    ours, plain = run_steps(layer(settings), inputs), run_steps(layer(settings, nn.BatchNorm2d), inputs)
    assert ours.keys() == plain.keys()
    for name in plain:
        assert torch.equal(ours[name], plain[name]), name


def test_convert_shares_tensors_and_leaves_other_norms():
    norm = layer({"momentum": 0.3, "eps": 1e-3}, nn.BatchNorm2d).eval()
    model = nn.Sequential(norm, nn.Sequential(nn.InstanceNorm2d(CHANNELS, affine=True), norm), nn.LayerNorm(4))
    before = dict(model.named_parameters()) | dict(model.named_buffers())
    other_norms = model[1][0], model[2]
    assert convert_syncbn_model(model) is model and (model[1][0], model[2]) == other_norms
    assert isinstance(model[0], SyncBatchNorm) and model[0] is model[1][1]
    assert (model[0].momentum, model[0].eps, model[0].training) == (0.3, 1e-3, False)
    after = dict(model.named_parameters()) | dict(model.named_buffers())
    assert before.keys() == after.keys()
    assert all(after[name] is before[name] for name in before)


def test_convert_a_lone_batch_norm_returns_its_twin():
    norm = nn.BatchNorm1d(CHANNELS)
    assert convert_syncbn_model(norm).weight is norm.weight


def test_convert_a_lazy_batch_norm_says_what_to_do():
    with pytest.raises(ValueError, match="Pass one batch through the model first"):
        convert_syncbn_model(nn.Sequential(nn.LazyBatchNorm2d()))


def test_convert_of_what_is_no_model_says_what_was_found():
    with pytest.raises(TypeError, match=r"expects a model .torch.nn.Module., found a SGD"):
        convert_syncbn_model(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))


@pytest.mark.cuda
def test_convert_on_cuda_gives_torchs_class():
    assert type(convert_syncbn_model(nn.BatchNorm2d(CHANNELS).cuda())) is nn.SyncBatchNorm


if __name__ == "__main__":
    as_one_of_two_ranks(work)
