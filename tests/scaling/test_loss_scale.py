"""The arithmetic of loss scales, against numbers worked out on paper. No model, no kernels."""

import math

import pytest
import torch

from ampkit import CheckpointError, ConfigurationError, DynamicLossScale, LossScaleError
from ampkit.iteration.loss_scale import LossScaler


def iterate(scaler, *overflows):
    """Run an iteration for each of ``overflows``; returns the scale after each."""
    scales = []
    for overflow in overflows:
        verdict = scaler.update(torch.tensor([float(overflow)]))
        assert verdict.overflowed is bool(overflow)
        scales.append(scaler.loss_scale)
    return scales


EAGER = DynamicLossScale(growth_interval=1)
ODD = DynamicLossScale(init_scale=9.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=2)
PATIENT = DynamicLossScale(init_scale=8.0, hysteresis=2)
#: A scaler; which iterations overflow; the scale after each, and the clean iterations that are counted then.
ON_PAPER = {
    "doubles after 2000 clean ones": ([], [0] * 2000, [2.0**16] * 1999 + [2.0**17], 0),
    "counts up to there": ([], [0] * 1999, [2.0**16] * 1999, 1999),
    "halves, and counts anew": (
        [],
        [*[0] * 1500, 1, 1, *[0] * 2000],
        [2.0**16] * 1500 + [2.0**15, 2.0**14] + [2.0**14] * 1999 + [2.0**15],
        0,
    ),
    # 2^16 halves 30 times down to 2^-14 and stays: it never reaches zero.
    "stops at its floor": ([], [1] * 40, [2.0 ** (15 - i) for i in range(30)] + [2.0**-14] * 10, 0),
    "begins at a maximum below 2^16": ([DynamicLossScale(), 2.0**-14, 1024.0], [0, 1], [1024.0, 512.0], 0),
    "stops at its maximum": ([EAGER, 2.0**-14, 2.0**18], [0, 0, 0], [2.0**17, 2.0**18, 2.0**18], 0),
    "has other factors": ([ODD], [0, 0, 1, 0, 0], [9.0, 27.0, 6.75, 6.75, 20.25], 0),
    # The second overflow halves; a clean iteration gives the patience back.
    "waits for as many overflows": ([PATIENT], [1, 1, 1, 0, 1, 1], [8.0, 4.0, 2.0, 2.0, 2.0, 1.0], 0),
    "stays, where it is static": ([128.0], [0, 1, 1, 0], [128.0] * 4, 1),
    "stays, where float32 has not its number": ([1000.1], [0] * 2003, [1000.1] * 2003, 2003),
}


@pytest.mark.parametrize("case", ON_PAPER)
def test_a_scale_is_the_rule_on_paper(case):
    settings, overflows, scales, unskipped = ON_PAPER[case]
    scaler = LossScaler(*settings)
    assert iterate(scaler, *overflows) == scales and scaler.unskipped == unskipped


def test_scale_set_by_hand_above_the_maximum_is_not_lowered_by_growth():
    scaler = LossScaler(EAGER, max_loss_scale=2.0**18)
    scaler.loss_scale = 2.0**20
    assert iterate(scaler, 0, 1) == [2.0**20, 2.0**19]


def test_what_was_found_is_read_late_and_once():
    scaler, flag = LossScaler(), torch.ones(1)
    entered = scaler.current(flag.device)
    verdict = scaler.update(flag)
    assert verdict.overflowed and float(entered) == 65536.0
    # The scale has moved on the device, in the order of launches: what is written to the flag afterwards is too late.
    flag.zero_()
    assert float(scaler.current(flag.device)) == scaler.loss_scale == 32768.0
    assert verdict.overflowed and scaler.synchronize().skips_in_a_row == 1


@pytest.mark.parametrize("overflows", [False, True])
def test_an_update_that_does_not_move_the_scale_tells_the_overflow_and_leaves_every_count(overflows):
    scaler = LossScaler(PATIENT)
    iterate(scaler, 1)
    assert scaler.update(torch.full((1,), float(overflows)), moves_scale=False).overflowed == overflows
    assert (scaler.loss_scale, scaler.unskipped, scaler.synchronize().skips_in_a_row) == (8.0, 0, 1)
    assert iterate(scaler, 1) == [4.0]  # the second overflow in a row


def below_the_floor():
    scaler = LossScaler(DynamicLossScale(init_scale=4.0), min_loss_scale=1.0)
    scaler.loss_scale = 0.25
    return scaler


def at_one():
    return LossScaler(DynamicLossScale(init_scale=1.0), min_loss_scale=1.0)


#: A scaler, the iterations that overflow, and what the error says.
FIFTY = {
    "at a floor of 0.5": (  # the first halves, fifty happen at the floor
        *(lambda: LossScaler(DynamicLossScale(init_scale=1.0), min_loss_scale=0.5), [1] * 51),
        r"50 steps in a row.*floor of 0\.5",
    ),
    "at a static scale": (lambda: LossScaler(128.0), [1] * 50, r"50 steps in a row.*static.*128"),
    "at a scale set by hand below the floor": (below_the_floor, [1] * 50, r"floor of 0\.25"),
    "one too few": (at_one, [1] * 49, None),
    "a clean one between": (at_one, [*[1] * 49, 0, 1], None),
}


