"""The finder on ``sys.meta_path`` by which ``import apex`` finds the drop-in, from `install` to `uninstall`.

`PROVIDED` is the table of the drop-in's modules; submodules of a provided package are found by their own names.
Each module exists once: ``apex.amp`` and ``ampkit.apex.amp`` are the same object. Nothing named apex is ever written to disk.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import linecache
import os
import re
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from ..logs import is_rank_zero, logger
from ..scripts.running import Run

VERSION = "0.1"
"""The version of Apex's last releases with amp."""

PROVIDED = {
    "apex.amp": "ampkit.apex.amp",
    "apex.parallel": "ampkit.apex.parallel",
    "apex.optimizers": "ampkit.apex.optimizers",
    "apex.contrib": "ampkit.apex.contrib",
    "apex.fp16_utils": "ampkit.apex.fp16_utils",
    "apex.normalization": "ampkit.apex.normalization",
    "apex.multi_tensor_apply": "ampkit.apex.multi_tensor_apply",
    "amp_C": "ampkit.apex.amp_C",
    "apex_C": "ampkit.apex.apex_C",
    "fused_adam_cuda": "ampkit.apex.fused_adam_cuda",
}
"""Apex's name of a module or package -> ampkit's. The finder makes ``apex`` itself."""

INSTEAD = {
    "apex.transformer": "megatron.core (pip install megatron-core) has it now",
    "apex.transformer.amp": "torch.amp.GradScaler",
    "apex.transformer.functional": "torch.nn.functional.scaled_dot_product_attention, or torch.softmax of the masked scores",
    "apex.contrib.bottleneck": "torch.nn.Conv2d, BatchNorm2d and ReLU; torch.compile fuses them",
    "apex.contrib.conv_bias_relu": "torch.nn.functional.conv2d and relu; torch.compile fuses them",
    "apex.contrib.cudnn_gbn": "apex.parallel.SyncBatchNorm",
    "apex.contrib.fmha": "torch.nn.functional.scaled_dot_product_attention",
    "apex.contrib.focal_loss": "torchvision.ops.sigmoid_focal_loss",
    "apex.contrib.group_norm": "torch.nn.GroupNorm",
    "apex.contrib.groupbn": "apex.parallel.SyncBatchNorm, or torch.nn.BatchNorm2d with torch.channels_last",
    "apex.contrib.index_mul_2d": "in1[index] * in2",
    "apex.contrib.layer_norm": "apex.normalization.FusedLayerNorm, or torch.nn.LayerNorm",
    "apex.contrib.multihead_attn": "torch.nn.MultiheadAttention",
    "apex.contrib.optimizers.DistributedFusedAdam": "torch.distributed.fsdp, or ZeroRedundancyOptimizer",
    "apex.contrib.optimizers.DistributedFusedLAMB": "torch.distributed.fsdp, or ZeroRedundancyOptimizer",
    "apex.contrib.optimizers.distributed_fused_adam": "torch.distributed.fsdp, or ZeroRedundancyOptimizer",
    "apex.contrib.optimizers.distributed_fused_lamb": "torch.distributed.fsdp, or ZeroRedundancyOptimizer",
    "apex.contrib.sparsity": "torch.sparse.to_sparse_semi_structured, for 2:4 sparsity",
    "apex.contrib.transducer": "torchaudio.functional.rnnt_loss",
    "apex.contrib.xentropy": "torch.nn.functional.cross_entropy with reduction='none', label_smoothing= and ignore_index=",
    "apex.fused_dense": "torch.nn.Linear and torch.nn.functional.gelu",
    "apex.mlp": "torch.nn.Sequential of torch.nn.Linear and torch.nn.ReLU",
    "apex.pyprof": "torch.profiler, or torch.autograd.profiler.emit_nvtx",
    "apex.reparameterization": "torch.nn.utils.parametrizations.weight_norm",
    "apex.RNN": "torch.nn.LSTM, torch.nn.GRU and torch.nn.RNN",
}
"""Replacements for modules that the drop-in does not have."""

IMPORTED_BY_APEX = ("amp", "contrib", "fp16_utils", "multi_tensor_apply", "normalization", "optimizers", "parallel")
"""Submodules that are attributes of ``apex`` after ``import apex`` alone."""

_ROOTS = ("apex", *(name for name in PROVIDED if "." not in name))


def install(replace: bool = False, only_where_needed: bool = False) -> bool:
    """Make ``apex`` importable as the drop-in. True if it is in place afterwards.

    ``only_where_needed`` is for tools that observe: an import that a script cannot do without is answered. Libraries, imports with
    a fallback (``except ImportError``) and ``find_spec`` find what they would find in plain Python, an installed apex too.

    An apex that is installed without ``apex.amp`` is hidden until `uninstall`, and a log line says so; one that has it is
    kept unless ``replace=True``. Install before importing libraries that look for apex when they are imported.
    """
    if is_installed():
        return True
    installed = _installed_apex()
    if installed is not None and only_where_needed:
        return False
    if installed is not None:
        where, has_amp = installed
        if has_amp and not replace:
            logger.warning(
                "apex with apex.amp is installed at %s and stays in use. replace=True puts ampkit's in its place.",
                where,
            )
            return False
        logger.warning(
            "ampkit's apex takes the place of the one installed at %s%s.",
            where,
            "" if has_amp else ", which has no amp",
        )
    _finder.hidden, _finder.only_where_needed = _take_modules(), only_where_needed
    sys.meta_path.insert(0, _finder)
    importlib.invalidate_caches()
    return True


