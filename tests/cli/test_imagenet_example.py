"""The ImageNet example on a handful of digits: its command lines, metrics, checkpoints and complaints."""

import argparse
import contextlib
import copy
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import ROOT, others_slow, python
from soak.death import same

import ampkit

EXAMPLE = ROOT / "examples" / "imagenet"
pytest.importorskip("torchvision", reason="the example trains torchvision models")

#: The arguments of the commands in the table of the page.
LINES = re.findall(r"^\| .* \| `[^`]*main_amp\.py ([^`]*)` \|$", (EXAMPLE / "README.md").read_text(), re.MULTILINE)

ROW = "phase epoch iteration loss top1 top5 images_per_s loss_scale skipped peak_memory_bytes".split()


@pytest.fixture(scope="module")
def example():
    sys.path.insert(0, str(EXAMPLE))
    names = ["checkpoint", "data", "main_amp", "make_digits", "metrics"]
    try:
        yield {name: __import__(name) for name in names}
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in names:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def digits(example, tmp_path_factory):
    """The folder of all digits, and a folder of links to a few: 3 batches of 16 in train/, 12 images in val/."""
    whole, few = tmp_path_factory.mktemp("digits"), tmp_path_factory.mktemp("few")
    example["make_digits"].make_digits(whole)
    for split, per_class, classes in (("train", 12, 4), ("val", 3, 4)):
        for label in range(classes):
            (few / split / str(label)).mkdir(parents=True)
            for image in sorted((whole / split / str(label)).iterdir())[:per_class]:
                (few / split / str(label) / image.name).symlink_to(image)
    return {"whole": whole, "few": few}


@pytest.fixture
def train(example, digits, tmp_path):
    """Run main_amp in this process on the few digits; returns the rows that it wrote. Leaves torch as it was."""
    benchmark, deterministic = torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()

    def run(options: str, out: str = "out", data: Path = digits["few"]) -> list[dict]:
        short = f"--b 16 --image-size 32 --workers 0 --warmup-epochs 0 --metrics {tmp_path / out}.jsonl"
        argv = [*shlex.split(short), "--checkpoint-dir", str(tmp_path / out), *shlex.split(options), str(data)]
        try:
            example["main_amp"].main(argv)
        finally:
            ampkit.close()
        return read_rows(tmp_path / f"{out}.jsonl")

    yield run
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = benchmark


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_lines_of_the_page_name_every_level(example):
    found = [example["main_amp"].parse_args(shlex.split(line)) for line in LINES]
    assert {args.opt_level for args in found} == {"O0", "O1", "O2", "O3", "O4", "O5"}
    assert len(found) >= 10 and any(args.evaluate for args in found) and any(args.prof for args in found)


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_the_page_is_understood(example, line):
    words = shlex.split(line)
    args, options = example["main_amp"].parse_args(words), dict(itertools.pairwise(words))
    assert (args.arch, args.batch_size, args.workers) == ("resnet50", int(options["--b"]), 4)
    assert (args.opt_level, args.data) == (options["--opt-level"], Path("."))
    assert args.keep_batchnorm_fp32 is (True if "--keep-batchnorm-fp32" in words else None)
    assert args.loss_scale == (128.0 if "--loss-scale" in words else None)
    assert args.sync_bn is ("--sync_bn" in words)
    assert args.image_size == 224


def test_local_rank_comes_from_the_launcher_in_each_spelling(example, monkeypatch):
    parse_args = example["main_amp"].parse_args
    assert [parse_args([f"{spelling}=1"]).local_rank for spelling in ("--local-rank", "--local_rank")] == [1, 1]
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert parse_args([]).local_rank == 3


# SqueezeNet has dropout, so it needs its random numbers back too.
RESUMED = {"O0": "resnet18", "O1": "squeezenet1_1", "O2": "resnet18"}


