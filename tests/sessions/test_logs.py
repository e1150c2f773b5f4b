"""Logs and their readers: the banner, the overflow lines, the culprit after many skips, and where they are written."""

import contextlib
import importlib
import inspect
import logging
import math
import sys

import pytest
import torch
import torch.distributed as dist
from helpers import backward, iterate, net_with_norm, sgd
from torch import nn

import ampkit
from ampkit.casting import cpp_wrappers
from ampkit.errors import ExtensionError
from ampkit.kernels.backend import Implementation
from ampkit.libraries import load_library

session_module = importlib.import_module("ampkit.session")  # the name in the package is the function


def initialized_aloud(**settings):
    model = net_with_norm(4, 4, 1)
    return ampkit.initialize(model, sgd(model.parameters()), **settings)


def overflow(model, optimizer, times=1, factor=math.inf):
    iterate(lambda: model(torch.ones(2, 4)).float().sum() * factor, optimizer, times)


def first_words(capsys, **settings):
    initialized_aloud(**settings)
    ampkit.close()
    return capsys.readouterr().out.splitlines()


SELECTED = "Selected optimization level "
STORED = "master weights float32, as weight and 16-bit rest"


@pytest.mark.parametrize(
    "level, brief, in_use",
    [
        ("O0", "pure float32 training, the baseline", "weights float32, loss scale 1"),
        (
            *("O1", "casts around torch functions, float32 weights"),
            "torch functions cast to bfloat16 by their tables, weights float32, loss scale dynamic",
        ),
        (
            *("O2", "lower-precision model with float32 norms and master weights"),
            f"weights bfloat16, norms float32, {STORED}, loss scale dynamic",
        ),
        ("O3", "pure lower-precision training", "weights bfloat16, norms bfloat16, loss scale 1"),
    ],
)
def test_first_words_say_what_the_level_comes_to(level, brief, in_use, capsys, monkeypatch):
    monkeypatch.delenv("AMPKIT_LOWER_PRECISION", raising=False)
    monkeypatch.setattr(session_module, "_log_missing_libraries", lambda: None)  # once, where they are missing
    lines = first_words(capsys, opt_level=level)
    assert lines[:2] == [f"{SELECTED}{level}: {brief}", f"In use: {in_use}"]
    assert lines[2:] == (["Kept in float32: 1 module (1)"] if level == "O2" else [])


# A setting, and how the line of changes writes it, at a level that accepts it.
CHANGES = [
    ("O2", {"cast_model_type": torch.float16}, "cast_model_type=torch.float16"),
    ("O1", {"patch_torch_functions": False}, "patch_torch_functions=False"),
    ("O1", {"patch_torch_functions_type": torch.float16}, "patch_torch_functions_type=torch.float16"),
    ("O2", {"keep_batchnorm_fp32": False}, "keep_batchnorm_fp32=False"),
    ("O2", {"master_weights": False}, "master_weights=False"),
    ("O2", {"loss_scale": 128}, "loss_scale=128.0"),
    ("O5", {"loss_scale": "dynamic"}, "loss_scale=DynamicLossScale(init_scale=65536.0, "),
    ("O1", {"cast_model_outputs": torch.float32}, "cast_model_outputs=torch.float32"),
    ("O1", {"num_losses": 2}, "num_losses=2"),
    ("O1", {"verbosity": 2}, "verbosity=2"),
    ("O1", {"min_loss_scale": 1.0}, "min_loss_scale=1.0"),
    ("O1", {"max_loss_scale": 1024.0}, "max_loss_scale=1024.0"),
    ("O1", {"keep_fp32": ["0", nn.Tanh]}, "keep_fp32=['0', Tanh]"),
    ("O1", {"policy": "apex"}, "policy=Policy('apex')"),
    ("O1", {"on_floor": "warn"}, "on_floor='warn'"),
    ("O2", {"one_pass_step": False}, "one_pass_step=False"),
    ("O5", {"check_gradients": True}, "check_gradients=True"),
    ("O1", {"scope": "forward"}, "scope='forward'"),
    ("O2", {"lower_precision_weights": "refuse"}, "lower_precision_weights='refuse'"),
]


@pytest.mark.parametrize("level, settings, written", CHANGES, ids=[next(iter(change)) for _, change, _ in CHANGES])
def test_a_setting_that_differs_from_its_level_is_among_the_first_words(level, settings, written, capsys):
    lines = first_words(capsys, opt_level=level, **settings)
    assert len(lines) <= 6
    assert any(line.startswith(f"Changed from the level's defaults: {written}") for line in lines), lines


