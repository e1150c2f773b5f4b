"""What scripts of strangers go by under ``ampkit run``: devices, the rank, their logging; and whether amp was used."""

import io
import logging
import os
import sys

import pytest
import torch
from torch import nn

import ampkit.apex
from ampkit.__main__ import AROUND_SCRIPTS
from ampkit.scripts import running


def run(folder, text, *arguments, device="cpu", **settings):
    """The names that the script leaves."""
    ampkit.apex.uninstall()
    script = folder / "script.py"
    script.write_text("import torch\n" + text)
    return running.execute(running.Run(str(script), device=device, around=AROUND_SCRIPTS, **settings), arguments)


DECISIONS = {
    "is_cuda": "found = torch.ones(2).cuda().is_cuda",
    "is_cuda of a parameter": "found = next(torch.nn.Linear(2, 2).cuda().parameters()).is_cuda",
    "a device's type": "found = torch.device('cuda:0' if torch.cuda.is_available() else 'cpu').type == 'cuda'",
    "a tensor's device": "x = torch.ones(2).cuda(); found = x.device.type == 'cuda' and x.device == torch.device('cuda:0')",
    "a device handed on": "x = torch.ones(2).cuda(); found = (torch.arange(2, device=x.device) + x).sum().item() == 3",
    "a device in a hook": (
        "d = torch.device('cuda'); x = torch.ones(2, requires_grad=True); mask = torch.zeros(2)\n"
        "x.register_hook(lambda g: g * mask.to(d)); (x * 2).sum().backward(); found = x.grad.tolist() == [0, 0]"
    ),
    "a device in a backward": (
        "d = torch.device('cuda')\n"
        "class Twice(torch.autograd.Function):\n"
        "    forward = staticmethod(lambda ctx, x: 2 * x)\n"
        "    backward = staticmethod(lambda ctx, g: g * torch.full((2,), 2.0, device=d))\n"
        "x = torch.ones(2, requires_grad=True)\n"
        "found = torch.autograd.grad(Twice.apply(x).sum(), x)[0].tolist() == [2, 2]"
    ),
    "the default device": "with torch.device('cuda'): found = torch.ones(2).is_cuda and torch.ones(2).sum().item() == 2",
    "as numpy": "found = torch.ones(2).cuda().cpu().numpy().sum() == 2",
}


@pytest.mark.parametrize("decision", DECISIONS)
def test_what_a_script_decides_by_answers_as_on_a_gpu(decision, tmp_path):
    assert run(tmp_path, DECISIONS[decision])["found"]
    x = torch.ones(1)
    assert not x.is_cuda and x.device == torch.device("cpu")


def test_torchs_synchronised_batch_norm_trains_and_is_saved_under_its_name(tmp_path):
    text = (
        "torch.manual_seed(0); x = torch.randn(6, 2, 5)\n"
        "plain = torch.nn.Sequential(torch.nn.Conv1d(2, 3, 1), torch.nn.BatchNorm1d(3))\n"
        "import copy; model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain)).cuda()\n"
        "assert type(model[1]) is torch.nn.SyncBatchNorm and isinstance(model[1], torch.nn.modules.batchnorm._BatchNorm)\n"
        "for one in (plain, model): one(x).square().sum().backward()\n"
        "gradients = [[p.grad for p in one.parameters()] for one in (plain, model)]\n"
        f"torch.save(torch.nn.SyncBatchNorm(3), {str(tmp_path / 'layer.pt')!r})\n"
    )
    before = nn.SyncBatchNorm
    names = run(tmp_path, text)
    for mine, theirs in zip(*names["gradients"], strict=True):
        torch.testing.assert_close(mine, theirs)
    assert nn.SyncBatchNorm is before
    assert type(torch.load(tmp_path / "layer.pt", weights_only=False)) is before


RANKS = {
    "of 2019": ("'--local_rank', type=int, default=-1", (), "1", 1),
    "with a hyphen, required": ("'--local-rank', type=int, required=True", (), "1", 1),
    "a string": ("'--gpu', '--local_rank', dest='local_rank'", (), "1", "1"),
    "given": ("'--local_rank', type=int", ("--local_rank", "0"), "1", 0),
    "without a launcher": ("'--local_rank', type=int, default=-1", (), None, -1),
}


@pytest.mark.parametrize("case", RANKS)
@pytest.mark.parametrize("parse", ("parse_args()", "parse_known_args()[0]"))
def test_local_rank_is_that_of_the_launcher(case, parse, tmp_path, monkeypatch):
    option, arguments, rank, expected = RANKS[case]
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    text = f"import argparse; parser = argparse.ArgumentParser(); parser.add_argument({option})\nfound = parser.{parse}.local_rank"
    assert run(tmp_path, text, *arguments)["found"] == expected