def uninstall() -> None:
    """Undo `install`: whatever apex there was is found again. Objects that scripts hold go on working."""
    if not is_installed():
        return
    sys.meta_path.remove(_finder)
    _take_modules()
    printing = sys.modules.get("ampkit.apex.amp._printing")
    if printing is not None:
        printing.detach()
    sys.modules.update(_finder.hidden)
    _finder.hidden = {}


@contextmanager
def around(run: Run, is_child: bool) -> Iterator[None]:
    """Install the drop-in while a script runs, and report at its end if the script imported amp and never used it."""
    installs, begun = not is_installed(), os.times()
    if installs:
        install(run.replace, only_where_needed=not run.needs_apex)
    try:
        yield
        # An apex that was there has a state of its own, and a child process may have used amp.
        if installs and is_installed() and not is_child and os.times()[2:4] == begun[2:4]:
            _report_unused_amp(run)
    finally:
        if installs:
            uninstall()


def _report_unused_amp(run: Run) -> None:
    """Report amp that was imported and not used: such a script trains in float32, and should not look as if amp had been tried."""
    amp = sys.modules.get("apex.amp")
    if amp is None or not is_rank_zero() or amp._amp_state.was_used:
        return
    print(
        "ampkit: this script has imported apex.amp and never called amp.initialize: nothing was cast, it ran in its own precision. "
        "It may do so only with an option of its own, or on a GPU"
        + ("." if run.device == "cpu" else ", as which ampkit run --device cpu makes the CPU look."),
        file=sys.stderr,
    )


def is_installed() -> bool:
    """Whether ``import apex`` finds the drop-in."""
    return _finder in sys.meta_path


def our_name(name: str) -> str | None:
    """The name of ampkit's module for one of Apex's names, or None when the drop-in has no such module."""
    root, _, _ = name.partition(".")
    if root not in _ROOTS:
        return None
    longest = max((known for known in PROVIDED if name == known or name.startswith(known + ".")), key=len, default=None)
    if longest is None:
        return None
    module_name = PROVIDED[longest] + name.removeprefix(longest)
    try:
        return module_name if importlib.util.find_spec(module_name) is not None else None
    except ModuleNotFoundError:  # its parent is no package of ampkit
        return None


class _Finder:
    """A finder of the drop-in's modules, and of a distribution called apex for code that asks for its version."""

    def __init__(self) -> None:
        self.hidden: dict[str, types.ModuleType] = {}
        self.only_where_needed = False

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if self.only_where_needed and name.partition(".")[0] in _ROOTS and not _is_needed():
            return None
        if name == "apex":
            spec = ModuleSpec(name, _ApexLoader(), origin=__file__, is_package=True)
            spec.submodule_search_locations = []
            return spec
        module_name = our_name(name)
        if module_name is not None:
            return ModuleSpec(name, _AliasLoader(module_name), origin=importlib.util.find_spec(module_name).origin)
        apex_name = name.removeprefix("ampkit.")
        # "from apex.contrib import xentropy" asks for ampkit.apex.contrib.xentropy, by the name that the package has.
        asked = name.partition(".")[0] in _ROOTS or (apex_name != name and _instead(apex_name) is not None)
        if asked and not _only_looking():
            # Without name=, or "from apex import x" would swallow the error and report a poorer one.
            raise ModuleNotFoundError(f"ampkit's drop-in has no {apex_name!r}. {_advice(apex_name)}")
        return None

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        if not self.only_where_needed and getattr(context, "name", None) in (None, "apex"):
            yield _Distribution()


class _ApexLoader:
    """The loader of the module ``apex``."""

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Apex(spec.name, "ampkit's drop-in for Apex: docs/migrating.md says what it provides.")

    def exec_module(self, module: types.ModuleType) -> None:
        module.__version__ = VERSION
        module.__file__ = __file__
        module.DeprecatedFeatureWarning = DeprecatedFeatureWarning


class _AliasLoader:
    """A loader of ampkit's module ``name``, which returns that very object under Apex's name."""

    def __init__(self, module_name: str) -> None:
        self.name = module_name
        self._own_spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module = importlib.import_module(self.name)
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        alias = module.__spec__.name
        module.__spec__ = self._own_spec  # the import system has set another, and relative imports need this one
        # Submodules are there already. Imported anew, they would be set on the package, over what it has under their names:
        # apex.amp._amp_state is an object.
        for name, loaded in list(sys.modules.items()):
            if name.startswith(self.name + "."):
                sys.modules[alias + name.removeprefix(self.name)] = loaded

    def get_code(self, name: str) -> Any:
        """Return the code of the module, for ``python -m`` on one of Apex's names."""
        return importlib.util.find_spec(self.name).loader.get_code(self.name)


