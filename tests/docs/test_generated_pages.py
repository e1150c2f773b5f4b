"""Pages and drawings that scripts make are what these scripts make of the newest results, and figures are arithmetic on paper."""

import importlib.util
import json
import re
from html import unescape

import pytest
from helpers import ROOT
from soak.__main__ import GROUPS

DOCS = ROOT / "docs"


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


benchmarks, compatibility, convergence, drawings, picture, reliability = (
    *(loaded(DOCS / f"make_{name}.py") for name in ("benchmarks", "compatibility", "convergence", "drawings")),
    *(loaded(DOCS / f"make_{name}.py") for name in ("picture", "reliability")),
)
step_time = loaded(ROOT / "benchmarks" / "step_time_model.py")
RESULTS, SOAK = (json.loads(path.read_text()) for path in (benchmarks.newest(), reliability.RESULTS))

#: The script, a file, and the text that it should have.
FILES = [
    ("make_benchmarks", DOCS / "benchmarks.md", benchmarks.page(RESULTS, benchmarks.newest().name)),
    ("make_benchmarks", benchmarks.newest().with_suffix(".md"), benchmarks.details(RESULTS)),
    *(
        ("make_" + module.__name__.partition("_")[2], module.PAGE, module.page(module.PAGE.read_text(), *results))
        for module, results in (
            (compatibility, [json.loads(compatibility.KEPT.read_text())]),
            (convergence, []),
        )
    ),
    ("make_reliability", reliability.PAGE, reliability.page(SOAK)),
    *(("make_drawings", DOCS / name, content) for name, content in drawings.files().items()),
]


@pytest.mark.parametrize("script, path, content", FILES, ids=[path.name for _, path, _ in FILES])
def test_a_file_is_what_its_script_makes(script, path, content):
    assert path.read_text() == content, f"run docs/{script}.py"


def numbers_in(name):
    """The numbers that a drawing was made of, which it holds."""
    (description,) = re.findall(r"<dc:description>(.*?)</dc:description>", (DOCS / name).read_text(), re.DOTALL)
    return json.loads(unescape(description))


def test_the_drawings_of_benchmarks_show_the_newest_results():
    for name, (_, numbers) in benchmarks.drawings(RESULTS).items():
        assert numbers_in(name) == numbers, f"run docs/make_benchmarks.py for {name}"


def test_the_page_shows_each_drawing_in_both_themes():
    page = (DOCS / "how-it-works.md").read_text()
    assert [name for name in drawings.files() if page.count(f'"{name}"') != 1] == []


# Benchmarks


def test_the_readme_and_the_questions_have_the_spans_of_the_page():
    readme = " ".join((ROOT / "README.md").read_text().split())
    at_o5, at_o1 = (benchmarks.span(RESULTS, level, f"{level}, fused") for level in ("O5", "O1"))
    assert f"A step at O5 takes {at_o5} times as long as torch.autocast's" in readme
    cells = {benchmarks.title(cell): cell for cell in RESULTS["cells"]}
    gpt, resnet = (f"{benchmarks.speed_up(cells[name], 'O5'):.2f}" for name in ("GPT", "ResNet-18"))
    assert f"GPT trains {gpt} times as fast as in float32 at O5, ResNet-18 {resnet} times" in readme
    questions = (DOCS / "faq.md").read_text()
    assert f"O5 takes {at_o5} times as long as torch.autocast, O1 {at_o1} times" in questions


# What ran where, convergence, reliability


def test_the_last_report_of_a_version_and_a_way_counts(tmp_path):
    kept = {"2.9.0": {"extension": {"passed": 1, "failed": 0, "date": "2025-01-01"}}}
    for day, counts in (("01", (9, 9, 0, 0)), ("02", (1234, 2, 1, 30))):
        names = zip(("tests", "failures", "errors", "skipped"), counts)
        suite = " ".join(f'{name}="{count}"' for name, count in names)
        report = f'<testsuites><testsuite name="pytest" {suite} timestamp="2026-01-{day}T10:00:00"/></testsuites>'
        (tmp_path / "2.10.1-extension.xml").write_text(report)
        kept = compatibility.gather(kept, tmp_path)
    assert kept["2.10.1"] == {"extension": {"passed": 1201, "failed": 3, "date": "2026-01-02"}}
    newest, oldest = compatibility.table(kept).splitlines()[2:]  # by number, not as text
    assert newest.startswith("| 2.10.1 | 1,201 passed, 3 failed, 2026-01-02 |  |")
    assert oldest.startswith("| 2.9.0 | 1 passed, 0 failed, 2025-01-01 |")


