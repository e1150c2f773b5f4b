"""`tune`: figures known on paper or computed here, the rule, the files it writes, and what it refuses."""

import json
import math
import time

import pytest
import torch
import tuned
from helpers import ROOT, python

import ampkit
import ampkit.insight.tuning.tune as measuring
from ampkit.__main__ import main
from ampkit.insight.processes import WorkerError
from ampkit.insight.tuning.report import ALIKE, WIDTH, Row, Tuning
from ampkit.insight.tuning.trainer import checked
from ampkit.insight.tuning.ways import Way, fused_in_words, optimizers_for

HERE = str(ROOT / "tests" / "insight" / "tuned.py")


# Trained


@pytest.fixture(scope="module")
def on_paper():
    return ampkit.tune(tuned.on_paper, levels=["O2", "O3"], float16=True, seconds=1, steps=12)


@pytest.fixture(scope="module")
def failing():
    return ampkit.tune(HERE + ":failing", levels=["O1", "O2", "O4"], seconds=1, steps=4)


def test_every_way_is_there_and_was_timed(on_paper):
    levels = [f"{level} {dtype}" for level in ("O2", "O3") for dtype in ("float16", "bfloat16")]
    fused = [name for level in levels for name in (level, f"{level} fused")]  # plain SGD has no moments for int8
    assert list(on_paper.rows) == ["float32", "autocast float16", "autocast bfloat16", *fused]
    for row in on_paper.rows.values():
        assert row.error is None and len(row.seconds) >= 3 and min(row.seconds) > 0
        low, median, high = row.quartiles
        assert 0 < low <= median <= high and len(row.losses) == 12
    assert on_paper.about["samples"] == 1 and on_paper.about["parameters"] == tuned.WIDTH**2


def test_losses_are_those_of_float32_on_paper(on_paper):
    # Each step takes RATE * GRADIENT from each of WIDTH**2 weights, and the loss is GRADIENT times their sum.
    weights = [0.75 - step * tuned.RATE * tuned.GRADIENT for step in range(12)]
    losses = [tuned.GRADIENT * tuned.WIDTH**2 * weight for weight in weights]
    assert on_paper.rows["float32"].losses == pytest.approx(losses, rel=1e-6)
    assert on_paper.rows["float32"].loss == pytest.approx(sum(losses[-5:]) / 5, rel=1e-6)
    # A mean distance of 5.5 steps' worth, where weights do not move.
    stuck = Row(Way("O3"), losses=[losses[0]] * 12)
    by_hand = 5.5 * (losses[0] - losses[1]) / (sum(losses) / 12)
    assert stuck.distance(on_paper.rows["float32"]) == pytest.approx(by_hand, rel=1e-6)


def test_lost_updates_and_skips_are_those_on_paper(on_paper):
    # 0.75 - 2**-9 is half-way between two numbers of bfloat16, and becomes 0.75, the even one. float16 has a number for it.
    for name, row in on_paper.rows.items():
        assert row.lost_updates == (1.0 if name.startswith("O3 bfloat16") else 0.0), name
        # 8 * 65536 ... 8 * 8192 = 65536 leave float16, which ends at 65504; 8 * 4096 does not. O3 has no scale.
        scaled = "float16" in name.split() and not name.startswith("O3")
        assert row.skipped == (4 if scaled else 0), name


def test_memory_is_that_of_tensors(on_paper):
    # Weight and gradient in float32 are 8 bytes each; in lower precision 4, and 2 of a rest at O2. The float16 gradient is widened.
    def bytes_each(name):
        return on_paper.rows[name].peak_bytes / tuned.WIDTH**2

    assert 8 <= bytes_each("float32") < 13
    assert 6 <= bytes_each("O2 bfloat16 fused") < bytes_each("float32")
    assert 4 <= bytes_each("O3 bfloat16 fused") < bytes_each("O2 bfloat16 fused")


def test_a_way_that_fails_says_why_and_ends_nothing(failing):
    assert list(failing.rows) == ["float32", "autocast bfloat16", "O1 bfloat16", "O2 bfloat16", "O4 bfloat16"]
    assert failing.rows["O1 bfloat16"].error == "RuntimeError: not at O1"
    assert failing.rows["O2 bfloat16"].error == "its process ended with exit code 7"
    assert all(failing.rows[name].seconds for name in ("float32", "autocast bfloat16", "O4 bfloat16"))
    printed = str(failing)
    assert "failed: O1 bfloat16: RuntimeError: not at O1" in printed and max(map(len, printed.splitlines())) <= WIDTH


def test_a_factory_that_fails_is_told_of_with_its_traceback():
    with pytest.raises(RuntimeError, match="float32 training failed: OSError: no such data") as raised:
        ampkit.tune(tuned.broken, seconds=1)
    assert 'raise OSError("no such data")' in "".join(raised.value.__notes__)


