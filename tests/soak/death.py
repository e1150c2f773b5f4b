"""Death: SIGKILL at any instant, full disks, and checkpoints that are torn, foreign, or of another level, optimizer or version."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import math
import os
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from helpers import ROOT, saved_and_loaded
from torch import nn
from torch.utils._pytree import tree_flatten

import ampkit

from .promise import promise
from .runs import Recipe, Run, assert_same, bits, copied

_SPEC = importlib.util.spec_from_file_location("checkpoint", ROOT / "examples" / "imagenet" / "checkpoint.py")
#: How the examples write a checkpoint: beside its name, then moved there.
checkpoint = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(checkpoint)

ITERATIONS = 12


def digest(run: Run) -> str:
    """A digest of all that a step may change, and of the loss scale."""
    everything = hashlib.sha256()
    for name, value in sorted(run.state().items()):
        everything.update(repr((name, bits(value))).encode())
    everything.update(repr(ampkit.state_dict()).encode())
    return everything.hexdigest()


def saved(run: Run, folder: Path, iteration: int) -> None:
    """Write a checkpoint as examples/imagenet does."""
    state = dict.fromkeys(checkpoint.KEYS) | {"run": run.checkpoint(), "iteration": iteration}
    checkpoint.save(state, folder, is_best=False)


def train(recipe: Recipe, folder: Path, tell: Callable[[str], object] = lambda word: None) -> str:
    """Train to the end from the latest checkpoint, or from the beginning; write one after each iteration."""
    run, first = Run(recipe), 0
    if (path := checkpoint.latest(folder)) is not None:
        state = checkpoint.load(path)
        run.resume(state["run"])
        first = state["iteration"]
    for iteration in range(first, ITERATIONS):
        run.iterate(iteration)
        tell("writes")
        saved(run, folder, iteration + 1)
        tell("trains")
    result = digest(run)
    ampkit.close()
    return result


@promise(
    "A killed run continues bit for bit from its last checkpoint, and that is never lost.",
    "SIGKILL, again and again until the run is done, half of the times while it writes a checkpoint",
    share=3.0,
)
def a_killed_run_continues_bit_for_bit(draw: random.Random) -> int:
    recipe = Recipe.drawn(draw)
    began = time.monotonic()
    wanted = train(recipe, Path(tempfile.mkdtemp()))
    lasts = (time.monotonic() - began) / ITERATIONS
    folder, kills = Path(tempfile.mkdtemp()), 0
    while True:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            be_killed(recipe, folder, write)
        os.close(write)
        done = kills < 8 and killed(draw, child, read, lasts)
        _, status = os.waitpid(child, 0)
        os.close(read)
        kills += done
        if not done or os.WIFEXITED(status):
            assert status == 0, (status, recipe)
            break
        if (path := checkpoint.latest(folder)) is not None:
            checkpoint.load(path)  # the last good one is never lost
    assert (folder / "digest").read_text() == wanted, (kills, recipe)
    return kills


def be_killed(recipe: Recipe, folder: Path, pipe: int) -> None:
    """Train in a child, and write to the pipe as each checkpoint begins and ends."""
    status = 1
    try:
        result = train(recipe, folder, lambda word: os.write(pipe, word[:1].encode()))
        (folder / "digest").write_text(result)
        status = 0
    finally:
        sys.stdout.flush()
        os._exit(status)


def killed(draw: random.Random, child: int, pipe: int, lasts: float) -> bool:
    """Kill a run at a random instant, or soon after it begins to write; return whether it was killed."""
    if draw.random() < 0.5:
        for _ in range(draw.randint(1, 4)):
            word = b""
            while word != b"w":
                if not (word := os.read(pipe, 1)):
                    return False
        time.sleep(draw.uniform(0, 0.004))
    else:
        time.sleep(draw.uniform(0, 4 * lasts))
    os.kill(child, signal.SIGKILL)
    return True


@promise(
    "A full disk loses nothing: the checkpoint before stays whole, and training goes on.",
    "a limit on the size of files, somewhere below that of a checkpoint",
)
def a_full_disk_loses_nothing(draw: random.Random) -> int:
    recipe = Recipe.drawn(draw)
    folder, attacks = Path(tempfile.mkdtemp()), 0
    wanted = train(recipe, Path(tempfile.mkdtemp()))
    run = Run(recipe)
    run.iterate(0)
    saved(run, folder, 1)
    size, written = checkpoint.latest(folder).stat().st_size, 1
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    for iteration in range(1, ITERATIONS):
        run.iterate(iteration)
        limit = draw.randrange(size) if draw.random() < 0.7 else hard
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            saved(run, folder, iteration + 1)
            written = iteration + 1
        except (OSError, RuntimeError):  # torch's writer has an error of its own
            assert limit != hard
            attacks += 1
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert checkpoint.load(checkpoint.latest(folder))["iteration"] == written, recipe
        assert [path.name for path in folder.iterdir()] == [checkpoint.LATEST], recipe
    assert digest(run) == wanted, recipe
    return attacks


@promise(
    "A torn checkpoint is refused in words: what is loaded is what was saved.",
    "files cut short, with zeros or noise, with a flipped bit in a record, and files of another kind",
)
def a_torn_checkpoint_is_refused(draw: random.Random) -> int:
    recipe = Recipe.drawn(draw)
    folder = Path(tempfile.mkdtemp())
    run = Run(recipe)
    run.iterate(0)
    saved(run, folder, 1)
    path, attacks = checkpoint.latest(folder), 40
    good, wanted = path.read_bytes(), checkpoint.load(path)
    for _ in range(attacks):
        how, at = draw.choice(["cut", "zeros", "flip", "noise", "other"]), draw.randrange(len(good))
        if how == "flip":
            at = place_in_a_tensor(draw, good)
        bad = {
            "cut": good[:at],
            "zeros": good[:at] + bytes(len(good[at : at + 512])) + good[at + 512 :],
            "flip": good[:at] + bytes([good[at] ^ 1 << draw.randrange(8)]) + good[at + 1 :],
            "noise": good[:at] + draw.randbytes(len(good[at : at + 64])) + good[at + 64 :],
            "other": draw.choice([b"", b"PK\x03\x04", b"\x80\x02}q\x00.", draw.randbytes(300)]),
        }[how]
        path.write_bytes(bad)
        try:
            loaded = checkpoint.load(path)
        except checkpoint.CheckpointError as error:
            assert "expected" in str(error)
            continue
        assert same(loaded, wanted), (how, at, recipe)
    return attacks


def place_in_a_tensor(draw: random.Random, file: bytes) -> int:
    """The place of a byte in a record. Bytes between records have no checksum, and torch does not read all of them."""
    with zipfile.ZipFile(io.BytesIO(file)) as archive:
        record = draw.choice([one for one in archive.infolist() if one.file_size])
    lengths = struct.unpack_from("<HH", file, record.header_offset + 26)
    return record.header_offset + 30 + sum(lengths) + draw.randrange(record.file_size)


def same(found: Any, wanted: Any) -> bool:
    """Whether two nested checkpoints are equal bit for bit."""
    (ours, form), (theirs, expected) = tree_flatten(found), tree_flatten(wanted)
    return form == expected and [bits(value) for value in ours] == [bits(value) for value in theirs]


@promise(
    "States of loss scalers are loaded whole or not at all.",
    "wrong numbers, types and keys in one of several",
)
def scalers_are_loaded_whole_or_not_at_all(draw: random.Random) -> int:
    count = draw.randint(1, 4)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ampkit.initialize(model, optimizer, opt_level="O2", num_losses=count, verbosity=0)
    attacks = 200
    for _ in range(attacks):
        before = ampkit.state_dict()
        state: Any = {
            f"loss_scaler{index}": {"loss_scale": 2.0 ** draw.randint(0, 20), "unskipped": draw.randint(0, 9)}
            for index in range(count)
        }
        good = copied(state)
        key = f"loss_scaler{draw.randrange(count)}"
        kind = draw.randrange(7)
        if kind == 0:
            bad = [0.0, -1.0, math.nan, math.inf, 1e300, "2", None, True, [1.0], b"1"]
            state[key]["loss_scale"] = draw.choice(bad)
        elif kind == 1:
            state[key]["unskipped"] = draw.choice([-1, 1.5, "1", None, [0], 2**31, 2**70])
        elif kind == 2:
            del state[key][draw.choice(["loss_scale", "unskipped"])]
        elif kind == 3:
            state[key] = draw.choice([None, 1.0, [], {}, "x", {"loss_scale": 1.0}])
        elif kind == 4:
            state[draw.choice(["model", "optimizer", "loss scaler", "scaler0", 0, None])] = {}
        elif kind == 5:
            state = draw.choice([None, [], 3, "state", b"", [("loss_scaler0", {})]])
        else:
            state = good
        try:
            ampkit.load_state_dict(state)
        except ampkit.CheckpointError as error:
            assert str(error)
            assert ampkit.state_dict() == before, (state, before)
            assert kind != 6
        else:
            assert kind == 6, f"accepted: {state}"
            assert ampkit.state_dict() == good
    ampkit.close()
    return attacks


@promise(
    "A checkpoint of another level, precision or optimizer of the kind is continued with the same numbers; what does not "
    "fit is refused, and nothing of it is loaded.",
    "checkpoints handed from run to run; optimizer states of other models; a GradScaler's state, a model's",
)
def another_run_continues_right_or_is_refused(draw: random.Random) -> int:
    adams = ["Adam", "AdamW foreach", "AdamW fused", "FusedAdam"]
    sgds = ["SGD", "SGD foreach", "SGD fused", "FusedSGD"]
    levels = ["O0", "O1", "O2", "O4", "O5"]  # O3 rounds what it saves
    attacks = 0
    for _ in range(4):
        family = draw.choice([adams, sgds])
        first = Recipe.drawn(draw, level=draw.choice(levels), optimizer=draw.choice(family))
        of_first = dict(model=first.model, seed=first.seed + 1)
        other = Recipe.drawn(draw, level=draw.choice(levels), optimizer=draw.choice(family), **of_first)
        run = Run(first)
        for number in range(3):
            run.iterate(number)
        state = saved_and_loaded(run.checkpoint())
        ampkit.close()
        run = Run(other)
        run.iterate(7)
        run.resume(state)
        assert_same_numbers(run.checkpoint(), state, (first, other))
        run.iterate(3)
        before = run.state(), ampkit.state_dict()
        for foreign in foreigners(draw, state):
            refuses(run, foreign, before, (first, other))
            attacks += 1
        ampkit.close()
        attacks += 1
    return attacks


def assert_same_numbers(actual: Any, wanted: Any, case: Any) -> None:
    """Compare weights and moments up to the last bit that float16's rests hold."""
    for actual_state, wanted_state in zip(actual["models"], wanted["models"], strict=True):
        for name, value in wanted_state.items():
            torch.testing.assert_close(
                actual_state[name].double(), value.double(), rtol=1e-6, atol=1e-9, msg=lambda m: f"{m} {case}"
            )
    for actual_state, wanted_state in zip(actual["optimizers"], wanted["optimizers"], strict=True):
        assert actual_state["state"].keys() == wanted_state["state"].keys(), case
        for key, state in wanted_state["state"].items():
            for name, value in state.items():
                if value is not None:
                    number = torch.as_tensor(actual_state["state"][key][name]).double()
                    torch.testing.assert_close(number, torch.as_tensor(value).double(), rtol=1e-6, atol=1e-12)


