"""inf, NaN, overflow and underflow: in the batch, the loss, one element of a gradient, a whole gradient, every gradient."""

from __future__ import annotations

import functools
import math
import random
from dataclasses import replace
from typing import Any
from unittest import TestCase

import torch
from helpers import ScaleOnPaper, backward

import ampkit
from ampkit.iteration.loss_scale import SKIPS_AT_FLOOR_BEFORE_GIVING_UP

from .promise import promise
from .runs import OPTIMIZERS, Fault, Recipe, Run, assert_finite, assert_same

#: ``with heard(level) as log`` collects the messages of ampkit's logger in ``log.output``.
heard = functools.partial(TestCase().assertLogs, "ampkit")


@promise(
    "A skipped step leaves nothing: weights, their rests, moments and counts of steps are those of a run that has never "
    "seen the batch, bit for bit, running statistics are finite, and the loss scale moves by its rule.",
    "inf or NaN in the batch, the loss, one element, one gradient or all; any level, optimizer, accumulation",
    share=3.0,
)
def a_skipped_step_leaves_nothing(draw: random.Random) -> int:
    recipe = Recipe.drawn(draw)
    plan = [(number, Fault.drawn(draw, recipe) if draw.random() < 0.4 else None) for number in range(12)]
    run, case = Run(recipe), (recipe, plan)
    papers = papers_of(recipe)
    for number, fault in plan:
        for player in range(len(run.players)):
            bad = fault if fault is not None and fault.player == player else None
            before = run.trained()
            skipped = run.turn(number, player, bad)
            assert skipped == (bad is not None), (number, player, skipped, case)
            if skipped:
                assert_same(run.trained(), before, (number, player, case))
            assert_finite(run.statistics(), (number, player, case))
            follow(papers, run, number, player, bad)
    assert_as_undisturbed(run, plan, case)
    return sum(fault is not None for _, fault in plan)


def assert_as_undisturbed(run: Run, plan: list[tuple[int, Fault | None]], case: Any) -> None:
    """Compare a run that ends here with a run in which the players whose turns had faults have left these out."""
    trained = run.trained()
    ampkit.close()
    undisturbed = Run(run.recipe, run.scales)
    for number, fault in plan:
        undisturbed.iterate(number, leaves_out=None if fault is None else fault.player)
    assert_same(trained, undisturbed.trained(), case)


def papers_of(recipe: Recipe) -> list[ScaleOnPaper]:
    """The loss scale of each loss by the rule in plain numbers; none for a scale that does not move."""
    losses = 0 if recipe.rule is None else 2 if recipe.model == "gan" else 1
    return [ScaleOnPaper(recipe.rule, 2.0**-14, recipe.settings["max_loss_scale"]) for _ in range(losses)]


def follow(papers: list[ScaleOnPaper], run: Run, number: int, player: int, fault: Fault | None) -> None:
    """Check that the loss scale of every block of this turn was the one on paper."""
    for part in range(run.recipe.parts if papers else 0):
        paper, found = papers[run.players[player].loss_id], run.scales[number, player, part]
        assert found == paper.scale, (number, player, part, found, paper.scale, run.recipe)
        paper.after(overflow=fault is not None and fault.part == part)


@promise(
    "A storm ends in an error that says why: the scale stays within its bounds, a warning names the parameter, and training "
    "ends after 50 skips at the floor with weights as they were before it.",
    "gradients of one parameter that are never finite again",
)
def a_storm_ends_in_an_error_that_names_the_cause(draw: random.Random) -> int:
    recipe = Recipe.drawn(draw, level=draw.choice(["O1", "O2"]), model=draw.choice(["cnn", "llama"]), parts=1)
    recipe = replace(recipe, rule=replace(recipe.rule, hysteresis=1))
    run = Run(recipe)
    run.iterate(0)
    names = [name for name, param in run.players[0].model.named_parameters() if param.grad is not None]
    place = draw.randrange(len(names))
    fault = Fault(draw.choice(["element", "gradient"]), draw.choice([math.inf, math.nan]), where=place)
    floor_at = round(math.log2(ampkit.state_dict()["loss_scaler0"]["loss_scale"]) + 14)
    before, number = run.trained(), 0
    with heard("WARNING") as log:
        try:
            for number in range(1, 200):
                run.iterate(number, replace(fault, where=place + len(names) * draw.randrange(100)))
                assert 2.0**-14 <= ampkit.state_dict()["loss_scaler0"]["loss_scale"] <= 2.0**20, recipe
        except ampkit.LossScaleError as error:
            assert f"{SKIPS_AT_FLOOR_BEFORE_GIVING_UP} steps in a row" in str(error), (error, recipe)
        else:
            raise AssertionError(f"200 skips in a row and no error: {recipe}")
    # Raised in the step, or where the next block begins.
    assert number - floor_at - SKIPS_AT_FLOOR_BEFORE_GIVING_UP in (0, 1), (number, floor_at, recipe)
    assert any(repr(names[place]) in line for line in log.output), (names[place], log.output, recipe)
    assert_same(run.trained(), before, recipe)
    assert_finite(run.statistics(), recipe)
    return number