@pytest.mark.parametrize("level, arch", others_slow(("O1", "squeezenet1_1"), of=RESUMED.items()))
def test_resume_in_mid_epoch_equals_not_having_stopped(train, tmp_path, level, arch):
    common = f"-a {arch} --opt-level {level}"  # 3 iterations make an epoch
    whole = train(f"{common} --max-iters 5", "whole")
    train(f"{common} --max-iters 2", "parts")
    parts = train(f"{common} --max-iters 5 --resume {tmp_path / 'parts' / 'checkpoint.pth.tar'}", "parts")

    def losses(rows):
        return [(row["epoch"], row["iteration"], row["loss"], row["top5"]) for row in rows if row["phase"] == "train"]

    assert [row[:2] for row in losses(whole)] == [(0, 1), (0, 2), (0, 3), (1, 4), (1, 5)]
    assert losses(parts) == losses(whole)
    assert [row["loss"] for row in parts][-1] == [row["loss"] for row in whole][-1]
    found, expected = load_checkpoint(tmp_path / "parts"), load_checkpoint(tmp_path / "whole")
    assert found.pop("best_top1") >= 0 <= expected.pop("best_top1")  # validated at other moments
    assert same(found, expected)


def load_checkpoint(folder: Path) -> dict:
    return torch.load(folder / "checkpoint.pth.tar", weights_only=True)


def test_metrics_rows_have_every_key_and_count_over_the_run(train, tmp_path):
    rows = train("-a squeezenet1_1 --opt-level O1 --max-iters 4 --augment none --prof 2")
    assert all(list(row) == ROW for row in rows)
    assert [row["phase"] for row in rows] == ["train"] * 3 + ["val", "train", "val"]
    assert [row["iteration"] for row in rows] == [1, 2, 3, 3, 4, 4]
    assert [row["epoch"] for row in rows] == [0] * 4 + [1, 1]
    assert all(row["loss_scale"] == 65536.0 and row["skipped"] == 0 for row in rows)
    assert all(row["images_per_s"] > 0 and row["peak_memory_bytes"] > 2**27 for row in rows)
    assert all(0 <= row["top1"] <= row["top5"] <= 100 for row in rows)
    trace = json.loads((tmp_path / "out" / "trace.json").read_text())
    assert sum(event["name"].startswith("ProfilerStep#") for event in trace["traceEvents"]) == 2
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("parts", [1, 3])
def test_step_in_parts_is_the_step_of_the_batch(example, parts, clip):
    """Ten images, of which three parts have 4, 4 and 2, against float64 over all ten."""
    generator = torch.Generator().manual_seed(0)
    images, target = torch.randn(10, 3, 2, 2, generator=generator), torch.arange(10) % 4
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 4))
    plain = copy.deepcopy(model).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampkit.initialize(model, optimizer, opt_level="O0", loss_scale=128.0, verbosity=0)
    args = argparse.Namespace(accumulate=parts, clip=clip)
    run = example["main_amp"].Run(
        args, torch.device("cpu"), 0, 1, torch.contiguous_format, None, model, model, optimizer, None
    )
    logits, loss = example["main_amp"].train_step(run, images, target)

    expected = torch.nn.functional.cross_entropy(plain(images.double()), target)
    expected.backward()
    gradients = [p.grad for p in plain.parameters()]
    norm = torch.stack([g.norm() for g in gradients]).norm()
    factor = 1.0 if clip is None else clip / norm
    assert logits.shape == (10, 4) and abs(loss.item() - expected.item()) < 1e-6
    for p, before, gradient in zip(model.parameters(), plain.parameters(), gradients):
        torch.testing.assert_close(p.double(), before - 0.1 * factor * gradient, rtol=1e-5, atol=1e-7)


def test_evaluate_repeats_the_validation_of_the_checkpoint(train, tmp_path):
    trained = train("-a shufflenet_v2_x0_5 --opt-level O2 --max-iters 2 --augment none", "trained")
    saved = (tmp_path / "trained" / "checkpoint.pth.tar").read_bytes()
    resume = f"--resume {tmp_path / 'trained' / 'model_best.pth.tar'}"
    evaluated = train(f"-a shufflenet_v2_x0_5 --opt-level O2 --augment none --evaluate {resume}", "evaluated")
    compared = "phase epoch iteration loss top1 top5 loss_scale skipped".split()
    assert [{key: row[key] for key in compared} for row in evaluated] == [{key: trained[-1][key] for key in compared}]
    assert (tmp_path / "trained" / "checkpoint.pth.tar").read_bytes() == saved