# Turns


def measured(monkeypatch, fails_at=None):
    """(the rows, what workers were asked) of float32, torch.autocast, O1 and O4, with workers that answer at once.

    O1's fails when it is asked for the ``fails_at``-th time.
    """
    asked = []

    class Instead:
        def __init__(self, context, make, located, way, threads):
            self.way = str(way)
            self.answers = {
                "start": dict(device="cpu", optimizers=["given"], takes_bfloat16=True, free_bytes=None),
                "turn": 0.04,
                "examine": {"peak_bytes": 300},
            }

        def ask(self, method, *arguments):
            asked.append((self.way, method, *arguments))
            if self.way.startswith("O1") and fails_at == sum(name == self.way for name, *_ in asked):
                raise WorkerError("OutOfMemoryError: no")
            return self.answers[method]

        def stop(self):
            asked.append((self.way, "stop"))

    monkeypatch.setattr(measuring, "Worker", Instead)
    monkeypatch.setattr(measuring.os, "dup2", lambda *_: None)
    measurements = measuring.Measurements(("script", "factory"), 1)
    return measurements.measure(["O1", "O4"], None, 1e-9, None).rows, asked


WAYS = ["float32", "autocast bfloat16", "O1 bfloat16", "O4 bfloat16"]


def test_turns_change_their_order_and_are_of_a_tenth_of_a_second(monkeypatch):
    rows, asked = measured(monkeypatch)
    turns = [name for name, *rest in asked if rest == ["turn", 2]]  # of 0.04 s
    orders = [turns[start : start + 4] for start in range(0, 12, 4)]
    assert len(turns) == 12 and all(sorted(order) == sorted(WAYS) for order in orders)
    assert len(set(map(tuple, orders))) == 3
    assert list(rows) == WAYS and rows["O4 bfloat16"].seconds == [0.04] * 3
    assert asked[-4:] == [(name, "stop") for name in WAYS]


def test_a_way_that_fails_in_a_turn_leaves_the_others(monkeypatch):
    rows, _ = measured(monkeypatch, fails_at=4)
    assert {name: one.error for name, one in rows.items() if one.error} == {"O1 bfloat16": "OutOfMemoryError: no"}
    assert [len(one.seconds) for one in rows.values() if not one.error] == [3, 3, 3]


# The rule


def row(way, milliseconds, mib, off=0.0, lost=0.0, **more):
    """Return a row of losses that are ``off`` from those of float32, 1.0 each."""
    more = {"seconds": [milliseconds * 1e-3] * 4, **more}
    return Row(Way(*way.split()), peak_bytes=mib << 20, losses=[1 + off] * 3, lost_updates=lost, **more)


def tuning(*rows):
    about = dict(model="Net", device="cpu", threads=2, parameters=10, optimizer="Adam", samples=8, steps=3, left_out=[])
    fused = "ampkit.optimizers.FusedAdam(model.parameters(), lr=0.01)"
    return Tuning(about | {"fused": fused}, {str(one.way): one for one in rows})


SLOWER, FASTER = [3.2e-3, 3.2e-3, 6.4e-3, 6.4e-3], [3e-3, 3e-3, 6e-3, 6e-3]
PLAIN, AUTOCAST = row("float32", 10, 100), row("autocast bfloat16", 8, 90, off=0.01)


@pytest.mark.parametrize(
    "others, name",
    [
        ([], "autocast bfloat16"),
        ([row("O2 bfloat16", 6, 80, off=0.0149)], "O2 bfloat16"),
        ([row("O2 bfloat16", 6, 80, off=0.0151)], "autocast bfloat16"),
        ([row("O2 bfloat16", 6, 80, off=-0.0151)], "autocast bfloat16"),
        ([row("O2 bfloat16", 6, 80, off=math.nan)], "autocast bfloat16"),
        ([row("O3 bfloat16", 6, 70, lost=0.051)], "autocast bfloat16"),
        ([row("O3 bfloat16", 6, 70, lost=0.049)], "O3 bfloat16"),
        ([row("O1 bfloat16", 6, 95, error="no")], "autocast bfloat16"),
        # Alike in time, so the smallest, and of those as small the first.
        ([row("O1 bfloat16", 7.0, 95), row("O2 bfloat16", 7.2, 80), row("O5 bfloat16", 7.0, 79)], "O2 bfloat16"),
        ([row("O1 bfloat16", 7.0, 95), row("O2 bfloat16", 7.3, 80)], "O1 bfloat16"),
        # Slower in every round, on a machine that was half as fast in some of them.
        ([row("O1 bfloat16", 0, 80, seconds=SLOWER), row("O2 bfloat16", 0, 95, seconds=FASTER)], "O2 bfloat16"),
        # Each precision has its own yardstick.
        ([row("autocast float16", 9, 90, off=0.001), row("O2 float16", 6, 80, off=0.002)], "autocast bfloat16"),
    ],
)
def test_the_recommended_way_follows_the_rule(others, name):
    assert str(tuning(PLAIN, AUTOCAST, *others).recommended.way) == name


