"""``ampkit check FILE``: the precision in which a checkpoint was trained, and what that cost; nothing is run or unpickled.

It reads ``.safetensors``, files of ``torch.save`` (``weights_only``), and folders of shards.
"""

from __future__ import annotations

import re
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..dtypes import LOWER_PRECISION
from .words import columns, percent, short

_MOMENT = re.compile(r"\.?(exp_avg|exp_avg_sq|momentum_buffer|max_exp_avg_sq)$")
_NORM = re.compile(r"(norm|ln|bn)[^.]*\.weight$|(norm|ln_?f|ln_?\d)\.(weight|scale|gamma)$", re.IGNORECASE)
_MASTERS = re.compile(r"master|fp32|float32|\.rest$", re.IGNORECASE)
#: Losses of second moments in lower precision.
_LOSSES = {
    torch.float16: "those below 6e-8 are 0, and updates, divided by their root, far too large there; keep them in float32",
    torch.bfloat16: "to nearest they lose updates of less than 0.2%, which at beta2 = 0.999 are nearly all; float32, or "
    'FusedAdam(state_dtype="bfloat16"), which rounds by random numbers',
}
_WITHOUT_MASTERS = (
    "and no float32 values of them: what rounding took is gone; ampkit's state_dict() is float32, but for O3"
)
_OF_MASTERS = (torch.float32, torch.int16)  # a rest of 16 bits completes a weight


class NotRead(Exception):
    """An error that says why a file cannot be read."""


def print_report(path: str) -> int:
    """Print what the file says. Return the exit code: 1 if training has lost something, 2 if the file cannot be read."""
    try:
        leaves = list(_leaves("", _read(Path(path))))
    except NotRead as error:
        print(f"ampkit check: {error}", file=sys.stderr)
        return 2
    tensors = {name: value for name, value in leaves if isinstance(value, Tensor)}
    moments = {name: x for name, x in tensors.items() if _MOMENT.search(name)}
    masters = {name: x for name, x in tensors.items() if _MASTERS.search(name) and x.dtype in _OF_MASTERS}
    others = {name: x for name, x in tensors.items() if name not in moments and name not in masters}
    weights = {name: x for name, x in others.items() if x.dim() and x.is_floating_point()}
    second = {x.dtype for name, x in moments.items() if name.endswith("exp_avg_sq")}
    if any(name.endswith(".seed") for name, _ in leaves):  # ampkit's optimizers round narrow moments by random numbers
        second.discard(torch.bfloat16)
    of_moments = [f"second moments in {short(dtype)}: {words}" for dtype, words in _LOSSES.items() if dtype in second]
    lost = [*_norms(weights), *of_moments]
    lower = next((x.dtype for x in weights.values() if x.dtype in LOWER_PRECISION), None)
    if lower is not None and moments and not masters:
        lost.append(f"weights in {short(lower)} beside moments, {_WITHOUT_MASTERS}")
    rows = [
        ("weights", _dtypes(weights)),
        ("moments", _dtypes(moments)),
        ("masters", _dtypes(masters) if masters else "none by their names"),
        *(("lost", words) for words in lost or ["nothing seen"]),
    ]
    print("\n".join([f"{path}: {len(tensors)} tensors", "", *columns(rows)]))
    return int(bool(lost))


# Losses of training


def _norms(weights: Mapping[str, Tensor]) -> Iterator[str]:
    norms = {name: x for name, x in weights.items() if _NORM.search(name) and x.dim() == 1}
    norms = {name: x for name, x in norms.items() if x.dtype in LOWER_PRECISION}
    still = {name: int((x == 1.0).sum()) for name, x in norms.items()}
    total, elements = sum(still.values()), sum(x.numel() for x in norms.values())
    if total > elements / 10:
        worst = max(still, key=lambda name: still[name] / norms[name].numel())
        dtype = norms[worst].dtype
        yield (
            f"{total:,} of {elements:,} elements of norms are 1.0, where they began ({still[worst]:,} of {norms[worst].numel():,} "
            f"of {worst!r}). If this was trained: {short(dtype)} rounds updates of 1.0 below {torch.finfo(dtype).eps / 4:.1%} "
            "away; O5 and O2 train them"
        )


def _dtypes(tensors: Mapping[str, Tensor]) -> str:
    sizes = Counter[torch.dtype]()
    for x in tensors.values():
        sizes[x.dtype] += x.numel()
    shares = [f"{short(dtype)} {percent(size / max(1, sizes.total()))}" for dtype, size in sizes.most_common()]
    return f"{sizes.total():,} elements: {', '.join(shares)}" if sizes else "none"


def _leaves(path: str, tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, (dict, list, tuple)):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in items:
            yield from _leaves(f"{path}.{key}".lstrip("."), value)
    else:
        yield path, tree


# Formats


def _read(path: Path) -> Any:
    if path.is_dir():
        if (path / ".metadata").exists():
            convert = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch"
            raise NotRead(
                f"{path} is of torch.distributed.checkpoint, whose .metadata would have to be unpickled: that can run code of the "
                f"file's own. If you trust it, '{convert} {path} FILE.pt' makes a file that is read."
            )
        parts = sorted(p for p in path.iterdir() if p.suffix in (".safetensors", ".pt", ".pth", ".bin", ".ckpt"))
        if not parts:
            raise NotRead(f"{path}: no .safetensors, .pt, .pth, .bin or .ckpt is in this folder.")
        checkpoint: dict[str, Any] = {}
        for p in parts:
            checkpoint.update(_read(p) if p.suffix == ".safetensors" else {p.stem: _read(p)})
        return checkpoint
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # of any type, if it is no checkpoint
        names = re.findall(r"GLOBAL (\S+)", str(error))
        held = f"holds objects ({names[0]})" if names else "is no checkpoint of torch's, or holds objects"
        raise NotRead(f"{path} {held}. It is not unpickled, since that can run code of the file's own.") from None


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise NotRead(f"{path} is read by safetensors, which is not installed: pip install safetensors") from None
    try:
        return load_file(path)
    except Exception as error:  # of the library's own type, or OSError
        raise NotRead(f"{path} is no whole safetensors file: {error}. Copy or save it anew.") from None
