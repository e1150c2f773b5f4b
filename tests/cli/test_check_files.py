"""``ampkit check FILE``: what it says of checkpoints, and that it runs no code from them."""

import os
import pickle
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import backward, python
from safetensors.torch import save_file
from torch import nn

import ampkit
from ampkit.__main__ import main


def state():
    """Return a state dict in which 4 of 8 elements of a norm never moved."""
    norm = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.9, 1.1, 0.5, 2.0]).bfloat16()
    return {"fc.weight": torch.ones(8, 4).bfloat16(), "norm.weight": norm, "norm.bias": torch.zeros(8).bfloat16()}


def optimizer_state(dtype):
    first, second = torch.tensor([1.0, 0.0, 1e-3, 1.0]), torch.tensor([1e-3, 0.0, 1e-9, 1e-2])
    moments = {"step": torch.tensor(5.0), "exp_avg": first.to(dtype), "exp_avg_sq": second.to(dtype)}
    return {"state": {0: moments}, "param_groups": [{"lr": 1e-3, "params": [0]}]}


@pytest.fixture
def check(capsys):
    def run(path):
        code = main(["check", str(path)])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def as_safetensors(folder):
    save_file(state(), folder / "model.safetensors")
    return folder / "model.safetensors"


def as_shards(folder):
    for number in (1, 2):
        part = dict(list(state().items())[number - 1 :: 2])
        save_file(part, folder / f"model-0000{number}-of-00002.safetensors")
    return folder


def as_torch(folder):
    torch.save({"model": state()}, folder / "model.pt")
    return folder / "model.pt"


@pytest.mark.parametrize("write", [as_safetensors, as_shards, as_torch])
def test_norms_that_never_moved_are_found_in_every_format(write, check, tmp_path):
    code, printed, _ = check(write(tmp_path))
    assert code == 1 and "48 elements: bfloat16 100%" in printed
    assert "4 of 8 elements of norms are 1.0, where they began (4 of 8 of '" in printed
    assert "norm.weight'). If this was trained: bfloat16 rounds updates of 1.0 below 0.2% away" in printed


@pytest.mark.parametrize(
    "dtype, words",
    [
        (torch.float16, "second moments in float16: those below 6e-8 are 0"),
        (torch.bfloat16, "second moments in bfloat16: to nearest they lose updates of less than 0.2%"),
        (torch.float32, None),
    ],
)
def test_moments_are_judged_by_their_precision(dtype, words, check, tmp_path):
    torch.save({"model": {"w": torch.ones(4).to(dtype)}, "optimizer": optimizer_state(dtype)}, tmp_path / "all.pt")
    code, printed, _ = check(tmp_path / "all.pt")
    assert code == (words is not None) and (words or "nothing seen") in printed
    assert ("no float32 values of them" in printed) == (dtype is not torch.float32)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_what_a_level_saves_has_lost_nothing(level, state_dtype, check, tmp_path):
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    optimizer = ampkit.optimizers.AdamW(model.parameters(), state_dtype=state_dtype)
    ampkit.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    backward(model(torch.randn(2, 4)).float().pow(3).mean(), optimizer)
    optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": ampkit.state_dict()}
    torch.save(saved, tmp_path / "all.pt")
    code, printed, _ = check(tmp_path / "all.pt")
    assert code == 0 and "nothing seen" in printed


def test_rests_that_an_optimizer_saves_complete_its_weights(check, tmp_path):
    moments = optimizer_state(torch.float32)
    moments["state"][0]["rest"] = torch.zeros(4, dtype=torch.int16)
    torch.save({"model": {"w": torch.ones(4).bfloat16()}, "optimizer": moments}, tmp_path / "all.pt")
    code, printed, _ = check(tmp_path / "all.pt")
    assert code == 0 and "masters  4 elements: int16 100%" in printed


class Runs:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_nothing_of_a_file_is_run(check, tmp_path):
    torch.save({"model": Runs(tmp_path / "ran")}, tmp_path / "hostile.pt")
    code, _, error = check(tmp_path / "hostile.pt")
    assert code == 2 and "mkdir" in error and "not unpickled" in error
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    code, _, error = check(tmp_path / "dcp")
    assert code == 2 and "would have to be unpickled" in error and not (tmp_path / "ran").exists()


def test_the_command_that_the_refusal_of_a_distributed_checkpoint_names_makes_a_file_that_is_read(check, tmp_path):
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save({"model": state()}, checkpoint_id=tmp_path / "saved")
    code, _, error = check(tmp_path / "saved")
    (words,) = re.findall("'python -m (.*) FILE.pt'", error)
    assert python("-m", *words.split(), tmp_path / "model.pt").returncode == 0
    assert code == 2 and check(tmp_path / "model.pt")[0] == 1


HEADER = b'{"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}'
CUT_OFF = len(HEADER).to_bytes(8, "little") + HEADER + bytes(12)


@pytest.mark.parametrize(
    "name, content", [("a.pt", b"text"), *(("a.safetensors", content) for content in (b"\xff" * 20, b"", CUT_OFF))]
)
def test_what_is_no_checkpoint_is_said(name, content, check, tmp_path):
    (tmp_path / name).write_bytes(content)
    code, _, error = check(tmp_path / name)
    assert code == 2 and name in error
    (tmp_path / "empty").mkdir()
    assert check(tmp_path / "empty")[0] == 2
