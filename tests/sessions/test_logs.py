"""Who hears what: the banner, the overflow lines, the culprit after many skips, and where they are written."""

import logging
import math
import sys

import pytest
import torch
from helpers import iterate, net_with_norm
from torch import nn
from torch.nn import functional as F

import ampkit


def initialized_aloud(**settings):
    """A model and its optimizer, with all that `initialize` says."""
    model = net_with_norm(4, 4, 1)
    return ampkit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)


def overflow(model, optimizer, times=1, factor=math.inf):
    iterate(lambda: model(torch.ones(2, 4)).float().sum() * factor, optimizer, times)


def test_banner_rows_are_written_to_standard_output(capsys):
    initialized_aloud(opt_level="O2", loss_scale=128.0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Selected optimization level O2")
    assert f"{'keep_batchnorm_fp32':22} : True" in lines
    assert f"{'loss_scale':22} : dynamic" in lines  # the level's default
    assert f"{'loss_scale':22} : 128.0" in lines  # after the override
    names = [line.split(" :")[0].strip() for line in lines if " : " in line]
    assert names[:8] == [
        "enabled",
        "opt_level",
        "cast_model_type",
        "patch_torch_functions",
        "patch_torch_functions_type",
        "keep_batchnorm_fp32",
        "master_weights",
        "loss_scale",
    ]


def test_verbosity_0_is_silent(capsys):
    model, optimizer = initialized_aloud(opt_level="O2", verbosity=0)
    overflow(model, optimizer)
    assert capsys.readouterr().out == ""


def test_handler_leaves_with_the_last_session():
    logger = logging.getLogger("ampkit")
    before = list(logger.handlers), logger.level
    initialized_aloud()
    assert len(logger.handlers) == len(before[0]) + 1
    ampkit.close()
    assert (list(logger.handlers), logger.level) == before


def test_handler_of_the_application_is_the_only_one(capsys):
    logger = logging.getLogger("ampkit")
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        initialized_aloud()
        assert capsys.readouterr().out == ""
        assert any("Selected optimization level" in record.getMessage() for record in records)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


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


def test_a_log_file_of_the_application_leaves_the_terminal_to_us(capsys, tmp_path, monkeypatch):
    handler = logging.FileHandler(tmp_path / "log")
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    initialized_aloud(opt_level="O2")
    handler.close()
    assert capsys.readouterr().out.count("Selected optimization level O2") == 1
    assert (tmp_path / "log").read_text().count("Selected optimization level O2") == 1


def test_a_handler_for_warnings_alone_leaves_the_banner_to_us(capsys, monkeypatch):
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    initialized_aloud(opt_level="O2")
    written = capsys.readouterr()
    assert written.out.count("Selected optimization level O2") == 1 and written.err == ""


def test_other_ranks_are_silent(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    initialized_aloud()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_overflow_line_starts_as_scripts_expect_it(level, capsys):
    model, optimizer = initialized_aloud(opt_level=level)
    capsys.readouterr()
    overflow(model, optimizer)
    assert capsys.readouterr().out.splitlines() == [
        "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0"
    ]


def test_overflow_seen_by_two_optimizers_is_reported_once(capsys):
    models = [nn.Linear(4, 1), nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    models, optimizers = ampkit.initialize(models, optimizers, opt_level="O2", num_losses=2)
    capsys.readouterr()
    loss = sum(model(torch.ones(2, 4)).sum() for model in models) * math.inf
    with ampkit.scale_loss(loss, optimizers, loss_id=1) as scaled:
        scaled.backward()
    for optimizer in optimizers:
        optimizer.step()
    assert capsys.readouterr().out.count("Gradient overflow.  Skipping step, loss scaler 1 ") == 1
    assert all(ampkit.step_was_skipped(optimizer) for optimizer in optimizers)


def test_static_scale_reports_in_its_own_words(capsys):
    model, optimizer = initialized_aloud(opt_level="O2", loss_scale=128.0)
    capsys.readouterr()
    overflow(model, optimizer)
    line = capsys.readouterr().out
    assert "static loss scale 128" in line
    assert "reducing" not in line


def test_static_scale_of_1_checks_nothing():
    model, optimizer = initialized_aloud(opt_level="O5", verbosity=0)
    overflow(model, optimizer)
    assert not ampkit.step_was_skipped(optimizer)
    assert not torch.isfinite(model[3].weight).all()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_many_skips_name_the_first_parameter_that_is_not_finite(level, capsys):
    model, optimizer = initialized_aloud(opt_level=level)
    model[0].weight.register_hook(lambda gradient: gradient * math.nan)
    overflow(model, optimizer, 24, factor=1.0)
    assert "not finite is" not in capsys.readouterr().out
    overflow(model, optimizer, 1, factor=1.0)
    output = capsys.readouterr().out
    assert "25 steps in a row were skipped" in output
    assert "'0.weight'" in output


def test_many_skips_at_the_floor_end_the_training():
    model, optimizer = initialized_aloud(opt_level="O2", min_loss_scale=1.0, max_loss_scale=2.0, verbosity=0)
    # One skip from 2 to 1, then 50 at the floor of 1.
    overflow(model, optimizer, 50)
    with pytest.raises(ampkit.LossScaleError, match="floor of 1"):
        overflow(model, optimizer)
    assert F.mse_loss(model(torch.ones(2, 4)), torch.zeros(2, 1)).isfinite()


def test_many_skips_at_the_floor_go_on_when_asked_to():
    model, optimizer = initialized_aloud(
        opt_level="O2", min_loss_scale=1.0, max_loss_scale=1.0, on_floor="warn", verbosity=0
    )
    overflow(model, optimizer, 60)
    assert ampkit.state_dict()["loss_scaler0"]["loss_scale"] == 1.0