def test_a_process_group_is_among_the_first_words(capsys):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        lines = first_words(capsys, opt_level="O2", num_losses=2, process_group=dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    assert "Changed from the level's defaults: num_losses=2, process_group=<ProcessGroup>" in lines


def test_every_setting_of_initialize_is_among_those_tested():
    told = {name for _, change, _ in CHANGES for name in change} | {"process_group"}
    settings = set(inspect.signature(ampkit.initialize).parameters)
    assert settings - told == {"models", "optimizers", "enabled", "opt_level"}


def test_settings_that_are_the_defaults_anyway_are_no_changes(capsys):
    lines = first_words(capsys, opt_level="O2", loss_scale="dynamic", keep_batchnorm_fp32="True", num_losses=1)
    assert not any("Changed" in line for line in lines)


NOT_BUILT = "could not be loaded: No module named 'ampkit.library'"


@pytest.mark.parametrize(
    "kernels, wrappers, missing",
    [
        (NOT_BUILT, NOT_BUILT, "compiled kernels and O1's wrappers in C++"),
        (None, NOT_BUILT, "O1's wrappers in C++"),
        (NOT_BUILT, None, "compiled kernels"),
        ("AMPKIT_EXTENSION=off", "AMPKIT_EXTENSION=off", None),
        (None, None, None),
    ],
)
def test_libraries_that_were_not_built_are_told_once_with_the_cure(kernels, wrappers, missing, capsys, monkeypatch):
    monkeypatch.setattr(
        session_module, "implementation", lambda: Implementation("reference" if kernels else "extension", kernels or "")
    )
    monkeypatch.setattr(cpp_wrappers, "library", None if wrappers else session_module)
    monkeypatch.setattr(cpp_wrappers, "why", wrappers or "")
    session_module._log_missing_libraries.cache_clear()
    lines = first_words(capsys, opt_level="O2") + first_words(capsys, opt_level="O1")
    session_module._log_missing_libraries.cache_clear()
    # Not a copy: the sources in this folder would hide it.
    cure = "every feature works, slower. 'pip install --no-build-isolation --editable .' builds them"
    assert [line.split(";")[0] for line in lines if "missing" in line] == (
        [f"The {missing} are missing: {cure}"] if missing else []
    )


@pytest.mark.parametrize("wish", ["auto", "require"])
@pytest.mark.parametrize("error", [ModuleNotFoundError("not built"), ImportError("undefined symbol")])
def test_of_a_library_that_is_not_required_the_log_has_only_that_it_is_broken(wish, error, caplog, monkeypatch):
    def load():
        raise error

    monkeypatch.setenv("AMPKIT_EXTENSION", wish)
    with pytest.raises(ExtensionError, match=str(error)) if wish == "require" else contextlib.nullcontext():
        assert load_library("it", load) == (None, f"it could not be loaded: {error}")
    assert (str(error) in caplog.text) is (wish == "auto" and type(error) is ImportError)


@pytest.mark.parametrize("rank, verbosity", [("0", 0), ("1", 1)])
def test_verbosity_0_and_other_ranks_are_silent(rank, verbosity, capsys, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    overflow(*initialized_aloud(opt_level="O2", verbosity=verbosity))
    assert capsys.readouterr().out == ""


def test_handler_leaves_with_the_last_session():
    logger = logging.getLogger("ampkit")
    before = list(logger.handlers), logging.NOTSET
    initialized_aloud()
    assert len(logger.handlers) == len(before[0]) + 1
    ampkit.close()
    assert (list(logger.handlers), logger.level) == before


def test_handler_of_the_application_is_the_only_one(capsys, monkeypatch):
    logger, records, handler = logging.getLogger("ampkit"), [], logging.Handler()
    handler.emit = records.append
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "level", logging.INFO)
    initialized_aloud()
    assert capsys.readouterr().out == ""
    assert any(SELECTED in record.getMessage() for record in records)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_banner_is_written_once_under_basic_config(moment, stream, capsys, monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])  # pytest's keep basicConfig from doing anything
    level = root.level

    def configure():
        logging.basicConfig(level=logging.INFO, stream=getattr(sys, stream))

    try:
        if moment == "before":
            configure()
            initialized_aloud(opt_level="O2")
        else:
            model, optimizer = initialized_aloud(opt_level="O2")
            configure()
            ampkit.initialize(model, optimizer, opt_level="O2")
        written = capsys.readouterr()
    finally:
        root.setLevel(level)
    assert (written.out + written.err).count("Selected optimization level O2") == (1 if moment == "before" else 2)
    assert "INFO:ampkit:Selected optimization level O2" in getattr(written, stream.removeprefix("std"))


