"""Checkpoints that are either whole or absent, and that hold tensors and plain values only.

A file is written beside its final name and then moved there, so an interrupted run leaves the previous one. Everything
loads with ``weights_only=True``. main_amp.py decides what goes in.
"""

import contextlib
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

LATEST, BEST = "checkpoint.pth.tar", "model_best.pth.tar"
KEYS = {"run", "iteration", "skipped", "best_top1", "model", "optimizer", "amp", "rng"}


class CheckpointError(Exception):
    """An error for a file given to --resume that is not a checkpoint that this run can continue."""


def save(state: dict[str, Any], folder: Path, is_best: bool) -> None:
    """Write ``state`` to ``folder/checkpoint.pth.tar``, and a copy to ``model_best.pth.tar`` if it is the best."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_whole(folder / LATEST, lambda path: torch.save(state, path))
    if is_best:
        _write_whole(folder / BEST, lambda path: shutil.copyfile(folder / LATEST, path))


def latest(folder: Path) -> Path | None:
    """The last checkpoint that was written whole to ``folder``; None where there is none yet."""
    path = folder / LATEST
    return path if path.is_file() else None


def load(path: Path) -> dict[str, Any]:
    """Load the checkpoint at ``path``, on the CPU."""
    if not path.is_file():
        raise CheckpointError(
            f"found no file at '{path}'; --resume expected a checkpoint written by main_amp.py."
            " Check the path, or leave --resume out to start anew."
        )
    try:
        with zipfile.ZipFile(path) as archive:  # torch reads on over a flipped bit
            if (broken := archive.testzip()) is not None:
                raise zipfile.BadZipFile(f"the checksum of {broken} differs")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # zip, pickle and tensor readers each have their own
        why = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"found {path.stat().st_size:,} bytes in '{path}' that do not load; expected a whole checkpoint written by"
            f" main_amp.py, so this one was cut short or is another kind of file ({why})."
            f" Resume from {BEST} or an older checkpoint."
        ) from error
    missing = KEYS - set(state) if isinstance(state, dict) else KEYS
    if missing:
        raise CheckpointError(
            f"found a file without {', '.join(sorted(missing))} at '{path}'; --resume expected a checkpoint written by"
            " main_amp.py. To start from bare weights, load them into the model in build_model()."
        )
    return state


def check_same_run(saved: dict[str, Any], expected: dict[str, Any], path: Path) -> None:
    """Refuse a checkpoint whose iterations would not continue in this run, naming each setting that differs."""
    names = [name for name in expected if saved.get(name) != expected[name]]
    different = [f"{name} {saved.get(name)} (this run: {expected[name]})" for name in names]
    if different:
        raise CheckpointError(
            f"found '{path}' written with {', '.join(different)}; expected the settings of this run, or its iterations"
            " would not continue those. Give the same settings, or leave --resume out."
        )


def check_same_on_all_ranks(state: dict[str, Any] | None) -> None:
    """Refuse to continue from different iterations, as where ``--resume auto`` finds the folder on some machines only."""
    iterations: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(iterations, None if state is None else state["iteration"])
    if len(set(iterations)) > 1:
        raise CheckpointError(
            f"found checkpoints of iterations {iterations}, by rank; expected the same one on all. Put --checkpoint-dir on a file"
            " system that all machines share."
        )


def whole(state: Any) -> Any:
    """Return the state with every sharded tensor put together, on the CPU. All ranks must call it."""
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    return state.full_tensor().cpu() if isinstance(state, DTensor) else state


def load_model(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Load whole tensors into a model, sharded or not."""
    templates = model.state_dict()
    model.load_state_dict({name: _parted_like(templates.get(name), value) for name, value in state.items()})


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load whole tensors into an optimizer, of sharded parameters or not."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    keys = [key for group in state["param_groups"] for key in group["params"]]
    param_of = dict(zip(keys, params))
    states = {
        key: {name: _parted_like(param_of[key], value) for name, value in values.items()}
        for key, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": states})


def _parted_like(template: torch.Tensor | None, value: Any) -> Any:
    """This rank's part of ``value``, where ``template`` is sharded and has its shape."""
    if not isinstance(template, DTensor) or not isinstance(value, torch.Tensor) or value.shape != template.shape:
        return value
    mesh = template.device_mesh
    return distribute_tensor(value.to(mesh.device_type), mesh, template.placements, src_data_rank=None)


def collect_rng_states(device: torch.device) -> list[dict[str, torch.Tensor]]:
    """The state of each rank's random number generators, by rank. All ranks must call it."""
    rank_state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        rank_state["cuda"] = torch.cuda.get_rng_state(device)
    if not dist.is_initialized():
        return [rank_state]
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, rank_state)
    return states


def restore_rng_state(states: list[dict[str, torch.Tensor]], rank: int, device: torch.device) -> None:
    if rank >= len(states):  # there were fewer processes: this one's seed is as good
        return
    torch.set_rng_state(states[rank]["cpu"])
    if device.type == "cuda" and "cuda" in states[rank]:
        torch.cuda.set_rng_state(states[rank]["cuda"], device)


def _write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Call ``write`` with a name beside ``path``; only a finished file, safe on the disk, takes the name ``path``."""
    partial = path.with_name(f".{path.name}.partial")  # one name, which the next run takes over from a killed one
    try:
        write(partial)
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        with contextlib.suppress(FileNotFoundError):  # it has moved
            partial.unlink()