@pytest.mark.parametrize("case", FIFTY)
def test_fifty_skips_in_a_row_raise_once(case):
    make, overflows, words = FIFTY[case]
    scaler = make()
    iterate(scaler, *overflows)
    if words is not None:
        with pytest.raises(LossScaleError, match=words) as caught:
            scaler.report()
        assert isinstance(caught.value, FloatingPointError)
        iterate(scaler, *[1] * 49)
    scaler.report()
    if words is not None:
        iterate(scaler, 1)
        with pytest.raises(LossScaleError, match="100 steps in a row"):
            scaler.report()


def test_an_error_that_is_found_where_raising_is_out_of_place_is_raised_by_the_next_report():
    scaler = at_one()
    iterate(scaler, *[1] * 50)
    scaler.report(wait=True, raises=False)
    with pytest.raises(LossScaleError):
        scaler.report()
    scaler.report()


def test_fifty_skips_at_the_floor_warn_when_asked_to(caplog):
    scaler = LossScaler(DynamicLossScale(init_scale=1.0), min_loss_scale=1.0, on_floor="warn")
    iterate(scaler, *[1] * 50)
    scaler.report()
    assert "50 steps in a row" in caplog.text


@pytest.mark.parametrize(
    "found, rows",
    [([1] * 24, []), ([1] * 30, [30]), ([0, *[1] * 25], [25]), ([*[1] * 24, 0, *[1] * 24], []), ([1] * 80, [80])],
)
def test_many_skips_in_a_row_are_diagnosed_once_however_many_are_learned_at_once(found, rows, caplog):
    scaler = LossScaler()
    for bad in found:
        scaler.update(torch.tensor([float(bad)]))
    scaler.report(raises=False)
    scaler.report(raises=False)
    assert [record.args[1] for record in caplog.records if "steps in a row were skipped" in record.msg] == rows


def test_scale_set_by_hand_below_the_floor_does_not_rise_on_overflow():
    scaler = LossScaler(DynamicLossScale(init_scale=4.0, growth_interval=2), min_loss_scale=1.0)
    iterate(scaler, 0)
    scaler.loss_scale = 0.25
    assert iterate(scaler, 1, 1, 0, 0, 1, 1) == [0.25, 0.25, 0.25, 0.5, 0.25, 0.25]
    scaler.loss_scale = 2.0
    assert iterate(scaler, 1, 1) == [1.0, 1.0]  # the floor is min_loss_scale again


def test_state_dict_has_apex_keys_and_plain_numbers():
    scaler = LossScaler()
    iterate(scaler, 0, 1, 0, 0)
    assert repr(scaler.state_dict()) == "{'loss_scale': 32768.0, 'unskipped': 2}"


def test_state_dict_round_trip_continues_the_count():
    scaler = LossScaler()
    iterate(scaler, 1, *[0] * 1999)
    resumed = LossScaler()
    iterate(resumed, 1, 1)  # what it had counted is forgotten, on the device too
    resumed.load_state_dict(scaler.state_dict())
    known = resumed.synchronize()
    assert (known.skips_in_a_row, known.skips_at_floor) == (0, 0)
    assert iterate(resumed, 0) == iterate(scaler, 0) == [65536.0]


@pytest.mark.parametrize("before, older", [*((before, {}) for before in (0, 1, 2, 3, 5)), (5, {"overflows_left": -2})])
def test_state_dict_round_trip_keeps_the_patience_of_a_hysteresis(before, older):
    """Three overflows in a row lower the scale of 8: overflows before and after the checkpoint count together."""
    rule = DynamicLossScale(init_scale=8.0, hysteresis=3)
    scaler, resumed = LossScaler(rule), LossScaler(rule)
    iterate(scaler, *[1] * before)
    resumed.load_state_dict(scaler.state_dict() | older)  # once it was saved as 3 - before
    assert iterate(resumed, 1, 1, 1) == [8.0 * 0.5 ** max(0, before + after - 2) for after in (1, 2, 3)]


def test_loading_a_scale_below_the_floor_lifts_it():
    scaler = LossScaler()
    scaler.load_state_dict({"loss_scale": 2.0**-20, "unskipped": 0})
    assert scaler.loss_scale == 2.0**-14


def test_loading_into_a_static_scale_keeps_it_and_warns(caplog):
    scaler = LossScaler(1.0)
    scaler.load_state_dict({"loss_scale": 65536.0, "unskipped": 3})
    assert scaler.loss_scale == 1.0
    assert "65536" in caplog.text


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"loss_scale": 0.0, "unskipped": 0},
        {"loss_scale": math.inf, "unskipped": 0},
        {"loss_scale": 2.0, "unskipped": -1},
        {"loss_scale": 1e39, "unskipped": 0},
        {"loss_scale": 2.0, "unskipped": 2**31},
        [1],
    ],
)
def test_loading_something_else_changes_nothing(state):
    scaler = LossScaler()
    iterate(scaler, 1)
    with pytest.raises(CheckpointError):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == {"loss_scale": 32768.0, "unskipped": 0}


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, "8", True])
def test_assigning_a_scale_that_is_no_positive_number_is_refused(value):
    with pytest.raises(ConfigurationError, match="positive"):
        LossScaler().loss_scale = value


@pytest.mark.parametrize(
    "rule",
    [
        {"init_scale": 0.0},
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"backoff_factor": 0.0},
        {"growth_interval": 0},
        {"hysteresis": 0},
        {"growth_interval": 2.5},
    ],
)
def test_rule_that_cannot_work_is_refused_by_name(rule):
    with pytest.raises(ConfigurationError, match=next(iter(rule))):
        DynamicLossScale(**rule)
