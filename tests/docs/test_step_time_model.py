"""benchmarks/step_time_model.md shows the tables that the script prints, and they agree with arithmetic on paper."""

import sys

import pytest
from helpers import ROOT


@pytest.fixture(scope="module")
def model():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield __import__("step_time_model")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
        sys.modules.pop("step_time_model", None)


def test_page_shows_the_tables_that_the_script_prints(model):
    assert model.tables() in (ROOT / "benchmarks" / "step_time_model.md").read_text()


@pytest.mark.parametrize(
    "wrapper, milliseconds",
    [
        # One billion parameters on 4 GPUs, 300 ms of compute, 10 GB/s of 12.5. Three quarters leave each GPU.
        ("DDP, O1 and O5", 2 * 300 - 200),  # 4 GB: 300 ms each way
        ("DDP, O2", 2 * 150 - 200),
        ("FSDP2, O1", (300 - 100) + (600 - 200)),
        ("FSDP2, O2 and O5", (150 - 100) + (450 - 200)),
        ("FSDP2, O5, `reduce_dtype=torch.bfloat16`", (150 - 100) + (300 - 200)),
    ],
)
def test_what_is_waited_for_is_what_one_computes_on_paper(model, wrapper, milliseconds):
    work = model.Work("", 1e9, 0, 0.3)
    assert 1000 * model.waited(work, wrapper, 4, 12.5e9) == pytest.approx(milliseconds, rel=1e-9)
    assert model.waited(work, wrapper, 1, 12.5e9) == 0.0
    needed = model.speed_needed(work, wrapper)
    assert model.waited(work, wrapper, 10**9, needed) == 0.0 < model.waited(work, wrapper, 10**9, 0.99 * needed)


def test_parameters_are_those_of_the_models(model):
    torchvision = pytest.importorskip("torchvision")
    resnet = torchvision.models.resnet50()
    assert sum(p.numel() for p in resnet.parameters()) == model.RESNET_PARAMS
    norms = [m for m in resnet.modules() if "BatchNorm" in type(m).__name__]
    assert sum(p.numel() for m in norms for p in m.parameters()) == model.RESNET_NORMS
    assert model.GPT_PARAMS == pytest.approx(1.3e9, rel=0.02)
