"""Sessions: several at once, again and again, and what ends them (by close, by garbage collection, by the next initialize)."""

import contextlib
import copy
import functools
import gc
import threading
import tracemalloc

import pytest
import torch
from helpers import STORED_BF16, assert_skips, at, backward, in_threads, iterate, net_with_norm, others_slow
from torch import nn
from torch.nn import functional as F

import ampkit
from ampkit.registry import live_sessions


def make_pair():
    model = net_with_norm(4, 8, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def initialized_pair(level="O2", **settings):
    return ampkit.initialize(*make_pair(), **at(level, verbosity=0, **settings))


def shrink_output(model, optimizer, times=1, **flags):
    """Run iterations that bring the output for ones towards zero; returns the last loss."""
    return iterate(lambda: model(torch.ones(2, 4)).float().square().mean(), optimizer, times, **flags)


def test_scalers_are_numbered_across_sessions():
    first = initialized_pair("O1", num_losses=2, loss_scale=128.0)
    assert ampkit.state_dict() == {f"loss_scaler{i}": {"loss_scale": 128.0, "unskipped": 0} for i in range(2)}
    second = initialized_pair()
    shrink_output(*first, loss_id=1)
    shrink_output(*second, times=2)
    assert ampkit.state_dict() == {
        "loss_scaler0": {"loss_scale": 128.0, "unskipped": 0, "session": 0},
        "loss_scaler1": {"loss_scale": 128.0, "unskipped": 1, "session": 0},
        "loss_scaler2": {"loss_scale": 65536.0, "unskipped": 2, "session": 1},
    }
    ampkit.load_state_dict({f"loss_scaler{i}": {"loss_scale": 2.0**i, "unskipped": 10 + i} for i in range(3)})
    assert ampkit.state_dict()["loss_scaler2"] == {"loss_scale": 4.0, "unskipped": 12, "session": 1}
    live_sessions[0].close()
    assert list(ampkit.state_dict()) == ["loss_scaler0"]


def fold(iterations):
    pair = initialized_pair("O1")
    if iterations:
        shrink_output(*pair, times=iterations)
    return pair


def unskipped():
    return [scaler.unskipped for session in live_sessions for scaler in session.scalers]


@pytest.mark.parametrize("alive", ("when saved", "when loaded", "both times"))
def test_the_newest_session_resumes_what_the_newest_had(alive):
    """Cross-validation: fold 3 is saved and resumed, while something holds models of the folds before it."""
    folds = [fold(1), fold(2)] if alive != "when loaded" else []
    folds.append(fold(7))
    saved = ampkit.state_dict()
    ampkit.close()
    earlier = [fold(3), fold(4)] if alive != "when saved" else []
    current = fold(0)
    ampkit.load_state_dict(saved)
    assert unskipped() == {"when saved": [7], "when loaded": [3, 4, 7], "both times": [1, 2, 7]}[alive]
    del folds, earlier, current


def test_folds_that_only_cycles_hold_are_not_saved():
    earlier = fold(1)
    current = fold(7)
    earlier[0].itself = earlier
    del earlier
    gc.disable()
    try:
        assert ampkit.state_dict() == {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 7}}
    finally:
        gc.enable()
    del current


@pytest.mark.parametrize("closes", [False, True], ids=["before initialize", "after close"])
def test_a_state_without_a_session_is_told_to_come_after_initialize(closes, caplog):
    if closes:
        initialized_pair("O1")
        ampkit.close()
    ampkit.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 1}})
    assert "before initialize(), or after close(): no loss scale was loaded" in caplog.text


def test_losses_of_one_session_are_loaded_from_the_first_on(caplog):
    """A file without session numbers is Apex's, or of one session: its order is the order of losses."""
    _held = initialized_pair("O1", num_losses=2)
    ampkit.load_state_dict({f"loss_scaler{i}": {"loss_scale": 2.0, "unskipped": 10 + i} for i in range(3)})
    assert unskipped() == [10, 11]
    assert "Was num_losses changed?" in caplog.text


@pytest.mark.parametrize("loss_id", (-1, 1, 2, "0", False, 0.0, None))
def test_loss_id_counts_within_the_session_of_the_optimizer(loss_id):
    first, second = initialized_pair("O1", num_losses=1), initialized_pair("O1", num_losses=4)
    with pytest.raises(ampkit.LossIdError) as caught:
        shrink_output(*first, loss_id=loss_id)
    for word in (f"loss_id={loss_id!r}", "num_losses=1", "from 0 to 0", "Pass num_losses="):
        assert word in str(caught.value)
    shrink_output(*second, loss_id=3)


