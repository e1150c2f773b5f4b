"""Hostile input: files that would run code, names that would break a line, and models of unusual sizes."""

from __future__ import annotations

import ast
import inspect
import os
import pickle
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from helpers import ROOT, backward, python
from torch import nn

import ampkit

from .death import checkpoint
from .nonfinite import heard
from .promise import promise
from .runs import OPTIMIZERS

#: Calls that run their argument as code, and who may do so: `ampkit run` with the script that it is given.
RUNS_CODE = "pickle.load pickle.loads pickle.Unpickler marshal.loads eval exec os.system os.popen".split()
ALLOWED = {("ampkit/scripts/running.py", "exec")}


def runs_code(path: Path) -> Iterator[str]:
    """Yield each call that would run code from a file, a name or a string."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name, keywords = ast.unparse(node.func), {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if name in RUNS_CODE or (name.startswith("subprocess.") and keywords.get("shell") == "True"):
            yield name
        elif name == "torch.load" and keywords.get("weights_only", "True") != "True":
            yield f"torch.load(weights_only={keywords['weights_only']})"


@promise(
    "No source unpickles, evaluates strings or starts a shell; but for `ampkit run`, which runs the script that it is given.",
    "every call in ampkit, examples, benchmarks and docs, read by ast; counted in files",
    share=0.2,
)
def no_source_loads_pickles(draw: random.Random) -> int:
    paths = [path for folder in ("ampkit", "examples", "benchmarks", "docs") for path in (ROOT / folder).rglob("*.py")]
    calls = [(str(path.relative_to(ROOT)), call) for path in [*paths, ROOT / "setup.py"] for call in runs_code(path)]
    assert set(calls) <= ALLOWED, calls
    # torch.load without weights_only= is safe as long as this is torch's default.
    assert inspect.signature(torch.load).parameters["weights_only"].default is None
    with tempfile.NamedTemporaryFile() as file:
        torch.save(Runs("true"), file.name)
        try:
            torch.load(file.name)
        except pickle.UnpicklingError:
            return len(paths) + 1
    raise AssertionError("torch.load unpickles by default here")


class Runs:
    """An object that runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@promise(
    "A checkpoint runs no code. `ampkit run --allow-pickle` lets it, and says so.",
    "files that run a command where they are unpickled",
    share=0.5,
)
def a_checkpoint_runs_no_code(draw: random.Random) -> int:
    folder = Path(tempfile.mkdtemp())
    marker, attacks = folder / "was run", 0
    bad = Runs(f"touch '{marker}'")
    states: list[Any] = [bad, {"run": bad}, {"model": {"weight": bad}, "iteration": 1}, [torch.zeros(2), bad]]
    for state in states:
        path = folder / "checkpoint.pth.tar"
        if draw.random() < 0.5:
            torch.save(state, path)
        else:
            path.write_bytes(pickle.dumps(state))
        for load in (checkpoint.load, lambda path: torch.load(path)):
            try:
                load(path)
            except (checkpoint.CheckpointError, pickle.UnpicklingError):
                attacks += 1
            else:
                raise AssertionError(f"loaded: {state}")
            assert not marker.exists()
    script = folder / "script.py"
    script.write_text("import sys, torch\ntorch.load(sys.argv[1])\n")
    for allows in (False, True):
        options = ["--allow-pickle"] if allows else []
        done = python("-m", "ampkit", "run", *options, script, path)
        assert marker.exists() == allows, done.stderr
        assert ("may run code of its own" in done.stderr) == (allows or "UnpicklingError" in done.stderr), done.stderr
        assert "--allow-pickle" in done.stderr, done.stderr
    return attacks + 1


HOSTILE = [
    "line\nbreak", "return\rover", "\x1b[31mred", "<script>alert(1)</script>", "'; rm -rf ~; '", '"quoted"', "%s %d", "{0}",
    "$(id)", "tab\there", "null\0byte", "right\u202eto left", "a" * 300, " ", "`id`", "\\n", "{name}", "é", "😀",
]  # fmt: skip