@promise(
    "Training goes on after a storm, bit for bit as if only the good iterations had been.",
    "100 spoiled iterations in a row, or every second one of 200",
)
def training_goes_on_after_a_storm(draw: random.Random) -> int:
    recipe = Recipe.drawn(draw, parts=1)
    alternates = draw.random() < 0.5
    fault = Fault.drawn(draw, recipe)
    spoiled = set(range(3, 203, 2)) if alternates else set(range(3, 103))
    run = Run(recipe, initializes=False)
    run.initialize(on_floor="warn")
    where = {number: draw.randrange(10**6) for number in sorted(spoiled)}
    plan = [(n, replace(fault, where=where[n]) if n in spoiled else None) for n in range(max(spoiled) + 4)]
    for number, bad in plan:
        run.iterate(number, bad)
    assert_finite(run.statistics(), (recipe, fault, alternates))
    assert_as_undisturbed(run, plan, (recipe, fault, alternates))
    return len(spoiled)


@promise(
    "What would underflow in float16 arrives: gradients of a loss 2^-k are exactly 2^-k times those of the loss.",
    "losses down to 2^-30, at a scale as much larger",
)
def what_would_underflow_arrives(draw: random.Random) -> int:
    recipe = Recipe.drawn(
        draw, level=draw.choice(["O1", "O2"]), dtype=torch.float16, model=draw.choice(["cnn", "llama"]), parts=1
    )
    shrinks = draw.randint(8, 30)
    rule = ampkit.DynamicLossScale(2.0 ** draw.randint(4, 10), growth_interval=10**6)
    large = gradients(replace(recipe, rule=rule), 1.0)
    small = gradients(replace(recipe, rule=replace(rule, init_scale=rule.init_scale * 2.0**shrinks)), 2.0**-shrinks)
    for name, grad in large.items():
        assert torch.equal(grad * 2.0**-shrinks, small[name]), (name, shrinks, recipe)
    return len(large)


def gradients(recipe: Recipe, factor: float) -> dict[str, torch.Tensor]:
    """The gradients of the first batch, with the loss times ``factor``."""
    run = Run(recipe, initializes=False)
    player = run.players[0]
    run.initialize(max_loss_scale=2.0**60)
    torch.manual_seed(0)
    loss = player.loss(run.batch(0, 0, 0)) * factor
    backward(loss, player.optimizer)
    grads = {name: param.grad.float() for name, param in player.model.named_parameters() if param.grad is not None}
    ampkit.close()
    return grads


@promise(
    "Steps are those of plain torch in float32 over the same gradients.",
    "60 iterations at O0, O1, O2, O4, O5 with every fifth one spoiled, beside float32 weights stepped by torch",
    share=2.0,
)
def steps_are_those_of_plain_torch(draw: random.Random) -> int:
    plain = [name for name, maker in OPTIMIZERS.items() if maker.plain is not None]
    recipe = Recipe.drawn(draw, level=draw.choice(["O0", "O1", "O2", "O4", "O5"]), optimizer=draw.choice(plain))
    run = Run(recipe)
    masters = [{name: value.float().clone() for name, value in x.model.state_dict().items()} for x in run.players]
    params = [
        {name: torch.nn.Parameter(weights[name]) for name, _ in player.model.named_parameters()}
        for weights, player in zip(masters, run.players)
    ]
    optimizers = [OPTIMIZERS[recipe.optimizer].plain(list(weights.values())) for weights in params]
    attacks = 0
    for number in range(60):
        fault = Fault.drawn(draw, recipe) if draw.random() < 0.2 else None
        attacks += fault is not None
        for index, player in enumerate(run.players):
            gradients: dict[str, Any] = {}
            player.optimizer.zero_grad()
            bad = fault if fault is not None and fault.player == index else None
            for part in range(recipe.parts):
                run.block(number, index, part, bad if bad is not None and bad.part == part else None)
            for name, param in player.model.named_parameters():
                gradients[name] = None if param.grad is None else param.grad.detach().float().clone()
            if recipe.max_norm is not None:
                ampkit.clip_grad_norm_(player.optimizer, recipe.max_norm)
            player.optimizer.step()
            finite = all(bool(grad.isfinite().all()) for grad in gradients.values() if grad is not None)
            assert finite == (bad is None), (number, recipe, fault)
            if finite:
                for name, param in params[index].items():
                    param.grad = gradients[name]
                if recipe.max_norm is not None:
                    torch.nn.utils.clip_grad_norm_(list(params[index].values()), recipe.max_norm)
                with ampkit.disable_casts():
                    optimizers[index].step()
    for player, weights in zip(run.players, params):
        for name, value in player.model.state_dict().items():
            if name in weights:
                assert torch.allclose(value, weights[name], rtol=1e-4, atol=1e-5), (name, value, weights[name], recipe)
    return attacks