OVERFLOW = """
from apex import amp
model = torch.nn.Linear(3, 2).cuda()
model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2")
AFTER
with amp.scale_loss(model(torch.ones(4, 3).cuda()).float().mean() * float("inf"), optimizer) as scaled: scaled.backward()
optimizer.step()
"""


@pytest.mark.parametrize("to", ("stdout", "stderr", None))
@pytest.mark.parametrize("when", ("before", "after"))
def test_an_overflow_is_printed_once_whoever_logs(when, to, tmp_path, capsys):
    root, own = logging.getLogger(), io.StringIO()
    level, handler = root.level, logging.StreamHandler(getattr(sys, to) if to else own)
    logs = {"handler": handler, "root": root}
    try:
        attach = "import logging; logging.getLogger().setLevel('INFO'); logging.getLogger().addHandler(torch.handler_of_test)\n"
        torch.handler_of_test = logs["handler"]
        text = attach + OVERFLOW.replace("AFTER", "") if when == "before" else OVERFLOW.replace("AFTER", attach)
        run(tmp_path, text)
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        del torch.handler_of_test
    out, err = capsys.readouterr()
    assert out.count("\nGradient overflow.  Skipping step") == 1 and "Gradient overflow" not in err
    assert own.getvalue().count("Gradient overflow") == (to is None)  # a log file of the script has it as well
    assert logging.getLogger("ampkit").propagate


UNUSED = {
    "never called": ("from apex import amp", True),
    "by an option": ("from apex import amp\nif False: amp.initialize(torch.nn.Linear(1, 1))", True),
    "called": ("from apex import amp\namp.initialize(torch.nn.Linear(1, 1), verbosity=0)", False),
    "called with enabled=False": ("from apex import amp\namp.initialize(torch.nn.Linear(1, 1), enabled=False)", False),
    "another part": ("from apex.normalization import FusedLayerNorm", False),
    "no apex": ("", False),
}


@pytest.mark.parametrize("case", UNUSED)
def test_a_script_that_never_calls_amp_is_told_of_at_the_end(case, tmp_path, capsys):
    text, is_told = UNUSED[case]
    from ampkit.apex.amp import _amp_state

    _amp_state.opt_properties = _amp_state.opt_properties_before_initialize
    run(tmp_path, text, device=None)
    assert ("never called amp.initialize" in capsys.readouterr().err) == is_told


# Observers

FIND = "import importlib.util; found = importlib.util.find_spec('amp_C') is not None"
FALLBACK = "try:\n    from apex.normalization import FusedRMSNorm as found\nexcept {}: found = None"
LIBRARY = "import amp_C\nfound = True"
WITHOUT_FALLBACK = "try: from apex import amp; found = True\nexcept ImportError: raise ImportError('install apex')"
OBSERVED = {
    "a plain import": ("from apex import amp; found = True", True),
    "one that says what to install": (WITHOUT_FALLBACK, True),
    "a part": ("from apex.optimizers import FusedAdam as found", True),
    "amp_C": ("import amp_C as found", True),
    "with a fallback": (FALLBACK.format("ImportError"), False),
    "any fallback": (FALLBACK.format("Exception"), False),
    "one of several": (FALLBACK.format("(ModuleNotFoundError, AttributeError)"), False),
    "a look": (FIND, False),
    "a look beside an import": ("from apex import amp\n" + FIND, False),
    "a library": ("try: from library_of_test import found\nexcept ModuleNotFoundError: found = False", False),
    "a library beside an import": (
        "from apex import amp\ntry: from library_of_test import found\nexcept ModuleNotFoundError: found = False",
        False,
    ),
    "a file of the script": ("from own_file_of_test import found", True),
}


@pytest.mark.parametrize("case", OBSERVED)
def test_under_an_observer_only_what_cannot_do_without_apex_finds_it(case, tmp_path, monkeypatch):
    text, expected = OBSERVED[case]
    library = tmp_path / "site-packages"
    library.mkdir()
    (library / "library_of_test.py").write_text(LIBRARY)
    (tmp_path / "own_file_of_test.py").write_text("from apex.normalization import FusedRMSNorm as found")
    monkeypatch.setattr(sys, "path", [*sys.path, str(library)])
    for name in ("library_of_test", "own_file_of_test"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert bool(run(tmp_path, text, device=None, needs_apex=False)["found"]) == expected
    if "look" not in case:  # and with --apex all do
        for name in ("library_of_test", "own_file_of_test"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        assert run(tmp_path, text, device=None)["found"]
    assert not ampkit.apex.is_installed() and os.environ.get("AMPKIT_RUN") is None