def test_nothing_follows_an_autocast_that_ends_in_nan():
    autocast = row("autocast float16", 8, 90, off=math.nan)
    found = tuning(PLAIN, autocast, row("O3 float16", 2, 70, off=math.nan), row("O1 float16", 5, 95, off=0.009))
    assert str(found.recommended.way) == "O1 float16" and "torch.autocast failed" in found.reason
    assert str(tuning(PLAIN, autocast, row("O1 float16", 5, 95, off=0.011)).recommended.way) == "float32"


def test_float32_is_recommended_where_nothing_is_faster_and_needs_no_line():
    found = tuning(row("float32", 10, 100), row("autocast bfloat16", 9.9, 101), row("O1 bfloat16", 12, 105))
    assert str(found.recommended.way) == "float32" and found.lines == [] and ALIKE == 1.03
    assert found.reason == "float32: stay with it, 100 MiB."


def test_lines_make_what_was_measured():
    lines = tuning(PLAIN, AUTOCAST, row("O2 float16 int8", 5, 50)).lines
    assert lines == [
        'optimizer = ampkit.optimizers.FusedAdam(model.parameters(), lr=0.01, state_dtype="int8")',
        'model, optimizer = ampkit.initialize(model, optimizer, opt_level="O2", cast_model_type=torch.float16)',
    ]
    given = tuning(PLAIN, AUTOCAST, row("O5 bfloat16", 5, 50))
    assert given.lines == ['model, optimizer = ampkit.initialize(model, optimizer, opt_level="O5")']
    assert tuning(PLAIN, AUTOCAST).lines[0].startswith('with torch.autocast("cpu", torch.bfloat16):')


@pytest.mark.parametrize("of", ["all", "two groups", "a part"])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_a_line_for_the_fused_optimizer_computes_the_same(make, of):
    settings = dict(momentum=0.9, nesterov=True) if make is torch.optim.SGD else dict(betas=(0.8, 0.99))
    results = []
    for is_fused in (False, True):
        model = torch.nn.Linear(4, 2)
        torch.nn.init.constant_(model.weight, 0.25)
        torch.nn.init.zeros_(model.bias)
        groups = [{"params": [model.weight], "lr": 0.02, "weight_decay": 0.2}, {"params": [model.bias]}]
        given = {"all": model.parameters(), "two groups": groups, "a part": groups[:1]}[of]
        optimizer = make(given, lr=0.05, weight_decay=0.1, **settings)
        assert optimizers_for(optimizer) == ["given", "fused", "int8"]
        if is_fused:
            names = {"ampkit": ampkit, "model": model, "optimizer": optimizer}
            optimizer = eval(fused_in_words(optimizer, model), names)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.arange(8.0).view(2, 4)).square().mean().backward()
            optimizer.step()
        results.append((model.weight.detach(), model.bias.detach()))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_a_line_has_the_rate_that_a_scheduler_began_with():
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step))  # times 0 at first
    words = fused_in_words(optimizer, model)
    assert "lr=0.01" in words and "model.parameters()" in words


@pytest.mark.parametrize(
    "kind, settings, ways",
    [
        ("RMSprop", {}, ["given"]),
        ("Adam", {"amsgrad": True}, ["given"]),
        ("Adam", {"decoupled_weight_decay": True}, ["given"]),
        ("SGD", {"lr": 1.0}, ["given", "fused"]),  # which has no moments
    ],
)
def test_other_optimizers_have_no_fused_one(kind, settings, ways):
    assert optimizers_for(getattr(torch.optim, kind)([torch.nn.Parameter(torch.ones(2))], **settings)) == ways


# Written files and tables


def test_the_table_has_every_figure_in_100_columns():
    report = tuning(
        *(row("float32", 1234.5, 100), AUTOCAST, row("O2 bfloat16 fused", 6.5, 12345, off=0.0123, skipped=3)),
        row("O3 bfloat16 fused", 5.5, 70, lost=0.25),
        row("O1 float16 int8", 6, 80, error="OutOfMemoryError: " + 30 * "words "),
    )
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= WIDTH
    (fused,) = (line for line in lines if line.startswith("O2 bfloat16 fused"))
    assert fused.split()[3:] == "6.50 6.50-6.50 1231 12345 1.012 1.2% 3 0%".split()
    text = " ".join(" ".join(lines).split())
    assert "Faster, and out: O3 bfloat16 fused, it loses 25% of the updates." in text
    assert "189.92 times as fast as float32" in text