def foreigners(draw: random.Random, state: dict[str, Any]) -> list[tuple[str, Any]]:
    """Checkpoints that cannot be continued, by the part that must say so."""
    optimizer = state["optimizers"][0]
    fewer = copied(optimizer)
    fewer["param_groups"][0]["params"] = fewer["param_groups"][0]["params"][:-1]
    more = {**optimizer, "param_groups": optimizer["param_groups"] * 2}
    grad_scaler = torch.amp.GradScaler("cpu").state_dict()
    not_finite = {"loss_scaler0": {"loss_scale": math.nan, "unskipped": 0}}
    of_ampkit = [("ampkit", one) for one in (not_finite, grad_scaler, state["models"][0])]
    return [("optimizer", fewer), ("optimizer", more), *of_ampkit]


def refuses(run: Run, foreign: tuple[str, Any], before: Any, case: Any) -> None:
    """Check that loading raises an error and changes nothing."""
    part, state = foreign
    try:
        run.players[0].optimizer.load_state_dict(state) if part == "optimizer" else ampkit.load_state_dict(state)
    except (ValueError, ampkit.CheckpointError) as error:
        assert str(error)
    else:
        raise AssertionError(f"a foreign {part} state was loaded: {case}")
    assert_same(run.state(), before[0], case)
    assert ampkit.state_dict() == before[1], case