def test_handlers_for_a_file_or_for_warnings_alone_leave_the_banner_to_us(capsys, tmp_path, monkeypatch):
    file, warnings = logging.FileHandler(tmp_path / "log"), logging.StreamHandler(sys.stderr)
    warnings.setLevel(logging.WARNING)
    for handler in (file, warnings):
        monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
        initialized_aloud(opt_level="O2")
        written = capsys.readouterr()
        assert written.out.count(f"{SELECTED}O2") == 1 and written.err == ""
        ampkit.close()
    file.close()
    assert (tmp_path / "log").read_text().count(f"{SELECTED}O2") == 1


@pytest.mark.parametrize(
    "level, make, name",
    [
        *(("O2", torch.optim.SGD, name) for name in ("the loss", "0.weight", "1.bias")),
        *(("O1", torch.optim.RMSprop, "the loss"), ("O1", ampkit.optimizers.FusedSGD, "0.weight")),
        *(("O2", torch.optim.RMSprop, "1.bias"), ("O2", ampkit.optimizers.FusedSGD, "the loss")),
    ],
)
def test_overflow_line_says_when_and_what_was_not_finite(level, make, name, capsys):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model, optimizer = ampkit.initialize(model, make(model.parameters(), lr=0.01), opt_level=level)
    factors, factor = iter((1.0, math.nan, 1.0)), [1.0]
    if name != "the loss":
        dict(model.named_parameters())[name].register_hook(lambda gradient: gradient * factor[0])
    capsys.readouterr()

    def loss():
        factor[0] = next(factors)
        return model(torch.ones(2, 4)).float().mean() * (factor[0] if name == "the loss" else 1.0)

    iterate(loss, optimizer, times=3)
    ampkit.close()
    what = "the loss is nan" if name == "the loss" else f"the gradient of '{name}'"
    lines = [line for line in capsys.readouterr().out.splitlines() if "has a hook" not in line]
    assert lines == [
        f"Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0 (iteration 2: {what})"
    ]


def test_overflow_seen_by_two_optimizers_is_reported_once(capsys):
    models = [nn.Linear(4, 1), nn.Linear(4, 1)]
    optimizers = [sgd(model.parameters()) for model in models]
    ampkit.initialize(models, optimizers, opt_level="O2", num_losses=2)
    capsys.readouterr()
    backward(sum(model(torch.ones(2, 4)).sum() for model in models) * math.inf, optimizers, loss_id=1)
    for optimizer in optimizers:
        optimizer.step()
        assert ampkit.step_was_skipped(optimizer)
    ampkit.state_dict()
    assert capsys.readouterr().out.count("Gradient overflow.  Skipping step, loss scaler 1 ") == 1


def test_static_scale_reports_in_its_own_words(capsys):
    model, optimizer = initialized_aloud(opt_level="O2", loss_scale=128.0)
    capsys.readouterr()
    overflow(model, optimizer)
    line = capsys.readouterr().out
    assert "static loss scale 128" in line and "reducing" not in line


def test_a_name_does_not_break_the_line_of_what_is_kept(caplog):
    model = nn.Module()
    model.add_module("two\nlines", nn.LayerNorm(4))
    ampkit.initialize(model, opt_level="O2")
    assert "Kept in float32: 1 module (two\\nlines)" in caplog.messages


def test_the_line_of_what_is_kept_names_the_first_and_is_silent_at_verbosity_0(capsys, caplog):
    model = nn.Sequential(nn.Linear(2, 2), *(nn.LayerNorm(2) for _ in range(5)))
    ampkit.initialize(model, opt_level="O2")
    assert "Kept in float32: 5 modules (1, 2, 3, ...)\n" in capsys.readouterr().out
    ampkit.close()
    caplog.clear()
    with caplog.at_level("INFO", logger="ampkit"):
        ampkit.initialize(model.bfloat16(), opt_level="O2", verbosity=0)
    assert not caplog.records