def test_json_has_the_figures(tmp_path):
    found = tuning(PLAIN, AUTOCAST, row("O2 bfloat16", 6, 80), row("O3 bfloat16", 5, 70, lost=0.5))
    found.to_json(tmp_path / "found.json")
    read = json.loads((tmp_path / "found.json").read_text())
    assert read["recommended"] == "O2 bfloat16" and read["lines"] == found.lines
    assert read["rows"]["O2 bfloat16"]["seconds"] == [0.006] * 4 and read["rows"]["O2 bfloat16"]["why_not"] is None
    assert read["rows"]["O3 bfloat16"]["why_not"] == "it loses 50% of the updates"


# Refusals


def local_factory():
    return lambda: None


@pytest.mark.parametrize(
    "error, words, factory, settings",
    [
        (TypeError, "it is an int. tune expects a factory", 3, {}),
        (TypeError, "it is a Linear. tune expects a factory", torch.nn.Linear(2, 2), {}),
        (ValueError, "<lambda> cannot be imported", lambda: None, {}),
        (ValueError, "cannot be imported. Write it to a file", local_factory(), {}),
        (ValueError, "names no factory", "script.py", {}),
        (ValueError, "^tune: tuned.py has no 'nothing'. tune expects a factory", f"{tuned.__file__}:nothing", {}),
        (FileNotFoundError, "no 'nowhere.py' here", "nowhere.py:factory", {}),
        (ValueError, "expected some of O1, O2", tuned.net, {"levels": ["O0"]}),
        (ValueError, "seconds=0", tuned.net, {"seconds": 0}),
        (ValueError, "steps=0", tuned.net, {"steps": 0}),
    ],
)
def test_mistakes_are_refused_at_once(error, words, factory, settings):
    with pytest.raises(error, match=words):
        ampkit.tune(factory, **settings)


@pytest.mark.parametrize(
    "made, words",
    [
        (None, "the factory returned NoneType"),
        ((torch.nn.Linear(1, 1), None), r"returned \['Linear', 'NoneType'\]; expected \(model"),
        ((torch.nn.Linear(1, 1).half(), None, [], print), "weights in torch.float16"),
        ((torch.nn.Linear(1, 1), None, [], print), "expected pairs"),
        ((torch.nn.Linear(1, 1), None, [torch.ones(2)], print), "Tensor.*expected pairs"),
    ],
)
def test_what_a_factory_returns_is_checked(made, words):
    with pytest.raises(TypeError, match=words):
        checked(made)


@pytest.mark.parametrize("words", [["nowhere.py:factory"], ["script.py"], ["tests.py:f", "--seconds", "0"]])
def test_the_command_refuses_with_exit_code_2(words, capsys):
    assert main(["tune", *words]) == 2
    assert "ampkit tune: " in capsys.readouterr().err


SCRIPT = """
import sys, ampkit
sys.path.insert(0, {folder!r})
from tuned import net

def factory():
    return net()

{guard}
    print(ampkit.tune(factory, levels=["O5"], seconds=1, steps=2))
"""


@pytest.mark.slow
@pytest.mark.parametrize("guard", ["if __name__ == '__main__':", "if True:"])
def test_a_script_calls_it_under_a_guard(guard, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(ROOT / "tests" / "insight"), guard=guard))
    done = python(script)
    if "name" in guard:
        assert done.returncode == 0 and "O5 bfloat16" in done.stdout, done.stderr
    else:
        assert done.returncode == 1 and "Put the call under if __name__ ==" in done.stderr


# Real models


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet", "lstm", "gpt"])
def test_examples_are_tuned_and_the_resnet_within_two_minutes(name):
    pytest.importorskip("sklearn")
    started = time.monotonic()
    report = ampkit.tune(str(ROOT / "examples" / "tuning" / "models.py") + ":" + name, seconds=60)
    took = time.monotonic() - started
    print(f"{name}, {took:.0f} s\n{report}")
    assert len(report.rows) == 17 and all(one.error is None for one in report.rows.values())
    assert took < 120 or name != "resnet"
    assert report.why_not(report.recommended) is None
    # bfloat16 without float32 values loses updates, and O2 and O5 do not.
    plain = report.rows["float32"].lost_updates
    assert report.rows["O3 bfloat16"].lost_updates > plain + 0.02
    assert all(report.rows[f"{level} bfloat16"].lost_updates < plain + 0.01 for level in ("O1", "O2", "O4", "O5"))
