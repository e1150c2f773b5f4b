"""``python -m ampkit run``: legacy scripts as they are, on a machine without a GPU."""

import argparse
import importlib.util
import os
import pathlib
import socket
import sys
import warnings

import helpers
import pytest
import torch
from helpers import ROOT, others_slow, python

import ampkit.apex
from ampkit.__main__ import AROUND_SCRIPTS
from ampkit.scripts import running

SCRIPTS = pathlib.Path(__file__).parent / "scripts"


RUN = ("-m", "ampkit", "run")


def execute(*arguments, before=(), **settings):
    done = python(*before, *RUN, *arguments, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def run(folder, text, *arguments, device="cpu", **settings):
    """Run a script in this process; returns the names that it leaves."""
    ampkit.apex.uninstall()
    script = folder / "script.py"
    script.write_text("import torch\n" + text)
    return running.execute(running.Run(str(script), device=device, around=AROUND_SCRIPTS, **settings), arguments)


RESULTS = [
    *(("O0", "float32", "float32"), ("O1", "bfloat16", "float32")),
    *(("O2", "float32", "bfloat16"), ("O3", "float32", "bfloat16")),
]


@pytest.mark.parametrize("level, out, weights", others_slow(RESULTS[2], of=RESULTS))
def test_a_classifier(tmp_path, level, out, weights):
    arguments = ["--opt-level", level, "--loss-scale", "dynamic", "--checkpoint", tmp_path / "ckpt.pt"]
    done = execute("--device", "cpu", SCRIPTS / "classify.py", *arguments)
    assert f"Selected optimization level {level}" in done.stdout and "nan" not in done.stdout
    assert f"RESULT 0 torch.{out} torch.{weights} 1" in done.stdout
    assert done.stderr.count("--device cpu") == 1 and "bfloat16" in done.stderr
    saved = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    assert set(saved) == {"model", "optimizer", "amp"} and saved["model"]["0.weight"].dtype is torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torch.distributed.run", "torch.distributed.launch"])
def test_two_processes(launcher, tmp_path):
    with socket.socket() as found:
        found.bind(("", 0))
        port = found.getsockname()[1]
    where = f"--master_port={port}" if launcher.endswith("launch") else "--standalone"
    arguments = ["--device", "cpu", SCRIPTS / "classify.py", "--opt-level", "O2", "--sync_bn", "--results", tmp_path]
    execute(*arguments, before=["-m", launcher, "--nproc_per_node=2", where])
    results = [(tmp_path / f"rank{rank}").read_text() for rank in range(2)]
    assert results == ["torch.float32 torch.bfloat16 2\n"] * 2


def test_exit_codes_and_errors_are_the_scripts(tmp_path):
    script = tmp_path / "leave.py"
    script.write_text("import sys\nfrom apex import amp\nsys.exit(7)\n")
    assert python(*RUN, script).returncode == 7
    missing = python(*RUN, "nowhere.py")
    assert missing.returncode == 2 and "nowhere.py" in missing.stderr


BROKEN = {
    "raises": "import sys\nprint(sys.argv, __file__, file=sys.stderr)\n"
    "def f(x):\n    return 1 / x\ntry:\n    f(0)\nexcept ZeroDivisionError:\n    f(0)\n",
    "is no Python": "def f(:\n",
    "has a hook": "import sys, traceback\n"
    "sys.excepthook = lambda kind, value, tb: print('HOOK', len(traceback.extract_tb(tb)), file=sys.stderr)\n"
    "def f():\n    raise KeyError('x')\nf()\n",
}


@pytest.mark.parametrize("script", others_slow("raises", of=BROKEN))
def test_tracebacks_are_those_of_plain_python(script, tmp_path):
    (tmp_path / "script.py").write_text(BROKEN[script])
    plain, ours = python("script.py", cwd=tmp_path), python(*RUN, "script.py", cwd=tmp_path)
    assert plain.returncode == ours.returncode == 1
    assert plain.stderr and ours.stderr == plain.stderr


@pytest.mark.slow
def test_tracebacks_of_modules_begin_in_the_module(tmp_path):
    (tmp_path / "tool.py").write_text("raise KeyError('x')\n")
    for name in ("tool", "nowhere"):
        done = python(*RUN, "-m", name, cwd=tmp_path)
        assert done.returncode == 1 and "ampkit/" not in done.stderr and "importlib" not in done.stderr, done.stderr
    assert done.stderr.startswith("ModuleNotFoundError: No module named 'nowhere'")


def test_modules_and_packages_run_as_main_beside_their_siblings(tmp_path, monkeypatch):
    text = "import sys; from {} import x; name, argv = __name__, sys.argv[1:]"
    folder = tmp_path / "found_tool"
    folder.mkdir()
    for path, content in {
        "found_single.py": text.format("found_sibling"),
        "found_sibling.py": "x = 3",
        "found_tool/__init__.py": "",
        "found_tool/__main__.py": text.format(".sub"),
        "found_tool/sub.py": "x = 3",
    }.items():
        (tmp_path / path).write_text(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    arguments = ["--device", "a", "--", "b"]
    for target, path in (("found_single", "found_single.py"), ("found_tool", "found_tool/__main__.py")):
        names = running.execute(running.Run(target, is_module=True, around=AROUND_SCRIPTS), arguments)
        assert (names["name"], names["x"], names["argv"]) == ("__main__", 3, arguments)
        assert names["__file__"] == str(tmp_path / path)
        assert names["__package__"] == path.rpartition("/")[0]
    with pytest.raises(ModuleNotFoundError, match="found_nothing"):
        running.execute(running.Run("found_nothing", is_module=True, around=AROUND_SCRIPTS), [])
    monkeypatch.chdir("/")
    monkeypatch.delitem(sys.modules, "found_sibling", raising=False)
    assert running.execute(running.Run(str(tmp_path / "found_single.py"), around=AROUND_SCRIPTS), [])["x"] == 3


PICKLES = """
import argparse, pickle, warnings, torch
torch.save({"args": argparse.Namespace(lr=0.5)}, PATH)
try:
    lr = torch.load(PATH)["args"].lr
except pickle.UnpicklingError:
    lr = None
try:
    torch.load(PATH, weights_only=True)
    asked_for = "everything"
except pickle.UnpicklingError:
    asked_for = "weights"
"""


@pytest.mark.parametrize("allowed, lr", [(False, None), (True, 0.5)])
def test_old_checkpoints_load_where_pickles_are_allowed(allowed, lr, tmp_path, capsys):
    text = PICKLES.replace("PATH", repr(str(tmp_path / "checkpoint.pt")))
    environment = dict(os.environ)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names = run(tmp_path, text, device=None, allow_pickle=allowed)
    assert names["lr"] == lr and names["asked_for"] == "weights"
    assert ("--allow-pickle: torch.load unpickles any object" in capsys.readouterr().err) == allowed
    assert dict(os.environ) == environment


# The last line of a script, and the option that its error is told with: what loads such a checkpoint, or does without a GPU.
ENDS = {
    "a refused checkpoint": ("raise __import__('pickle').UnpicklingError('no')", "--allow-pickle"),
    "no GPU": ("torch.ones(1).cuda()", "--device cpu"),
    "an error": ("raise ValueError('no')", None),
    "an error of torch": ("torch.ones(2) @ torch.ones(3)", None),
}


@pytest.mark.parametrize("case", ENDS)
def test_errors_end_with_the_option_that_avoids_them(case, tmp_path, monkeypatch):
    if case == "no GPU" and torch.cuda.is_available():
        pytest.skip("there is a GPU, and the script runs on it")
    line, option = ENDS[case]
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # put back at the end
    script = tmp_path / "script.py"
    script.write_text(f"import torch\n{line}")
    with pytest.raises(Exception) as caught:
        running.execute_as_main(running.Run(str(script)), [])
    notes = " ".join(getattr(caught.value, "__notes__", ()))
    assert [one for one in ("--allow-pickle", "--device cpu") if one in notes] == ([option] if option else [])


def test_options_behind_the_script_are_the_scripts():
    parser = argparse.ArgumentParser()
    running.add_arguments(parser)
    behind = parser.parse_args(["script.py", "--allow-pickle", "--", "--device", "a"])
    assert not behind.allow_pickle and behind.arguments == ["--allow-pickle", "--", "--device", "a"]
    assert parser.parse_args(["--allow-pickle", "script.py"]).allow_pickle


@pytest.mark.slow
def test_an_installed_apex_with_amp_is_kept_unless_replaced(tmp_path):
    for folder in ("apex", "elsewhere"):
        (tmp_path / folder).mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("")
    (tmp_path / "apex" / "amp.py").write_text("origin = 'theirs'\n")
    (tmp_path / "script.py").write_text("from apex import amp\nprint(getattr(amp, 'origin', 'ours'))\n")
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]), "cwd": tmp_path / "elsewhere"}
    assert execute(tmp_path / "script.py", **environment).stdout == "theirs\n"
    assert execute("--replace", tmp_path / "script.py", **environment).stdout == "ours\n"