def test_checkpoint_with_a_flipped_bit_is_refused(example, tmp_path):
    """torch.load itself does not notice a flipped bit in a tensor."""
    checkpoint = example["checkpoint"]
    state = dict.fromkeys(checkpoint.KEYS, 1) | {"model": {"weight": torch.full((1000,), 3.0)}}
    checkpoint.save(state, tmp_path, is_best=False)
    path = tmp_path / "checkpoint.pth.tar"
    data = bytearray(path.read_bytes())
    data[data.index(torch.full((9,), 3.0).numpy().tobytes()) + 400] ^= 4
    path.write_bytes(data)
    assert not torch.load(path)["model"]["weight"].eq(3.0).all()
    with pytest.raises(checkpoint.CheckpointError, match=r"do not load.*checksum"):
        checkpoint.load(path)


def test_checkpoint_that_cannot_be_continued_says_why(example, train, tmp_path):
    torch.save(torch.zeros(1000), tmp_path / "truncated")
    (tmp_path / "truncated").write_bytes((tmp_path / "truncated").read_bytes()[:-500])
    torch.save({"model": {}}, tmp_path / "bare")
    train("-a shufflenet_v2_x0_5 --max-iters 1", "small")
    for options, words in (
        (f"--resume {tmp_path}/truncated", r"found [\d,]+ bytes in .* expected a whole checkpoint .* Resume from"),
        (f"--resume {tmp_path}/nowhere", r"found no file at .* Check the path"),
        (f"--resume {tmp_path}/bare", "found a file without amp, best_top1, iteration, optimizer"),
        (
            f"-a shufflenet_v2_x0_5 --b 8 --resume {tmp_path}/small/checkpoint.pth.tar",
            r"global_batch 16 \(this run: 8\).* Give the same settings",
        ),
    ):
        with pytest.raises(example["checkpoint"].CheckpointError, match=words):
            train(options, "other")
    assert not (tmp_path / "other").exists()


def test_folder_without_the_data_says_what_was_expected(example, digits, tmp_path):
    def refused(words):
        with pytest.raises(example["data"].DataFolderError, match=words):
            example["data"].open_folder(tmp_path, "none", 32, 0)

    (tmp_path / "train").mkdir()
    refused(r"found a folder with train at .* expected .*val")
    (tmp_path / "train" / "0").mkdir()
    (tmp_path / "val" / "0").mkdir(parents=True)
    refused("without images")
    shutil.rmtree(tmp_path / "train"), shutil.rmtree(tmp_path / "val")
    (tmp_path / "train").symlink_to(digits["whole"] / "train")
    (tmp_path / "val").symlink_to(digits["few"] / "val")
    refused(r"10 classes in .* and 4 in .* Only in one of them: 4, 5, 6")


def test_script_ends_with_one_line_when_the_folder_is_missing(tmp_path):
    ended = python(EXAMPLE / "main_amp.py", "nowhere", cwd=tmp_path)
    assert ended.returncode == 1 and not list(tmp_path.iterdir())
    assert ended.stderr.strip().splitlines()[-1].startswith("main_amp.py: error: found no such folder at 'nowhere'")
    assert "Traceback" not in ended.stderr


def torchrun(folder: Path, options: str, data: Path) -> subprocess.Popen:
    path = Path(ampkit.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": str(path), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*launcher, str(EXAMPLE / "main_amp.py"), "--workers", "0", *options.split(), str(data)]
    folder.mkdir(exist_ok=True)
    with open(folder / "log", "a") as log:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)


def end(launched: subprocess.Popen, seconds: float = 540) -> int:
    """Wait for a launcher; whatever happens, no process that it started goes on."""
    try:
        return launched.wait(timeout=seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launched.pid, signal.SIGKILL)


def run_until_done(folder: Path, options: str, data: Path, iterations: int) -> list[dict]:
    """Return the rows of a run that gets so far. gloo may abort once all is done: the files count, and one retry is allowed."""
    for _ in range(2):
        end(torchrun(folder, f"{options} --metrics rows.jsonl", data))
        if (folder / "checkpoint.pth.tar").exists() and load_checkpoint(folder)["iteration"] == iterations:
            return read_rows(folder / "rows.jsonl")
    pytest.fail((folder / "log").read_text()[-3000:])


