"""The CIFAR-10 example: a resumed run is the run that did not stop, CIFAR-10's files are read, and sizes are measured."""

import pickle
import runpy
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers import ROOT, others_slow

for package in ("torchvision", "sklearn"):
    pytest.importorskip(package, reason="the example needs it")

FOLDER = ROOT / "examples" / "cifar10"


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(FOLDER / "cifar10.py"))


@pytest.fixture(autouse=True)
def nondeterministic_again():
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("level", others_slow("O2", of=["O0", "O1", "O2", "O3"]))
def test_resuming_changes_no_bit(example, level, tmp_path, capsys):
    file = tmp_path / "cifar10.pt"
    example["main"](["--check-resume", "--iters", "2", "--batch-size", "2", "--opt-level", level, "--save", str(file)])
    assert f"{level}: 1 iterations after resuming" in capsys.readouterr().out
    assert torch.load(file)["model"]["classifier.1.weight"].dtype is torch.float32


def test_a_difference_after_resuming_is_noticed(example, tmp_path, monkeypatch):
    class Forgetful(example["Run"]):
        def load(self, file):
            super().load(file)
            self.optimizer.state.clear()  # the momentum

    monkeypatch.setitem(example["check_resume"].__globals__, "Run", Forgetful)
    arguments = ["--check-resume", "--iters", "2", "--batch-size", "2", "--save", str(tmp_path / "cifar10.pt")]
    with pytest.raises(AssertionError):
        example["main"](arguments)


def test_the_files_of_cifar10_are_read(example, tmp_path, monkeypatch):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    pixels = np.arange(2 * 3072, dtype=np.uint8).reshape(2, 3072)  # each image red, green, blue, by rows
    for name in ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"]:
        (folder / name).write_bytes(pickle.dumps({"data": pixels, "labels": [3, 7]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    cifar = example["torchvision"].datasets.CIFAR10
    monkeypatch.setattr(cifar, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *args: True)
    args = example["parse_args"](["--data", str(tmp_path)])
    images, labels, judged, truth = example["load_images"](args)
    assert images.shape == (10, 3, 32, 32) and judged.shape == (2, 3, 32, 32)
    assert labels.tolist() == [3, 7] * 5 and truth.tolist() == [3, 7]
    assert torch.equal(judged.flatten(1), torch.tensor(pixels).float() / 128 - 1)


def test_a_batch_that_is_no_multiple_of_8_is_noted(example, capsys, tmp_path, monkeypatch):
    few = tuple(part[:8] for part in example["load_images"](example["parse_args"]([])))
    monkeypatch.setitem(example["main"].__globals__, "load_images", lambda args: few)
    example["main"](["--iters", "0", "--batch-size", "12", "--save", str(tmp_path / "cifar10.pt")])
    said = capsys.readouterr()
    assert "12 is no multiple of 8" in said.err and "0 iterations" in said.out and "of 8 right" in said.out


def test_levels_are_compared_with_float32_in_time_and_memory():
    command = [sys.executable, str(FOLDER / "cifar10.py"), "--compare", "O2", "--iters", "1", "--batch-size", "8"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    rows = {row[0]: [float(figure) for figure in row[1:]] for row in map(str.split, done.stdout.splitlines()[1:])}
    assert list(rows) == ["O0", "O2"]
    (time, to_time, peak, to_peak, loss), (time_of_o2, to_time_of_o2, peak_of_o2, to_peak_of_o2, loss_of_o2) = (
        rows.values()
    )
    assert to_time == to_peak == 1.0
    assert to_time_of_o2 == pytest.approx(time_of_o2 / time, rel=0.02, abs=0.02)  # the table rounds
    assert to_peak_of_o2 == pytest.approx(peak_of_o2 / peak, rel=0.02, abs=0.02)
    assert loss_of_o2 == pytest.approx(loss, rel=0.05)  # one iteration from the same weights


@pytest.mark.slow
def test_sizes_are_compared_with_64_channels():
    rows = runpy.run_path(str(FOLDER / "multiples_of_8.py"))["rows"](1)
    assert [size for size, _, _ in rows] == [60, 63, 64, 65, 68, 72]
    assert rows[2] == (64, 1.0, 1.0) and all(ratio > 0 for _, *ratios in rows for ratio in ratios)