@pytest.mark.parametrize("levels", [("O1", "O2"), ("O2", "O1"), ("O0", "O5")])
def test_optimizers_of_two_sessions_share_a_loss(levels):
    """The loss scale is that of the first optimizer's session; gradients are those of float32, in each session."""
    models = [nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False)]
    plain = copy.deepcopy(models)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.25) for model in models]
    for model, optimizer, level, scale in zip(models, optimizers, levels, (8.0, 64.0)):
        ampkit.initialize(model, optimizer, opt_level=level, loss_scale=scale, policy="apex", verbosity=0)

    def loss_of(encoder, decoder, x):
        return decoder(encoder(x)).float().mean()

    loss = loss_of(*models, torch.ones(2, 4))
    with ampkit.scale_loss(loss, optimizers) as scaled:
        assert torch.equal(scaled, 8 * loss)
        scaled.backward()
    loss_of(*plain, torch.ones(2, 4)).backward()
    for optimizer, reference in zip(optimizers, plain):
        (param,) = ampkit.master_params(optimizer)
        assert torch.allclose(param.grad, reference.weight.grad, rtol=2e-2, atol=1e-3)
        optimizer.step()
    assert unskipped() == [1, 0]
    backward(loss_of(*models, torch.full((2, 4), float("inf"))), optimizers)
    for model, optimizer in zip(models, optimizers):
        assert_skips(model, optimizer)
    # An overflow in gradients of the other session's optimizer alone is counted by the loss scaler that scaled.
    for value, clean in ((1.0, 1), (float("inf"), 0)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(models[1](torch.full((2, 4), value)).float().mean(), optimizers)
        assert unskipped() == [clean, 0]


def test_gradients_outside_of_a_block_are_told_of_after_another_session_has_closed(caplog):
    _first, second = (initialized_pair(loss_scale=8.0) for _ in range(2))
    live_sessions[0].close()
    second[0](torch.ones(2, 4)).float().sum().backward()
    second[1].step()
    assert "outside of every scale_loss block" in caplog.text


def test_a_loss_is_not_shared_with_a_disabled_session():
    (_model, first), (other, second) = initialized_pair("O1"), make_pair()
    ampkit.initialize(other, second, enabled=False)
    for optimizers in ([first, second], [second, first]):
        with pytest.raises(ampkit.ConfigurationError, match="enabled=False"):
            with ampkit.scale_loss(torch.ones(()), optimizers):
                pass


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_threads_initialize_and_train_as_alone(where, caplog, threads_take_turns_often):
    """Train in four threads at once, at levels of their own: the same weights, bit for bit, and not a word."""
    levels = ("O1", "O2", "O4", "O5")

    def train(level, pair, initializes=True):
        if initializes:
            ampkit.initialize(*pair, opt_level=level, verbosity=0)
        shrink_output(*pair, times=5)
        return [value.clone() for value in pair[0].state_dict().values()]

    alone = []
    for level in levels:
        alone.append(train(level, make_pair()))
        ampkit.close()
    pairs, trained, start = [make_pair() for _ in levels], {}, threading.Barrier(4)
    for level, pair in zip(levels, pairs):
        if where == "outside":
            ampkit.initialize(*pair, opt_level=level, verbosity=0)

    def work(level, pair):
        start.wait()
        trained[level] = train(level, pair, initializes=where == "inside")

    in_threads(*(functools.partial(work, *each) for each in zip(levels, pairs)))
    for level, values in zip(levels, alone):
        assert all(map(torch.equal, trained[level], values)), level
    assert caplog.text == ""


def train_while(pair, meanwhile):
    """Run an iteration at O2, with something else in another thread in the midst of its block."""
    loss = pair[0](torch.ones(2, 4)).float().square().mean()
    with ampkit.scale_loss(loss, pair[1]) as scaled:
        scaled.backward()
        in_threads(meanwhile)
    pair[1].step()


def test_blocks_of_two_threads_are_open_at_once_beside_what_a_third_has_trained():
    pair = initialized_pair()
    in_threads(lambda: shrink_output(*initialized_pair()))
    train_while(pair, lambda: shrink_output(*initialized_pair()))
    assert not ampkit.step_was_skipped(pair[1])


def test_gradients_of_what_a_thread_has_left_behind_are_touched_by_no_other():
    """Two threads at once at one ``.grad`` corrupt torch's heap."""
    model, optimizer = initialized_pair()
    in_threads(lambda: shrink_output(model, optimizer))
    model[0].weight.grad = torch.ones_like(model[0].weight)
    kept, seen = model[0].weight.grad, []
    train_while(initialized_pair(), lambda: seen.append(model[0].weight.grad))
    assert seen[0] is kept is model[0].weight.grad


def test_a_thread_is_told_to_initialize_what_it_trains_itself():
    """Blocks of the thread that has initialized would otherwise touch gradients while another thread computes them."""
    pairs = list(zip(*ampkit.initialize(*zip(make_pair(), make_pair()), opt_level="O2", verbosity=0)))
    with pytest.raises(ampkit.ConfigurationError, match=r"each calls initialize\(\)"):
        train_while(pairs[0], lambda: shrink_output(*pairs[1]))
    shrink_output(*pairs[0])


def test_a_block_leaves_gradients_alone_of_a_session_that_another_thread_has_made():
    """Also while that thread is still in initialize, when no optimizer is known to be its own yet."""
    other, barrier = nn.Linear(2, 2), threading.Barrier(2, timeout=60)

    def beside():
        ampkit.initialize(other, opt_level="O1", verbosity=0)
        other.weight.grad = torch.ones(2, 2)
        barrier.wait()
        barrier.wait()

    def train():
        barrier.wait()
        seen = []
        train_while(initialized_pair("O1"), lambda: seen.append(other.weight.grad))
        assert seen[0] is other.weight.grad is not None and other.weight.grad.eq(1).all()
        barrier.wait()

    in_threads(beside, train)


def test_forward_of_another_level_runs_uncast():
    models, x = {level: nn.Linear(2, 2) for level in ("O0", "O5", "O1")}, torch.ones(2, 2)
    for level, model in models.items():
        ampkit.initialize(model, opt_level=level, verbosity=0)
    dtypes = [model(x).dtype for model in models.values()]
    assert dtypes == [torch.float32, torch.bfloat16, torch.bfloat16]
    assert torch.mm(x, x).dtype is torch.bfloat16


def test_casts_inside_of_a_model_go_on_when_o1_comes_in_another_precision_and_when_it_goes():
    first, second, dtypes = make_pair(), make_pair(), []
    first[0][0].register_forward_hook(lambda *of_call: dtypes.append(of_call[2].dtype))
    ampkit.initialize(*first, opt_level="O5", verbosity=0)
    ampkit.initialize(*second, opt_level="O1", patch_torch_functions_type=torch.float16, verbosity=0)
    shrink_output(*first)
    del second
    gc.collect()
    shrink_output(*first)
    assert dtypes == [torch.bfloat16] * 2


def test_second_lower_precision_at_o1_is_refused_and_touches_nothing():
    first, second = initialized_pair("O1"), initialized_pair(STORED_BF16)
    with pytest.raises(ampkit.ConfigurationError, match=r"torch\.float16.*torch\.bfloat16.*ampkit\.close\(\)"):
        ampkit.initialize(*second, opt_level="O1", patch_torch_functions_type=torch.float16, verbosity=0)
    assert second[0][0].weight.dtype is torch.bfloat16 and len(live_sessions) == 2
    shrink_output(*second)
    # The session that holds the patches may change its own mind.
    ampkit.initialize(*first, opt_level="O1", patch_torch_functions_type=torch.float16, verbosity=0)
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float16


def test_patches_stay_until_the_last_session_at_o1_closes():
    plain, _first, second = torch.mm, initialized_pair("O1"), initialized_pair("O4")
    live_sessions[0].close()
    assert torch.mm is not plain and second[0](torch.ones(1, 4)).dtype is torch.bfloat16
    live_sessions[0].close()
    assert torch.mm is plain


def test_calls_outside_of_models_are_cast_no_more_after_the_last_session_at_o1():
    x, _first, _second = torch.ones(2, 2), initialized_pair("O1"), initialized_pair()
    assert torch.mm(x, x).dtype is torch.bfloat16
    live_sessions[0].close()
    _later = initialized_pair()  # goes on with the engine of the second
    assert torch.mm(x, x).dtype is torch.float32


def everything():
    """Count what must not grow: live tensors, ampkit's objects, hooks of torch.nn, torch's patches."""
    gc.collect()
    objects = gc.get_objects()
    tensors = sum(issubclass(type(thing), torch.Tensor) for thing in objects)
    ours = sum(str(type(thing).__module__).startswith("ampkit") for thing in objects)
    classes = sum(issubclass(type(thing), type) and "_ampkit_own_class" in vars(thing) for thing in objects)
    patched = sum(hasattr(value, "__wrapped__") for value in (*vars(torch).values(), *vars(F).values()))
    return tensors, ours, classes, patched, len(live_sessions), len(vars(torch.Tensor))


def shape_of(model, optimizer):
    modules = [(len(vars(m)), *(len(v) for k, v in vars(m).items() if k.endswith("_hooks"))) for m in model.modules()]
    return modules, sorted(vars(optimizer)), len(type(model).__mro__)


@pytest.mark.parametrize("level", others_slow("O2", of=("O0", "O1", "O2", "O3")))
@pytest.mark.parametrize("same_model", (True, False), ids=("same model", "new models"))
def test_thirty_times_leaves_what_two_left(level, same_model):
    pair = make_pair() if same_model else None
    counts, shapes, memory = {}, {}, {}
    gc.collect()
    gc.freeze()  # objects from before are not ampkit's, and slow to walk; conftest.py has frozen nearly all of them for good
    tracemalloc.start()
    try:
        for time in range(1, 31):
            model, optimizer = pair or make_pair()
            ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
            shrink_output(model, optimizer)
            if time in (2, 16, 30):
                shapes[time] = shape_of(model, optimizer)
                counts[time] = everything()
                memory[time] = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert counts[30] == counts[2] and shapes[30] == shapes[2]
    # Torch's own classes come and go by some hundred bytes a round; a session that stays takes some thousand. What is loaded
    # once, on the way, takes millions, but only in one half.
    assert min(memory[16] - memory[2], memory[30] - memory[16]) < 14 * 1024, memory


@pytest.mark.parametrize("level", ("O0", "O1", "O2", "O5"))
def test_weight_that_another_session_stores_trains_in_float32_or_is_refused(level):
    stored, (model, optimizer) = nn.Linear(4, 4, bias=False), make_pair()
    nn.init.ones_(stored.weight)
    ampkit.initialize(stored, opt_level="O2", verbosity=0)
    ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
    group = {"params": [stored.weight], "lr": 2.0**-12, "momentum": 0.0}  # an eighth of what bfloat16 tells apart at 1
    if level != "O2":
        with pytest.raises(ampkit.ConfigurationError, match=f"at {level} .* another session stores"):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1
        return
    optimizer.add_param_group(group)
    iterate(lambda: stored(torch.ones(1, 4)).sum(), optimizer, 3)
    assert torch.equal(stored.state_dict()["weight"], torch.full((4, 4), 1 - 3 * 2.0**-12))


def test_second_initialize_of_half_the_things_closes_the_whole_session():
    first, second = make_pair(), make_pair()
    ampkit.initialize(*zip(first, second), opt_level="O2", verbosity=0)
    ampkit.initialize(*first, opt_level="O1", verbosity=0)
    assert {p.dtype for p in second[0].parameters()} == {torch.float32}
    with pytest.raises(ampkit.NotInitializedError):
        shrink_output(*second)


@pytest.mark.parametrize("level", ("O0", "O1", "O2", "O3"))
def test_session_dies_with_its_models_and_optimizers(level):
    plain = torch.mm
    model, optimizer = initialized_pair(level)
    shrink_output(model, optimizer)
    del model
    gc.collect()
    assert len(live_sessions) == 1
    del optimizer
    gc.collect()
    assert live_sessions == [] and torch.mm is plain


def test_session_of_a_dead_model_is_no_obstacle_to_the_next():
    for dtype in (torch.bfloat16, torch.float16):
        model, _ = initialized_pair("O1", patch_torch_functions_type=dtype)
        model.itself = [model]  # a cycle: only the collector can free it
        del model, _


def test_session_closes_at_the_end_of_its_block():
    outside, inside = initialized_pair("O5"), make_pair()
    with ampkit.session(*inside, "O1", verbosity=0) as (model, optimizer):
        assert (model, optimizer) == inside
        assert ampkit.current_session().models == [model]
        shrink_output(model, optimizer)
        assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.bfloat16
    assert ampkit.current_session().models == [outside[0]]
    assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.float32


@pytest.mark.parametrize("leaves", ["by an error", "after close"])
def test_session_closes_once_however_its_block_ends(leaves):
    model, _ = make_pair()
    with contextlib.suppress(KeyError), ampkit.session(model, opt_level="O2", verbosity=0) as yielded:
        assert yielded is model
        if leaves == "by an error":
            raise KeyError
        ampkit.current_session().close()
        ampkit.close()
    assert ampkit.current_session() is None
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_wrapper_put_on_top_stays_after_close_and_ours_is_inert():
    model, optimizer = initialized_pair()
    wrapped_step, calls = optimizer.step, []

    def on_top(*args, **kwargs):
        calls.append(args)
        return wrapped_step(*args, **kwargs)

    optimizer.step = on_top
    shrink_output(model, optimizer)
    ampkit.close()
    assert optimizer.step is on_top and "zero_grad" not in vars(optimizer)
    before = model[0].weight.detach().clone()
    momentum = optimizer.state[model[0].weight]["momentum_buffer"].clone()
    model.zero_grad()
    model[0].weight.grad = torch.full_like(before, 0.5)
    optimizer.step()
    assert len(calls) == 2
    # SGD by hand: momentum 0.9, lr 0.1
    assert torch.allclose(model[0].weight, before - 0.1 * (0.9 * momentum + 0.5), atol=1e-6)


CHANGES = [
    *((level, "half", part) for level in ("O0", "O1", "O2", "O3", "O5") for part in ("", "3", "1")),
    *(("O1", "double", ""), ("O2", "double", "3"), ("O1", "bfloat16", ""), ("O2", "float", ""), ("O3", "float", "")),
]
DTYPES = {"half": torch.float16, "double": torch.float64, "bfloat16": torch.bfloat16, "float": torch.float32}


@pytest.mark.parametrize("level, change, part", CHANGES)
def test_changed_dtype_raises_at_the_next_forward_by_name(level, change, part):
    model, optimizer = initialized_pair(level)
    shrink_output(model, optimizer)
    getattr(model.get_submodule(part), change)()
    words = rf"'{part or 0}.weight' is {DTYPES[change]}.*Do not change the dtype"
    with pytest.raises(ampkit.ConfigurationError, match=words):
        model(torch.ones(1, 4))


@pytest.mark.cuda
def test_to_another_device_takes_masters_along():
    model, optimizer = initialized_pair(STORED_BF16)
    shrink_output(model, optimizer)
    model.cuda()
    assert {p.device.type for p in ampkit.master_params(optimizer)} == {"cuda"}


def test_a_copy_of_an_optimizer_was_not_initialized():
    """An optimizer that does not define what its copy takes along, as torch's do, shares everything with the copy."""

    class Plain:
        step = zero_grad = lambda self: None

    model, optimizer = nn.Linear(2, 2), Plain()
    optimizer.param_groups, optimizer.state = [{"params": list(model.parameters())}], {}
    ampkit.initialize(model, optimizer, opt_level="O1", verbosity=0)
    with pytest.raises(ampkit.NotInitializedError, match="not passed to initialize"):
        ampkit.scale_loss(model(torch.ones(1, 2)).sum(), copy.copy(optimizer))


@pytest.mark.parametrize("is_taken_out", (True, False))
@pytest.mark.parametrize("after", ("O1", "O2", "O5"))
def test_a_layer_that_outlives_its_model_is_float32_with_its_values(is_taken_out, after):
    model, optimizer = make_pair()
    values, layer = model[0].weight.detach().clone(), model[0]
    optimizer.param_groups[0]["lr"] = 0.0
    ampkit.initialize(model, optimizer, verbosity=0, **at(STORED_BF16))
    shrink_output(model, optimizer)
    if is_taken_out:
        model[0] = nn.Identity()
        ampkit.close()
    del model, optimizer
    gc.collect()
    assert layer.weight.dtype is torch.float32 and torch.equal(layer.weight, values)
    assert not [name for name in vars(layer) if "ampkit" in name or name == "__deepcopy__"]
    again = nn.Sequential(layer, nn.Linear(8, 1))
    optimizer = torch.optim.SGD(again.parameters(), lr=0.0)
    ampkit.initialize(again, optimizer, verbosity=0, **at(STORED_BF16 if after == "O2" else after))
    assert layer.weight.dtype is (torch.bfloat16 if after == "O2" else torch.float32)
    shrink_output(again, optimizer)
    assert torch.equal(again.state_dict()["0.weight"], values)
    ampkit.close()
    assert torch.equal(layer.weight, values)
