"""``ampkit diagnose script.py``: stops at the culprit's line, with the figures of `ampkit.diagnose`."""

import re
import runpy
import sys
import textwrap

import pytest
import torch

from ampkit.__main__ import main

MODEL = """
    import torch, ampkit
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""

STEP = """
    optimizer.zero_grad()
    {backward}
    optimizer.step()
    print("step", i)
"""


def loop(times, forward, before="", backward="loss.backward()", step=STEP):
    """Return a loop of so many steps, that of ``i`` among them, after some lines."""
    lines = [*before.splitlines(), f"for i in range({times}):", *(f"    {line}" for line in forward.splitlines())]
    return "\n".join(lines) + step.format(backward=backward)


O1 = """model, optimizer = ampkit.initialize(
    model, optimizer, opt_level="O1", patch_torch_functions_type=torch.float16, verbosity=0
)"""
BLOCK = "with ampkit.scale_loss(y.sum(), optimizer) as scaled_loss: scaled_loss.backward()"
SCALER = "FP16, scaler = torch.autocast('cpu', torch.float16), torch.amp.GradScaler('cpu')"
BY_SCALER = """
    optimizer.zero_grad()
    scaler.scale(y.float().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    print("step", i)
"""

# the script, steps taken, exit code, printed words
SCRIPTS = {
    "a loss": (
        loop(10, "y = model(torch.ones(2, 4)).abs() * 0 + (3.0 - i)\nloss = y.log().mean()"),
        *(3, 1, ["log of zero", "line      script.py:7  loss = y.log().mean()", "of 2"]),
    ),
    "a loss in float64": (
        loop(10, "y = model(torch.ones(2, 4)).double().abs() * 0 + (3.0 - i)\nloss = y.log().mean()"),
        *(3, 1, ["log of zero", "script.py:7", "float64", "it happens in float64: the model, not"]),
    ),
    "a gradient that ruins the weights": (
        loop(10, "loss = (model(torch.ones(2, 4)) * (i < 3)).abs().sqrt().mean()"),
        *(3, 1, ["division by zero in backward", "script.py:6", "torch.Tensor.sqrt", "iteration 4"]),
    ),
    # 1e4 times the scale: 4e4 is the largest such below 65504. After ten iterations the scale is 64.
    "skips": (
        loop(10, "y = model(torch.ones(1, 4)).float() * 1e4", O1, BLOCK),
        *(10, 0, ["nothing found in ", "at loss scale 128", "the loss scale fell 10 times"]),
    ),
    # From 32 * 65536, the gradient of the bias, to 32 * 1024.
    "a descent that ends": (
        loop(8, "with FP16:\n    y = (model(torch.ones(2, 4)) * 16).sum()", SCALER, "", BY_SCALER),
        *(8, 0, ["nothing found in ", "the loss scale fell 6 times"]),
    ),
    "a running variance": (
        loop(
            9,
            "out = model(torch.randn(3, 4) * (1e22 if i == 4 else 1.0))\nloss = out.square().sum()",
            "model = torch.nn.Sequential(model, torch.nn.BatchNorm1d(1))",
        ),
        *(4, 1, ["overflow of the format", "script.py:7", "functional.batch_norm", "module    1", "iteration 5"]),
    ),
    "nothing": (loop(2, "loss = model(torch.ones(2, 4)).mean()"), 2, 0, ["nothing found in "]),
}


@pytest.fixture
def written(tmp_path):
    """Write a script that begins with the model; return its path."""

    def write(text, model=MODEL):
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(model).lstrip() + textwrap.dedent(text))
        return str(path)

    return write


@pytest.mark.parametrize("case", SCRIPTS)
def test_a_script_stops_at_the_culprit(case, written, capsys):
    script, steps, code, words = SCRIPTS[case]
    assert main(["diagnose", written(script)]) == code
    printed = capsys.readouterr().out
    assert printed.count("step") == steps, printed
    assert [part for part in words if part not in printed] == [], printed
    assert ("not the precision" in printed) <= ("next " not in printed), printed  # nothing is left to try


#: Inputs of a model, in layouts that few operators take.
LAYOUTS = {
    "sparse": "torch.sparse.mm(torch.eye(4).to_sparse(), x)",
    "jagged": "torch.nested.as_nested_tensor([x, x[:2]], layout=torch.jagged)",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tool", ["check", "diagnose", "record"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_that_few_operators_take_hide_nothing(layout, tool, written, capsys):
    script = f"""
        for i in range(5):
            x = torch.ones(4, 4)
            y = model({LAYOUTS[layout]})
            y = y.to_padded_tensor(0.0) if y.is_nested else y
            loss = (y.abs() * 0 + (3.0 - i)).log().mean()  # here
            optimizer.zero_grad(); loss.backward(); optimizer.step()
    """
    code, printed = main([tool, written(script)]), capsys.readouterr().out
    if tool == "diagnose":  # 3 - 3 in the fourth iteration
        assert code == 1 and "log of zero" in printed and "# here" in printed and "iteration 4" in printed, printed
    else:
        assert code == 0 and "Linear" in printed if tool == "check" else "script.py:10  log" in printed, printed


FAILS = """
    import torch
    from torch import nn
    torch.manual_seed(0)
    model, frozen = nn.Linear(8, 8), nn.Linear(8, 8).bfloat16().requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for i in range(3):
        y = model(torch.ones(4, 8))
        if i == 1:
            {line}  # here
        optimizer.zero_grad()
        y.float().square().mean().backward()
        optimizer.step()
"""

# the line, the kind, and what the numbers and the cure say
FAILURES = [
    ("y = y @ torch.eye(8).bfloat16()", "two dtypes in one call", ["float32 (4, 8), bfloat16 (8, 8)", "x.to(y.dtype)"]),
    ("y = model(y.double())", "two dtypes in one call", ["float64 (4, 8)", "Linear's 'weight'", "x.to(y.dtype)"]),
    ("y = frozen(y)", "two dtypes in one call", ["bfloat16 (8, 8) (Linear's 'weight')", "x.to(y.dtype)"]),
]


@pytest.mark.parametrize("line, kind, words", FAILURES, ids=[line for line, _, _ in FAILURES])
def test_an_exception_has_a_culprit(line, kind, words, written, capsys):
    with pytest.raises(RuntimeError):
        main(["diagnose", written(textwrap.dedent(FAILS).lstrip().format(line=line), model="")])
    printed = capsys.readouterr().out
    assert printed.startswith(kind) and "script.py:9" in printed and "# here" in printed and "iteration 2" in printed
    assert [word for word in words if word not in printed] == [], printed


def test_the_batch_and_the_weights_are_saved_and_diagnosed_once_more(written, tmp_path, capsys):
    script = """
        import torch, ampkit
        torch.manual_seed(0)
        class Net(torch.nn.Linear):
            def forward(self, x, *, scale=1.0): return (super().forward(x) * scale).abs().exp()
        model = Net(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for i in range(6):
            x = torch.full((3, 4), 0.5)
            loss = model(x, scale=torch.tensor([[1.0], [1e4 * (i == 4)], [1.0]])).mean()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
    """
    main(["diagnose", "--save", str(tmp_path / "bad.pt"), written(script, model="")])
    printed = capsys.readouterr().out
    assert "iteration 5, row 1 of 3" in printed and 'saved["calls"][0]' in printed, printed
    saved = torch.load(tmp_path / "bad.pt")
    (args, kwargs), state = saved["calls"][0], saved["models"][0]
    assert torch.equal(args[0], torch.full((3, 4), 0.5)) and kwargs["scale"][1] == 1e4
    value = args[0] @ state["weight"].T + state["bias"]
    assert not (value * kwargs["scale"]).abs().exp().isfinite().all()


# what fails in the third iteration
FAILING = {
    "an operator": "torch.ones(2, 3) @ torch.ones(2, 3)",
    "a layer": "model(torch.ones(2, 3))",
    "a hook of a gradient": "y.register_hook(lambda gradient: gradient @ gradient)",
    "a closure": "optimizer.step(lambda: model(torch.ones(2, 3)))",
    "an exit": "sys.exit('no more')",
    "unscale": "model.half(); s = torch.amp.GradScaler('cpu'); s.scale(model(y.half()).sum()).backward(); s.unscale_(optimizer)",
}


@pytest.mark.parametrize("line", FAILING.values(), ids=FAILING)
@pytest.mark.parametrize("tool", ["check", "diagnose", "record"])
def test_a_script_that_fails_shows_the_frames_that_plain_python_shows(tool, line, tmp_path, monkeypatch, capsys):
    path = tmp_path / "script.py"
    path.write_text(f"import sys\n{textwrap.dedent(FAILS).lstrip()}".format(line=line).replace("i == 1", "i == 2"))
    with pytest.raises(BaseException) as plain:
        runpy.run_path(str(path))
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(plain.type) as observed:
        main(["diagnose", str(path)] if tool == "diagnose" else [tool, "--iterations", "9", str(path)])
    capsys.readouterr()
    sys.excepthook(observed.type, observed.value, observed.tb)
    printed = capsys.readouterr().err
    frames = [one.lineno for one in plain.traceback if str(one.path) == str(path)]
    assert [int(one) for one in re.findall(r'File ".*script.py", line (\d+)', printed)] == [one + 1 for one in frames]
    assert not re.findall('File ".*ampkit', printed) and str(observed.value) == str(plain.value)


@pytest.mark.parametrize("dtype, factor", [("float16", 1.0), ("bfloat16", 1e32)])
def test_the_cure_of_an_overflow_is_bfloat16_where_it_is_float16(dtype, factor, written, capsys):
    script = f"""
        x = torch.ones(3, 4) * 1e3 * {factor}
        for _ in range(9):
            with torch.autocast("cpu", torch.{dtype}):
                loss = (model(x) * 1e3).float().mean()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
    """
    path = written(script, MODEL.replace("0.1)", "0.1); torch.nn.init.constant_(model.weight, 25.0)"))
    assert main(["diagnose", path]) == 1
    (cure,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  cure")]
    change = "bfloat16 (O4 or O5 without cast_model_type=), " * (dtype == "float16")
    assert cure.startswith(f"  cure      not tried: {change}float32 for the function, or bring"), cure


SPIKES = """
    for i in range(8):
        x = torch.tensor([[1.0, 2.0, 3.0, 5.0], [2.0, 1.0, 4.0, 2.0]])
        if i == 5:
            x[1] = 2.0
        x = x / (x.std(1, keepdim=True) + 1e-5)
        loss = model(x).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


def test_the_batch_whose_gradients_spike_is_saved_and_else_nothing_is(written, tmp_path, capsys):
    """A row of 2, whose deviation is 0, becomes 2 / 1e-5."""
    path, model = tmp_path / "saved.pt", MODEL.replace("0.1", "1e-9")
    assert main(["diagnose", "--save", str(path), written(SPIKES, model)]) == 0
    assert "the smallest divisor is 1e-05; gradients are " in capsys.readouterr().out
    assert torch.load(path)["calls"][0][0][0][1].eq(torch.tensor(2.0) / 1e-5).all()
    path.unlink()
    assert main(["diagnose", "--save", str(path), written(SPIKES.replace("i == 5", "False"), model)]) == 0
    assert "nothing found in" in (printed := capsys.readouterr().out) and "; nothing was saved to" in printed
    assert not path.exists()
