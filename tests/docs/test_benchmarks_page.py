"""docs/benchmarks.md and its drawings are what the newest results make."""

import importlib.util
import json
import re
from html import unescape

import pytest
from helpers import ROOT

DOCS = ROOT / "docs"
spec = importlib.util.spec_from_file_location("make_benchmarks", DOCS / "make_benchmarks.py")
make = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make)


@pytest.fixture(scope="module")
def results():
    return json.loads(make.newest().read_text())


def test_the_page_is_made_of_the_newest_results(results):
    assert (DOCS / "benchmarks.md").read_text() == make.page(results, make.newest().name), "run docs/make_benchmarks.py"
    assert make.newest().with_suffix(".md").read_text() == make.details(results), "run docs/make_benchmarks.py"


def test_the_readme_and_the_questions_have_the_spans_of_the_page(results):
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"A step at O5 takes {make.span(results, 'O5', 'O5, fused')} times as long as torch.autocast's" in readme
    cells = {make.title(cell): cell for cell in results["cells"]}
    faster = {name: f"{make.speed_up(cells[name], 'O5'):.2f}" for name in ("GPT", "ResNet-18")}
    assert (
        f"GPT trains {faster['GPT']} times as fast as in float32 at O5, ResNet-18 {faster['ResNet-18']} times" in readme
    )
    at_o5, at_o1 = (make.span(results, level, f"{level}, fused") for level in ("O5", "O1"))
    questions = (DOCS / "faq.md").read_text()
    assert f"O5 takes {at_o5} times as long as torch.autocast, O1 {at_o1} times" in questions


def test_the_drawings_show_the_newest_results(results):
    for name, (_, numbers) in make.drawings(results).items():
        (description,) = re.findall(r"<dc:description>(.*?)</dc:description>", (DOCS / name).read_text(), re.DOTALL)
        assert json.loads(unescape(description)) == numbers, f"run docs/make_benchmarks.py for {name}"


def cell(**seconds):
    its = {
        "loss": 1.0,
        "saved_bytes": 2_500_000,
        "host_reads": 0,
        "peak_bytes": 3 * 2**20,
        "phases": {"forward": 0.001, "backward": 0.002, "step": 0.003},
    }
    return {
        **dict(model="gpt", name="GPT", accumulate=4, compiled=False, about="small", optimizer="adam", warm_up=10),
        "parameters": 1_250_000,
        "ways": {way: {**its, "seconds": values} for way, values in seconds.items()},
    }


def test_ratios_are_of_turns_of_the_same_round():
    # The second round was disturbed, and both ways alike: a ratio of medians or of sums would be another one.
    measured = cell(float32=[0.4, 4.0, 0.4], autocast=[0.2, 2.0, 0.3], O1=[0.1, 1.0, 0.3])
    assert make.ratios(measured, "O1", "autocast") == pytest.approx([0.5, 0.5, 0.75])
    assert make.speed_up(measured, "autocast") == pytest.approx(2.0)
    assert "| O1 | 300.00 | 0.50 (0.50-0.75) | 1.00 | 2.00 | 3.00 | 3 | 2.5 | 0 | 1.0000 |" in make.section(measured)
    assert make.section(measured).startswith(
        "## GPT, 4 micro-batches\n\nSmall; 1.2 M parameters, Adam, 3 rounds; the loss is that of"
    )


def test_a_short_run_is_called_one(results):
    assert ("Not a measurement" in make.page({**results, "short": True}, "x.json")) and (
        "Not a measurement" not in make.page({**results, "short": False}, "x.json")
    )