def test_scripts_of_torch_1_find_what_they_import_from_torch_six(tmp_path):
    assert importlib.util.find_spec("torch._six") is None  # else there is nothing to lend
    text = (
        "from torch._six import container_abcs, inf, int_classes, string_classes\n"
        "assert isinstance([], container_abcs.Sequence) and isinstance(1, int_classes) and inf > 1e300\n"
        "found = isinstance('x', torch._six.string_classes)\n"
    )
    assert run(tmp_path, text, device=None)["found"] is True
    assert "torch._six" not in sys.modules and not hasattr(torch, "_six")


def test_everything_is_undone_at_the_end(tmp_path, monkeypatch):
    text = (
        "from apex import amp\n"
        "model = torch.nn.Linear(2, 2).cuda()\n"
        "model, opt = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), verbosity=0)\n"
        "torch.set_default_dtype(torch.float64)\n"
        "assert torch.zeros(1, device='cuda').type() == 'torch.cuda.DoubleTensor'\n"
        "assert torch.accelerator.current_accelerator(check_available=True) is None\n"  # Adam asks one for its stream
    )
    ampkit.apex.uninstall()
    owners = [torch, torch.Tensor, torch.cuda, torch.nn.Module, torch.autocast, torch.UntypedStorage, torch.distributed]
    owners += [torch.accelerator, torch.utils.data.DataLoader, torch.nn.parallel.DistributedDataParallel]
    monkeypatch.setattr(helpers, "NAMESPACES", [*owners, torch.nn.utils.rnn.PackedSequence])
    state = [torch.cuda.is_available(), list(sys.argv), list(sys.path), dict(os.environ)]
    with helpers.torch_left_as_found():
        names = run(tmp_path, text, "--lr", "1")
    assert names["model"].weight.dtype is torch.float32
    assert [torch.cuda.is_available(), sys.argv, sys.path, dict(os.environ)] == state
    assert not ampkit.apex.is_installed() and torch.get_default_dtype() is torch.float32