@pytest.mark.slow
def test_two_processes_train_with_synchronised_batch_norm(digits, tmp_path):
    """torchrun on the CPU; the rows are rank 0's, and each counts the samples of both."""
    options = "-a resnet18 --b 8 --image-size 32 --opt-level O2 --sync_bn --max-iters 2"
    rows = run_until_done(tmp_path, options, digits["few"], 2)
    assert [row["phase"] for row in rows] == ["train", "train", "val"]
    assert (rows[0]["top1"] * 16 / 100) % 1 == 0  # hits of a batch of 16, 8 on each process
    assert round(rows[-1]["top1"] * 12 / 100, 6) % 1 == 0  # the 12 validation images, each once
    saved = load_checkpoint(tmp_path)
    assert saved["run"]["global_batch"] == 16 and len(saved["rng"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["", "--fsdp"], ids=["ddp", "fsdp"])
def test_job_whose_worker_was_killed_continues_bit_for_bit(digits, tmp_path, wrapper):
    """Three iterations make an epoch; one worker dies by SIGKILL after the fifth, behind the checkpoint of the fourth."""
    options = f"-a resnet18 --b 8 --image-size 32 --opt-level O2 --resume auto --save-freq 2 --max-iters 9 {wrapper}"
    whole = run_until_done(tmp_path / "whole", options, digits["few"], 9)

    killed, rows = tmp_path / "killed", tmp_path / "killed" / "rows.jsonl"
    launched = torchrun(killed, f"{options} --metrics rows.jsonl", digits["few"])
    while launched.poll() is None and not (rows.exists() and len(rows.read_text().splitlines()) >= 6):
        time.sleep(0.01)  # rows of five iterations, and of the validation after the third
    workers = Path(f"/proc/{launched.pid}/task/{launched.pid}/children").read_text().split()
    os.kill(int(workers[-1]), signal.SIGKILL)
    assert end(launched) != 0
    assert load_checkpoint(killed)["iteration"] in (4, 6)  # 6 where it got further before the signal came
    continued = run_until_done(killed, options, digits["few"], 9)

    assert not [path for path in killed.iterdir() if path.name.endswith(".partial")]
    compared = "phase epoch iteration loss top1 top5 loss_scale skipped".split()
    assert [[row[key] for key in compared] for row in continued] == [[row[key] for key in compared] for row in whole]
    assert same(load_checkpoint(killed), load_checkpoint(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.parametrize("options", ["--opt-level O1", "--opt-level O2", "--opt-level O2 --fsdp"])
def test_two_processes_learn_the_digits(digits, tmp_path, options):
    """Measured were 98.9, 98.4 and 98.9% top-1; the test asks for 97%."""
    recipe = "--b 32 --image-size 32 --augment none --epochs 6 --warmup-epochs 1 --schedule cosine"
    rows = run_until_done(tmp_path, f"{recipe} {options}", digits["whole"], 6 * 22)
    assert rows[-1]["phase"] == "val" and rows[-1]["top1"] >= 97.0


def test_resume_auto_takes_the_latest_checkpoint_and_forgets_later_rows(train, tmp_path):
    options = "-a squeezenet1_1 --opt-level O1 --resume auto"
    assert [row["iteration"] for row in train(f"{options} --max-iters 2")] == [1, 2, 2]
    with open(tmp_path / "out.jsonl", "a") as file:  # a run that was killed got further, and was writing
        file.write(json.dumps({"iteration": 3, "phase": "train"}) + '\n{"iteration": 4, "pha')
    rows = train(f"{options} --max-iters 3")
    assert [row["iteration"] for row in rows] == [1, 2, 2, 3, 3] and all(list(row) == ROW for row in rows)


@pytest.mark.parametrize("options, reason", [("--fsdp", "torchrun"), ("--fsdp --channels-last", "channels-last")])
def test_fsdp_that_cannot_be_says_why(example, monkeypatch, capsys, options, reason):
    if "channels" in options:
        monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        example["main_amp"].parse_args(options.split())
    assert reason in capsys.readouterr().err