class _Apex(types.ModuleType):
    """The module ``apex``, whose submodules are imported at their first use."""

    def __getattr__(self, name: str) -> Any:
        if name in IMPORTED_BY_APEX and our_name(f"apex.{name}") is not None:
            return importlib.import_module(f"apex.{name}")
        raise AttributeError(f"module 'apex' has no attribute {name!r}. {_advice(f'apex.{name}')}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *IMPORTED_BY_APEX})


class DeprecatedFeatureWarning(FutureWarning):
    """Apex's own category, for scripts that filter it. The drop-in never warns with it."""


class _Distribution(importlib.metadata.Distribution):
    """The distribution that ``importlib.metadata.version("apex")`` finds."""

    def read_text(self, filename: str) -> str | None:
        return _METADATA.get(filename)

    def locate_file(self, path: Any) -> Any:
        return path


_METADATA = {
    "METADATA": f"Metadata-Version: 2.1\nName: apex\nVersion: {VERSION}\nSummary: ampkit's drop-in for Apex\n",
    "top_level.txt": "\n".join(_ROOTS) + "\n",
}

_finder = _Finder()


def _instead(name: str) -> str | None:
    """The entry of `INSTEAD` for a module, or for the package that it is in."""
    known = [x for x in INSTEAD if name == x or name.startswith(x + ".")]
    return INSTEAD[max(known, key=len)] if known else None


def _advice(name: str) -> str:
    instead = _instead(name)
    return (
        ("" if instead is None else f"Use in its place: {instead}. ")
        + f"It provides {', '.join(sorted(filter(our_name, PROVIDED)))} and their submodules; the rest of "
        "Apex (apex.transformer, most of apex.contrib, apex.mlp, apex.RNN, ...) has to come from NVIDIA's package, "
        "with this drop-in not installed."
    )


def _is_needed() -> bool:
    """Whether a file of the script imports, and not a library in site-packages, where it has nothing to fall back on."""
    frame = sys._getframe(2)
    while frame is not None and (frame.f_globals.get("__name__") or "").partition(".")[0] in ("importlib", "ampkit"):
        frame = frame.f_back
    if frame is None or _only_looking():
        return False
    path = frame.f_code.co_filename
    if frame.f_globals.get("__name__") != "__main__" and {"site-packages", "dist-packages"} & set(Path(path).parts):
        return False
    source = "".join(linecache.getlines(path))
    return not any(
        _has_fallback(node, frame.f_lineno) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Try)
    )


def _has_fallback(node: ast.Try, line: int) -> bool:
    """Whether this line stands in the ``try``, and a handler of import errors goes on: it neither raises nor exits."""
    ends = re.compile(r"\braise\b|\b_?exit\(|\bquit\(")
    return node.body[0].lineno <= line <= node.body[-1].end_lineno and any(
        _takes_import_errors(handler) and not ends.search(ast.unparse(handler)) for handler in node.handlers
    )


def _takes_import_errors(handler: ast.ExceptHandler) -> bool:
    kinds = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
    return handler.type is None or any(
        isinstance(part, ast.Name) and part.id in kinds for part in ast.walk(handler.type)
    )


def _only_looking() -> bool:
    """Whether the caller is ``importlib.util.find_spec``, which expects None, and not an import, which needs an error."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_find_and_load_unlocked":
        if frame.f_code.co_name == "find_spec" and frame.f_globals.get("__name__") == "importlib.util":
            return True
        frame = frame.f_back
    return False


def _take_modules() -> dict[str, types.ModuleType]:
    """Remove every loaded module under Apex's names, and return them."""
    names = [name for name in sys.modules if name.partition(".")[0] in _ROOTS]
    return {name: sys.modules.pop(name) for name in names}


def _installed_apex() -> tuple[str, bool] | None:
    """The place of the apex that would be imported, and whether it has amp; None without one. Apex is not imported for that."""
    try:
        spec = importlib.util.find_spec("apex")
    except ValueError:  # a module that was put into sys.modules by hand, without a spec
        spec = None
    loaded = sys.modules.get("apex")
    if spec is None and loaded is None:
        return None
    if spec is not None and spec.origin is None and getattr(loaded, "__file__", None) is None:
        return None  # a folder that happens to have the name, such as a checkout of Apex's sources
    has_amp = hasattr(loaded, "amp") or "apex.amp" in sys.modules
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    for finder in sys.meta_path if locations and not has_amp else ():
        find = getattr(finder, "find_spec", None)
        has_amp = has_amp or (find is not None and find("apex.amp", locations) is not None)
    where = (
        next(iter(locations), None) or getattr(spec, "origin", None) or getattr(loaded, "__file__", None) or "(unknown)"
    )
    return where, has_amp