LEGACY = """
import time, torch, torch.nn as nn
from torch.autograd import Variable
torch.cuda.set_device(0); torch.cuda.manual_seed_all(3); torch.cuda.empty_cache()
assert torch.cuda.is_available() and torch.cuda.is_bf16_supported() and not torch.cuda.is_current_stream_capturing()
assert torch.cuda.device_count() == 1 and torch.cuda.current_device() == torch.cuda.memory_allocated() == 0
x = Variable(torch.cuda.FloatTensor([[1, 2]]))
assert x.cuda(0, non_blocking=True).sum().item() == 3
assert isinstance(torch.zeros(1, device="cuda:0"), torch.cuda.FloatTensor)
assert torch.zeros(1).to(0).type(torch.cuda.HalfTensor).dtype is torch.float16
assert torch.zeros(1).type("torch.cuda.LongTensor").dtype is torch.int64
assert torch.tensor([1.0], device=torch.device("cuda", 0)).new_zeros(2, device="cuda").shape == (2,)
assert torch.zeros(2).half().type() == "torch.cuda.HalfTensor"
model = nn.DataParallel(nn.Linear(2, 2)).cuda(); model.to("cuda"); model(x).sum().backward()
model = nn.Linear(2, 2).to(device="cuda", dtype=torch.float64); assert model.weight.dtype is torch.float64
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
start.record(); time.sleep(0.01); end.record(); torch.cuda.synchronize(); assert start.elapsed_time(end) > 5
print(torch.cuda.memory_allocated(), torch.cuda.get_device_name(0), torch.cuda.device_count(), torch.cuda.current_device())
with torch.cuda.device(0), torch.cuda.stream(torch.cuda.Stream()): x.record_stream(torch.cuda.current_stream())
torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
assert torch.zeros(1, device=torch.cuda.Stream().device).item() == 0
torch.cuda.nvtx.range_push("x"); torch.cuda.nvtx.range_pop()
g = torch.Generator(device="cuda"); g.manual_seed(1); torch.randn(2, generator=g, device="cuda")
torch.save({"a": torch.ones(1)}, PATH); assert torch.load(PATH, map_location="cuda:0")["a"].item() == 1
assert torch.load(PATH, map_location=lambda s, l: s.cuda(0))["a"].item() == 1
packed = nn.utils.rnn.pack_padded_sequence(torch.zeros(3, 1, 2), [3]).cuda()
assert torch.as_tensor([1], device="cuda").tolist() == [1] and torch.arange(3, device="cuda").tolist() == [0, 1, 2]
print("ALL FINE")
"""


def test_legacy_cuda_calls_on_the_cpu(tmp_path):
    script = tmp_path / "legacy.py"
    script.write_text(LEGACY.replace("PATH", repr(str(tmp_path / "file.pt"))))
    assert "ALL FINE" in execute("--device", "cpu", script).stdout
