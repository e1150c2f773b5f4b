"""Settings that strangers' scripts rely on under ``ampkit run``: devices, the rank, their logging; and whether amp was used."""

import io
import logging
import os
import sys

import pytest
import torch
from helpers import others_slow, python
from test_run import RUN, run
from torch import nn

import ampkit.apex

DECISIONS = {
    "is_cuda": "found = torch.ones(2).cuda().is_cuda",
    "is_cuda of a parameter": "found = next(torch.nn.Linear(2, 2).cuda().parameters()).is_cuda",
    "a device's type": "found = torch.device('cuda:0' if torch.cuda.is_available() else 'cpu').type == 'cuda'",
    "a tensor's device": "x = torch.ones(2).cuda(); found = x.device.type == 'cuda' and x.device == torch.device('cuda:0')",
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
def test_an_overflow_is_printed_once_whoever_logs(when, to, tmp_path, capsys, monkeypatch):
    root, log_file = logging.getLogger(), io.StringIO()
    level, handler = root.level, logging.StreamHandler(getattr(sys, to) if to else log_file)
    monkeypatch.setattr(torch, "handler_of_test", handler, raising=False)
    attach = (
        "import logging; logging.getLogger().setLevel('INFO'); logging.getLogger().addHandler(torch.handler_of_test)\n"
    )
    try:
        run(tmp_path, attach + OVERFLOW.replace("AFTER", "") if when == "before" else OVERFLOW.replace("AFTER", attach))
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    out, err = capsys.readouterr()
    assert out.count("\nGradient overflow.  Skipping step") == 1 and "Gradient overflow" not in err
    assert log_file.getvalue().count("Gradient overflow") == (to is None)  # a log file of the script has it as well
    assert logging.getLogger("ampkit").propagate


# Whether the script is told that it never called amp.initialize.
UNUSED = {
    "never called": ("from apex import amp", True),
    "by an option": ("from apex import amp\nif False: amp.initialize(torch.nn.Linear(1, 1))", True),
    "called": ("from apex import amp\namp.initialize(torch.nn.Linear(1, 1), verbosity=0)", False),
    "called with enabled=False": ("from apex import amp\namp.initialize(torch.nn.Linear(1, 1), enabled=False)", False),
    "the first interface": ("from apex import amp\nhandle = amp.init()", False),
    "the first interface with enabled=False": ("from apex import amp\namp.init(enabled=False)", False),
    "no apex": ("", False),
}


@pytest.mark.parametrize("case", UNUSED)
def test_a_script_that_never_calls_amp_is_told_of_at_the_end(case, tmp_path, capsys):
    text, is_told = UNUSED[case]
    from ampkit.apex.amp import _amp_state

    _amp_state.opt_properties, _amp_state.init_was_called = _amp_state.opt_properties_before_initialize, False
    run(tmp_path, text, device=None)
    assert ("never called amp.initialize" in capsys.readouterr().err) == is_told


# Observers

FIND = "import importlib.util; found = importlib.util.find_spec('amp_C') is not None"
FALLBACK = "try:\n    from apex.normalization import FusedRMSNorm as found\nexcept {}: found = None"
LIBRARY = "import amp_C\nfound = True"
WITHOUT_FALLBACK = "try: from apex import amp; found = True\nexcept ImportError: {}"
TRY_LIBRARY = "try: from library_of_test import found\nexcept ModuleNotFoundError: found = False"
OBSERVED = {
    "a plain import": ("from apex import amp; found = True", True),
    "one that says what to install": (WITHOUT_FALLBACK.format("raise ImportError('install apex')"), True),
    "one that exits": (WITHOUT_FALLBACK.format("import sys; sys.exit('install apex')"), True),
    "a part": ("from apex.optimizers import FusedAdam as found", True),
    "amp_C": ("import amp_C as found", True),
    "with a fallback": (FALLBACK.format("ImportError"), False),
    "a look": (FIND, False),
    "a look beside an import": ("from apex import amp\n" + FIND, False),
    "a library": (TRY_LIBRARY, False),
    "a library beside an import": ("from apex import amp\n" + TRY_LIBRARY, False),
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


NET = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(2, 2)
    def forward(self, x): return self.head(x)
class Other(Net): pass
def answers(net, other):
    return [
        type(net) is Net, type(net) == Net, type(other) == Net, type(net) is type(other), net.__class__.__name__,
        {Net: "a net", Other: "another"}[type(other)], type(net.head) is torch.nn.Linear, isinstance(other, type(net)),
        net.forward.__func__ is Net.forward, type(net).__call__ is torch.nn.Module.__call__,
    ]
"""


@pytest.mark.parametrize("level", ("O0", "O1", "O2", "O3", "O4", "O5"))
def test_a_script_tells_its_models_by_their_classes(level, tmp_path):
    text = NET + (
        "from apex import amp\n"
        "nets = [Net().cuda(), Other().cuda()]; before = answers(*nets)\n"
        "sgd = torch.optim.SGD([p for net in nets for p in net.parameters()], lr=0.1)\n"
        f"nets, sgd = amp.initialize(nets, sgd, opt_level={level!r}, verbosity=0)\n"
        "nets[0](torch.ones(3, 2).cuda()); after = answers(*nets)\n"
    )
    names = run(tmp_path, text)
    assert names["after"] == names["before"] and names["before"][:4] == [True, True, False, False]


AMP = "from apex import amp; net = amp.initialize(MODEL, opt_level='O2', verbosity=0); found = net.weight"
LOWERED = {
    "amp": (AMP, None, torch.bfloat16),
    "amp as chosen": (AMP, "float16", torch.float16),
    "half": ("found = MODEL.half()(ONES.half())", None, torch.float16),
}


@pytest.mark.parametrize("case", LOWERED)
def test_the_precision_that_is_announced_is_the_one_of_amp(case, tmp_path, capsys, monkeypatch):
    text, chosen, computes_in = LOWERED[case]
    monkeypatch.delenv("AMPKIT_LOWER_PRECISION", raising=False)
    if chosen is not None:
        monkeypatch.setenv("AMPKIT_LOWER_PRECISION", chosen)
    text = text.replace("MODEL", "torch.nn.Linear(3, 2).cuda()").replace("ONES", "torch.ones(4, 3).cuda()")
    assert run(tmp_path, f"{text}; dtype = found.dtype")["dtype"] is computes_in
    told = capsys.readouterr().err
    assert f"The lower precision of amp is {chosen or 'bfloat16'} there" in told and "by .half(), stays float16" in told


PROCESS = "child = multiprocessing.get_context({!r}).Process(target=work, args=(0,)); child.start(); child.join()"
LOADER = "torch.utils.data.DataLoader([0], num_workers=1, multiprocessing_context='spawn', collate_fn=work)"
CHILDREN = {
    "Process": PROCESS.format("spawn"),
    "forkserver": PROCESS.format("forkserver"),
    "a loader": f"for _ in {LOADER}: pass",
}


@pytest.mark.parametrize("case", others_slow("Process", of=list(CHILDREN)))
def test_children_end_without_a_traceback(case, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, torch\nfrom apex import amp\n"
        "def work(item):\n"
        "    model = torch.nn.Linear(3, 1).cuda()\n"
        "    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level='O1', verbosity=0)\n"
        "    print('worked', type(model(torch.ones(1, 3).cuda()).item()).__name__, flush=True)\n"
        f"if __name__ == '__main__':\n    {CHILDREN[case]}\n    print('joined')\n"
    )
    done = python(*RUN, "--device", "cpu", script)
    assert done.returncode == 0 and done.stdout.split("\n")[:2] == ["worked float", "joined"], done.stdout + done.stderr
    assert not any(word in done.stderr for word in ("Traceback", "Exception ignored", "Error")), done.stderr


ON_TWO_RANKS = """
import sys, torch
from apex import amp
def main(rank):
    torch.distributed.init_process_group("nccl", "file://FOLDER/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv1d(2, 3, 1), torch.nn.BatchNorm1d(3))
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model).cuda()
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    x = torch.randn(8, 2, 5)[4 * rank : 4 * rank + 4].cuda()
    (model(x) ** 3).mean().backward()
    if rank == 0: torch.save([p.grad for p in model.parameters()], "FOLDER/gradients.pt")
    torch.distributed.destroy_process_group()
if __name__ == "__main__": torch.multiprocessing.spawn(main, nprocs=2)
"""


@pytest.mark.slow
def test_torchs_synchronised_batch_norm_trains_under_ddp(tmp_path):
    (tmp_path / "script.py").write_text(ON_TWO_RANKS.replace("FOLDER", str(tmp_path)))
    done = python(*RUN, "--device", "cpu", tmp_path / "script.py")
    assert done.returncode == 0, done.stderr
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3))
    x = torch.randn(8, 2, 5)
    (model.double()(x.double()) ** 3).mean().backward()
    found = torch.load(tmp_path / "gradients.pt", weights_only=True)
    for mine, theirs in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.grad.float(), rtol=1e-4, atol=1e-5)