@promise(
    "Names stay names: in logs, errors and tables a line stays a line, and no control character arrives.",
    "modules named with line breaks, escapes, quotes, HTML, format strings and shell commands; counted in texts",
)
def names_stay_names(draw: random.Random) -> int:
    name = draw.choice(HOSTILE) + draw.choice(["", draw.choice(HOSTILE)])
    model, level = nn.Module(), draw.choice(["O1", "O2", "O3", "O5"])
    model.add_module(name, nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)))
    model.register_parameter(name + "p", nn.Parameter(torch.ones(4, 4)))
    model.register_buffer(name + "b", torch.ones(4))
    model.forward = lambda x: model._modules[name](x) @ model._parameters[name + "p"]
    with torch.no_grad():
        model._modules[name][0].weight[0, 0] = 1e6
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9)
    with heard("DEBUG") as log:
        ampkit.initialize(
            model, optimizer, opt_level=level, loss_scale="dynamic", keep_fp32=draw.choice([(), [nn.LayerNorm]]),
            **({"cast_model_type": torch.float16} if level in ("O2", "O3") else {}),
        )  # fmt: skip
        check = ampkit.check_updates(optimizer, every=1)
        said = [str(ampkit.explain(model)), str(ampkit.current_session())]
        for number in range(40):
            optimizer.zero_grad()
            with ampkit.scale_loss(model(torch.full((2, 4), 1e-3)).float().sum(), optimizer) as scaled:
                scaled.backward()
                if number > 8:
                    next(iter(model._modules[name].parameters())).grad.fill_(float("nan"))
            optimizer.step()
        said += [str(check), *log.output]
        for wrong in (lambda: model.half()(torch.ones(2, 4)), lambda: ampkit.initialize(model, keep_fp32=name + "?")):
            try:
                wrong()
            except Exception as error:
                said.append(str(error))
        ampkit.close()
    assert any("steps in a row" in line for line in said), said
    for text in said:
        for line in text.split("\n"):
            assert all(one.isprintable() for one in line), (name, line)
        if any(part in text for part in ("break", "over")) and "line\nbreak" in name:
            assert "line\nbreak" not in text, (name, text)
    return len(said)


@promise(
    "Models of any size train or are refused in words.",
    "0 and 10,000 parameters, tensors without elements or dimensions, 2^31 elements on the meta device",
)
def models_of_any_size_train(draw: random.Random) -> int:
    level = draw.choice(["O0", "O1", "O2", "O3", "O4", "O5"])
    make = draw.choice([OPTIMIZERS[name].make for name in ("SGD foreach", "AdamW foreach", "FusedSGD", "FusedAdam")])
    kind = draw.choice(["none", "many", "empty", "scalar", "meta"])
    if kind == "meta":
        with torch.device("meta"):
            model: nn.Module = nn.Linear(2**16, 2**15)
        try:
            ampkit.initialize(model, make(model.parameters()), opt_level=level, verbosity=0)
        except ampkit.ConfigurationError as error:
            assert "meta" in str(error)
        ampkit.close()
        return 1
    model = nn.Module()
    some = {"none": [], "empty": [(0,), (4, 0), (2, 3)], "scalar": [(), (1,), (1, 1), ()]}
    shapes = some.get(kind, [(3,)] * 10_000)
    for number, shape in enumerate(shapes):
        model.register_parameter(f"p{number}", nn.Parameter(torch.ones(shape)))
    model.forward = lambda x: x.sum() * sum([param.sum() for param in model.parameters()], torch.zeros(()))
    extra = nn.Parameter(torch.ones(1))
    optimizer = make([*model.parameters(), extra] if kind == "none" else model.parameters())
    ampkit.initialize(model, optimizer, opt_level=level, loss_scale=4.0, verbosity=0)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(2)) + extra.sum()
        backward(loss, optimizer)
        ampkit.clip_grad_norm_(optimizer, 1e9)
        optimizer.step()
    assert all(bool(value.isfinite().all()) for value in model.state_dict().values())
    assert len(model.state_dict()) == len(shapes)
    moved = [bool((param != 1).all()) for param in model.parameters() if param.numel()]
    assert all(moved), (kind, level)
    ampkit.close()
    return 1