def test_distances_of_losses_are_taken_at_the_same_seed(tmp_path, monkeypatch):
    runs = [("float32", 0, 1.0), ("O5", 1, 2.5), ("float32", 1, 2.0), ("O5", 0, 1.25)]
    lines = [json.dumps({"run": ["learn", name, seed, 800], "result": {"value": value}}) for name, seed, value in runs]
    (tmp_path / "results.jsonl").write_text("\n".join([*lines, lines[0].replace("learn", "go on")]))
    monkeypatch.setattr(convergence, "RESULTS", tmp_path)
    column = convergence.Column("loss", "results.jsonl", "learn", 3)
    cells = [convergence.cell(column, name, convergence.values(column)) for name in ("float32", "O5", "O1")]
    assert cells == ["1.500 ± 0.707", "+0.375 ± 0.177", ""]


def test_the_soak_attacked_every_promise_and_broke_none():
    assert set(reliability.GROUPS) == set(GROUPS)
    promises = [promise.name for promises in GROUPS.values() for promise in promises]
    assert [row["name"] for row in SOAK["rows"]] == promises
    for row in SOAK["rows"]:
        assert row["attacks"] > 0 and row["violations"] == [], row["name"]


# The picture of the README


@pytest.fixture(scope="module")
def numbers():
    """The numbers that all four files of the picture hold."""
    files = [numbers_in(f"picture-{part}{theme}.svg") for part in ("bytes", "loss") for theme in ("", "-dark")]
    assert files[1:] == files[:-1]
    return files[0]


@pytest.mark.parametrize("name", picture.CONTENDERS)
def test_bytes_in_the_picture_are_those_of_tensors_that_live(name, numbers):
    assert picture.bytes_per_parameter(picture.CONTENDERS[name]) == numbers["bytes"][name]


def test_bytes_in_the_picture_are_those_that_one_adds_up_on_paper(numbers):
    # Weight, rest, gradient, two moments; in 8 bits with a float32 scale to 256 of them.
    on_paper = 4 + 4 + 8, 2 + 2 + 4, 2 + 2 + 2 + 8, 2 + 2 + 2 + 2 * (1 + 4 / 256)
    assert tuple(sum(its.values()) for its in numbers["bytes"].values()) == on_paper


def test_losses_in_the_picture_and_in_the_readme_are_those_of_the_results(numbers):
    assert {name: round(curve.final, 4) for name, curve in picture.curves().items()} == numbers["loss"]
    (words,) = re.findall(r'<img src="docs/picture-loss\.svg" alt="([^"]*)">', (ROOT / "README.md").read_text())
    amp, bfloat16, _, in_8_bits = (f"{loss:.3f}" for loss in numbers["loss"].values())
    ends = f"torch in bfloat16 ends at {bfloat16}, torch.amp at {amp}, ampkit O5 with 8-bit moments at {in_8_bits}"
    assert ends in words
    assert float(in_8_bits) == pytest.approx(float(amp), abs=1e-3) and float(bfloat16) > float(amp) + 0.03


# benchmarks/step_time_model.md


def test_the_page_of_the_step_time_model_shows_the_tables_that_the_script_prints():
    assert step_time.tables() in (ROOT / "benchmarks" / "step_time_model.md").read_text()


@pytest.mark.parametrize(
    "wrapper, milliseconds",
    [
        # One billion parameters on 4 GPUs, 300 ms of compute, 10 GB/s of 12.5. Three quarters leave each GPU.
        ("DDP, O1 and O5", 2 * 300 - 200),  # 4 GB: 300 ms each way
        ("FSDP2, O2 and O5", (150 - 100) + (450 - 200)),
        ("FSDP2, O5, `reduce_dtype=torch.bfloat16`", (150 - 100) + (300 - 200)),
    ],
)
def test_what_is_waited_for_is_what_one_computes_on_paper(wrapper, milliseconds):
    work = step_time.Work("", 1e9, 0, 0.3)
    assert 1000 * step_time.waited(work, wrapper, 4, 12.5e9) == pytest.approx(milliseconds, rel=1e-9)
    assert step_time.waited(work, wrapper, 1, 12.5e9) == 0.0
    needed = step_time.speed_needed(work, wrapper)
    assert step_time.waited(work, wrapper, 10**9, needed) == 0.0
    assert step_time.waited(work, wrapper, 10**9, 0.99 * needed) > 0.0
