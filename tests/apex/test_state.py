"""Attributes and functions inside ``apex.amp`` that scripts read, write and call, and what it prints."""

import gc
import inspect
import types
import weakref

import pytest
import torch
from helpers import net_with_norm, saved_and_loaded
from loops import backward, iterate, scaler
from torch import nn

import ampkit
from ampkit.apex.amp import compat, rnn_compat, utils, wrap
from ampkit.apex.amp._initialize import applier, to_type
from ampkit.apex.amp.frontend import O1, Properties, opt_levels
from ampkit.apex.amp.scaler import LossScaler
from ampkit.optimizers import FusedSGD

HALF = torch.float16


def initialized_by(amp, level="O2", make=lambda p: torch.optim.Adam(p, lr=0.1), device="cpu", **settings):
    """Return a model and its optimizer, as Apex's ``amp.initialize`` returns them."""
    model = net_with_norm(4, 4, 2).to(device)
    return amp.initialize(model, make(model.parameters()), opt_level=level, **{"verbosity": 0, **settings})


def loss_of(model, factor=1.0, value=1.0):
    return model(torch.full((2, 4), value)).float().pow(2).mean() * factor


PARAMETERS = {
    "initialize": "models, optimizers=None, enabled=True, opt_level='O1', cast_model_type=None, patch_torch_functions=None, "
    "keep_batchnorm_fp32=None, master_weights=None, loss_scale=None, cast_model_outputs=None, num_losses=1, verbosity=1, "
    "min_loss_scale=None, max_loss_scale=16777216.0",
    "scale_loss": "loss, optimizers, loss_id=0, model=None, delay_unscale=False, delay_overflow_check=False",
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_functions_have_the_parameters_of_apex(amp, name):
    parameters = inspect.signature(getattr(amp, name)).parameters.values()
    positional = [p.replace(annotation=p.empty) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert ", ".join(map(str, positional)) == PARAMETERS[name]


def test_a_level_in_the_place_of_enabled_is_told(amp, caplog):
    """Apex's third parameter is ``enabled``: such a call has always got Apex's O1."""
    model = amp.initialize(net_with_norm(4, 4, 2), None, "O2", verbosity=0)
    assert model[0].weight.dtype is torch.float32 and amp._amp_state.opt_properties.opt_level == "O1"
    assert [one.levelname for one in caplog.records if "Write opt_level='O2'" in one.message] == ["WARNING"]


def test_everything_exists_before_initialize(amp):
    state = amp._amp_state
    assert (state.hard_override, state.allow_incoming_model_not_fp32, state.verbosity) == (False, False, 1)
    assert state.min_loss_scale is None and state.max_loss_scale == 2.0**24
    assert state.loss_scalers == [] and not state.opt_properties.enabled and not state.handle.is_active()
    state.handle._deactivate()
    state.handle._clear_cache()
    assert amp.state_dict() == {}
    with amp.disable_casts():
        pass
    with pytest.raises(RuntimeError, match="initialize"):
        backward(torch.ones(1), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


def test_return_forms_and_lists_are_the_callers(amp):
    def make():
        model = nn.Linear(2, 2)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    model, optimizer = make()
    assert amp.initialize(model, verbosity=0) is model
    models = [model]
    assert amp.initialize(models, verbosity=0) is models
    assert amp.initialize(model, optimizer, verbosity=0) == (model, optimizer)
    optimizers = [optimizer]
    returned = amp.initialize(models, optimizers, verbosity=0)
    assert returned[0] is models and returned[1] is optimizers
    assert amp.initialize(model, [], verbosity=0) == (model, [])
    assert amp.initialize(model, optimizer, False) == (model, optimizer)
    assert amp.initialize("anything", enabled=False) == "anything"


def test_disabled_does_nothing_and_says_so(amp, capsys):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, enabled=False, opt_level="O2")
    loss = model(torch.ones(1, 2)).sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
    assert amp.state_dict() == {} and amp._amp_state.loss_scalers[0].loss_scale() == 1.0
    assert not amp._amp_state.opt_properties.enabled and capsys.readouterr().out == ""


BANNER = """\
Selected optimization level O2: lower-precision model with float32 norms and master weights
Defaults for this optimization level are:
enabled                : True
opt_level              : O2
cast_model_type        : torch.float16
patch_torch_functions  : False
keep_batchnorm_fp32    : True
master_weights         : True
loss_scale             : dynamic
Processing user overrides (additional kwargs that are not None)...
After processing overrides, optimization options are:
enabled                : True
opt_level              : O2
cast_model_type        : torch.float16
patch_torch_functions  : False
keep_batchnorm_fp32    : False
master_weights         : True
loss_scale             : 128.0
"""


def test_the_banner(amp, capsys):
    initialized_by(amp, verbosity=1, keep_batchnorm_fp32="False", loss_scale="128.0")
    assert capsys.readouterr().out == BANNER
    initialized_by(amp, verbosity=0)
    assert capsys.readouterr().out == ""


def test_the_overflow_line_is_printed_at_the_step(amp, capsys):
    model, optimizer = initialized_by(amp, "O1", verbosity=1, num_losses=2)
    capsys.readouterr()
    backward(loss_of(model, float("inf")), optimizer, loss_id=1)
    assert capsys.readouterr().out == ""
    optimizer.step()
    line = "Gradient overflow.  Skipping step, loss scaler 1 reducing loss scale to 32768.0\n"
    assert capsys.readouterr().out == line
    amp._amp_state.verbosity = 0
    iterate(loss_of(model, float("inf")), optimizer, loss_id=1)
    assert capsys.readouterr().out == ""


def test_torchs_clipping_in_a_block_is_told_of_once_and_goes_on(amp, capsys):
    """Scripts of Apex's have it: reported, and never refused."""
    model, optimizer = initialized_by(amp, "O1", verbosity=1)
    capsys.readouterr()
    for _ in range(2):
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model), optimizer) as scaled:
            scaled.backward()
            nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
    out = capsys.readouterr()
    assert (out.out + out.err).count("inside the scale_loss block") == 1


@pytest.mark.parametrize(("level", "scale", "told"), [("O1", 128.0, 1), ("O2", 1.0, 0)])
@pytest.mark.parametrize("of", ["parameter", "input", "result"])
def test_a_gradient_without_an_optimizer_stays_scaled_and_is_told_of_once(amp, of, level, scale, told, caplog):
    """Apex left such a gradient alone, and scripts divide it by hand: by 1 there is nothing to tell."""
    model, x = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(1, 2)
    trained = model[1] if of == "parameter" else model
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=scale, verbosity=0)
    leaf = model[0].bias if of == "parameter" else x.requires_grad_()
    if of == "result":
        x = leaf = 1 * x
        x.retain_grad()
    for _ in range(3):
        with amp.scale_loss(model(x).sum(), optimizer) as scaled:
            scaled.backward(retain_graph=True)
    found = leaf.grad / scale / 3
    exact = torch.autograd.grad(model[1](model[0](x)).sum(), [leaf])[0]
    torch.testing.assert_close(found, exact, rtol=2e-2, atol=1e-3, check_dtype=False)
    name = "Parameter '0.weight'" if of == "parameter" else "A tensor of shape (1, 2)"
    assert caplog.text.count(f"{name} has a gradient, but no optimizer given to initialize() updates it") == told


def test_verbosity_2_prints_casts(amp, capsys):
    model, _ = initialized_by(amp, "O1", verbosity=2)
    capsys.readouterr()
    model(torch.ones(2, 4))
    assert "Float->Half (linear)" in capsys.readouterr().out.splitlines()


#: At O1, where no level is given.
IMPOSSIBLE = [
    *({"opt_level": "01"}, {"opt_level": None}, {"opt_level": "O2", "patch_torch_functions": True}),
    *({"master_weights": False}, {"keep_batchnorm_fp32": True}, {"cast_model_type": HALF}, {"loss_scale": "dynmic"}),
]


@pytest.mark.parametrize("settings", IMPOSSIBLE, ids=str)
def test_settings_that_cannot_be_are_errors(amp, settings):
    with pytest.raises((RuntimeError, ValueError)):
        amp.initialize(nn.Linear(2, 2), verbosity=0, **settings)


def test_hard_override_turns_errors_into_printed_warnings(amp, capsys):
    amp._amp_state.hard_override = True
    amp.initialize(nn.Linear(2, 2), opt_level="O1", master_weights=True, verbosity=0)
    amp.initialize(nn.Linear(2, 2).half(), opt_level="O2", verbosity=0)
    amp._amp_state.hard_override = False
    assert capsys.readouterr().out.startswith("Warning:  ")
    with pytest.raises(RuntimeError, match="float16"):
        amp.initialize(nn.Linear(2, 2).half(), opt_level="O2", verbosity=0)


REFUSED = {
    "no model": (TypeError, None, lambda: ["model"]),
    "no optimizer": (TypeError, None, lambda: [nn.Linear(2, 2), "optimizer"]),
    "a wrapped model": (RuntimeError, "wrap", lambda: [nn.DataParallel(nn.Linear(2, 2))]),
    "an FP16_Optimizer": (
        RuntimeError,
        "FP16_Optimizer",
        lambda: [model := nn.Linear(2, 2), type("FP16_Optimizer", (torch.optim.SGD,), {})(model.parameters(), lr=0.1)],
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_initialize_does_not_take_is_refused(amp, what):
    error, message, arguments = REFUSED[what]
    with pytest.raises(error, match=message):
        amp.initialize(*arguments(), verbosity=0)


def test_properties_are_a_checked_dict():
    properties = Properties()
    assert properties.options["enabled"] is False and properties.loss_scale == 1.0
    properties = opt_levels["O2"](properties)
    assert properties.cast_model_type is HALF and properties.options["master_weights"] is True
    properties.loss_scale = "64"
    assert properties.loss_scale == 64.0
    with pytest.raises(RuntimeError):
        O1()(Properties()).keep_batchnorm_fp32 = True
    with pytest.raises(ValueError, match="unexpected option"):
        properties._update_options_dict({"speed": 11})
    with pytest.raises(AttributeError):
        _ = properties.speed


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_loss_scale_set_by_hand_is_used_next(amp, level):
    model, optimizer = initialized_by(amp, level)
    scaler()._loss_scale = 2**10
    loss = model(torch.ones(2, 4)).float().mean()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert torch.equal(scaled, loss * 1024)
        scaled.backward()
    assert scaler().loss_scale() == scaler()._loss_scale == amp.state_dict()["loss_scaler0"]["loss_scale"] == 1024.0
    gradient = next(iter(amp.master_params(optimizer))).grad
    assert gradient.abs().max() < 10  # unscaled


def test_what_loggers_read(amp):
    model, optimizer = initialized_by(amp, "O1", min_loss_scale=4.0, max_loss_scale=2.0**15)
    state, first = amp._amp_state, scaler()
    assert first.loss_scale() == 2.0**15 and first.dynamic and not first._has_overflow
    assert (first._min_loss_scale, first._max_loss_scale, first._scale_seq_len) == (4.0, 2.0**15, 2000)
    assert (state.min_loss_scale, state.max_loss_scale) == (4.0, 2.0**15)
    iterate(loss_of(model), optimizer)
    assert first._unskipped == 1 and not first._has_overflow
    iterate(loss_of(model, float("nan")), optimizer)
    assert first._unskipped == 0 and first._has_overflow and first.loss_scale() == 2.0**14
    properties = state.opt_properties
    assert properties.enabled and properties.opt_level == "O1" and properties.patch_torch_functions
    assert properties.options["loss_scale"] == "dynamic" and state.handle.is_active() and state.handle._is_active


def test_the_bert_resume_idiom(amp):
    model, optimizer = initialized_by(amp)
    for _ in range(3):
        iterate(loss_of(model), optimizer)
    masters = list(amp.master_params(optimizer))
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "master params": masters}
    checkpoint = saved_and_loaded(saved)
    for _ in range(2):
        iterate(loss_of(model), optimizer)
    expected = [p.detach().clone() for p in amp.master_params(optimizer)]

    model = net_with_norm(4, 4, 2, seed=1)
    model.load_state_dict(checkpoint["model"], strict=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic", verbosity=0)
    scaler()._loss_scale = 2**16
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_stash.lazy_init_called = True
    optimizer.load_state_dict(checkpoint["optimizer"])
    for param, saved_param in zip(amp.master_params(optimizer), checkpoint["master params"]):
        param.data.copy_(saved_param.data)
    for _ in range(2):
        iterate(loss_of(model), optimizer)
    assert all(map(torch.equal, amp.master_params(optimizer), expected))


def test_masters_written_by_hand_are_copied_to_the_model_on_demand(amp):
    model, optimizer = initialized_by(amp)
    for master in amp.master_params(optimizer):
        master.data.fill_(0.5)
    optimizer._master_params_to_model_params()
    assert all(param.eq(0.5).all() for param in model.parameters())


def test_the_stash_with_masters(amp):
    model, optimizer = initialized_by(amp)
    optimizer._amp_lazy_init()
    stash, masters = optimizer._amp_stash, list(amp.master_params(optimizer))
    assert stash.lazy_init_called and not stash.already_patched and not stash.params_have_scaled_gradients
    assert [p.dtype for p in stash.all_fp16_params] == [HALF] * 4
    for param, master in zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True):
        assert master.dtype is torch.float32 and master.shape == param.shape
    assert [p is q for p, q in zip(stash.all_fp32_from_fp32_params, model[1].parameters())] == [True, True]
    assert len(stash.fp16_groups) == len(stash.fp32_from_fp16_groups) == len(stash.fp32_from_fp32_groups) == 1
    assert not hasattr(stash, "all_fp32_params")
    assert (stash.all_fp16_grad_stash, stash.all_fp32_from_fp32_grad_stash) == ([None] * 4, [None] * 2)
    assert stash.all_fp32_from_fp16_params[0] is masters[0] and stash.fp32_from_fp16_groups[0][0] is masters[0]
    assert stash.all_fp16_params[0] is optimizer.param_groups[0]["params"][0]
    backward(loss_of(model), optimizer, delay_unscale=True)
    assert stash.params_have_scaled_gradients


def test_the_stash_without_masters_and_its_end(amp):
    model, optimizer = initialized_by(amp, "O1")
    stash = optimizer._amp_stash
    assert all(a is b for a, b in zip(stash.all_fp32_params, model.parameters(), strict=True))
    assert stash.all_fp32_grad_stash == [None] * 6
    assert stash.all_fp16_params == stash.all_fp16_grad_stash == [] and not hasattr(stash, "fp16_groups")
    ampkit.close()
    assert not hasattr(optimizer, "_amp_stash") and not hasattr(optimizer, "_prepare_amp_backward")


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_scale_loss_written_out_by_the_script(amp, level, micro_batches):
    """Frameworks with a scale_loss of their own called these functions; the result is that of amp.scale_loss."""

    def gradients(by_hand):
        model, optimizer = initialized_by(amp, level, loss_scale="dynamic")
        for index in range(micro_batches):
            loss = loss_of(model, value=1.0 + index)
            if not by_hand:
                backward(loss, optimizer)
                continue
            optimizer._prepare_amp_backward()
            (loss * scaler().loss_scale()).backward()
            scaler().clear_overflow_state()
            optimizer._post_amp_backward(scaler())
            optimizer._amp_stash.params_have_scaled_gradients = False
            assert scaler().update_scale() is False
        assert scaler()._unskipped == micro_batches
        return [p.grad.clone() for p in amp.master_params(optimizer)]

    assert all(map(torch.equal, gradients(True), gradients(False)))


def state_of(*scales):
    """A state dict: of each scaler its scale, and how many iterations it has been clean."""
    return {f"loss_scaler{i}": dict(loss_scale=scale, unskipped=clean) for i, (scale, clean) in enumerate(scales)}


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_loss_scalers_are_one_list_that_every_initialize_starts_anew(amp, level):
    first = initialized_by(amp, level)
    for _ in range(3):
        iterate(loss_of(first[0]), first[1])
    assert amp.state_dict() == state_of((65536.0, 3))
    second = initialized_by(amp, level, num_losses=2)
    assert amp.state_dict() == state_of((65536.0, 0), (65536.0, 0))

    # Whoever steps, it is these that count, and that are saved and loaded.
    iterate(loss_of(first[0]), first[1], loss_id=1)
    iterate(loss_of(second[0]), second[1], loss_id=1)
    iterate(loss_of(first[0], float("inf")), first[1])
    assert amp.state_dict() == state_of((32768.0, 0), (65536.0, 2))
    assert [scaler(index).loss_scale() for index in range(2)] == [32768.0, 65536.0]
    amp.load_state_dict(state_of((2.0, 5), (65536.0, 2)))
    for model, optimizer in (first, second):
        with amp.scale_loss(loss_of(model), optimizer, delay_overflow_check=True) as scaled:
            assert scaled.item() == pytest.approx(2.0 * loss_of(model).item())
            scaled.backward()
    with pytest.raises(IndexError, match="2 loss scalers"):
        iterate(loss_of(first[0]), first[1], loss_id=2)


def test_loss_scalers_that_a_script_puts_into_the_list_are_used(amp):
    model, optimizer = initialized_by(amp)
    amp._amp_state.loss_scalers[0] = LossScaler(4.0)
    amp._amp_state.loss_scalers.append(LossScaler("dynamic", init_scale=16.0))
    loss = loss_of(model)
    for loss_id, scale in enumerate((4.0, 16.0)):
        with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled:
            assert torch.equal(scaled, scale * loss)
            scaled.backward(retain_graph=True)
    assert list(amp.state_dict()) == ["loss_scaler0", "loss_scaler1"]


class AsksOthers(LossScaler):
    """A loss scaler as scripts of several processes change it; here the other process has an overflow in the second iteration."""

    def unscale(self, *args, **kwargs):
        super().unscale(*args, **kwargs)
        assert kwargs["scale_override"] == 1.0  # the gradients are unscaled already
        self.calls = getattr(self, "calls", 0) + 1
        self._overflow_buf.fill_(max(self._overflow_buf.item(), self.calls == 2))
        self._has_overflow = self._overflow_buf.item()


def steps_taken(model, optimizer, factors):
    taken = []
    for factor in factors:
        before = model[0].weight.detach().clone()
        iterate(loss_of(model, factor), optimizer)
        taken.append(not torch.equal(before, model[0].weight))
    return taken


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("make", [torch.optim.SGD, FusedSGD])
def test_a_loss_scaler_that_unscales_in_its_own_way_judges_the_iteration(amp, make, level, capsys):
    model, optimizer = initialized_by(amp, level, lambda p: make(p, lr=0.5), verbosity=1)
    amp._amp_state.loss_scalers[0] = AsksOthers("dynamic", init_scale=64.0)
    assert steps_taken(model, optimizer, (1.0, 1.0, 1.0, float("inf"), 1.0)) == [True, False, True, False, True]
    assert amp.state_dict() == state_of((16.0, 1))
    assert capsys.readouterr().out.count("Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to") == 2


@pytest.mark.parametrize("make", [torch.optim.SGD, FusedSGD])
def test_an_update_scale_of_the_scripts_is_called_by_scale_loss(amp, make, monkeypatch):
    model, optimizer = initialized_by(amp, "O2", lambda p: make(p, lr=0.5))
    scaler()._loss_scale = 64.0
    other_overflows = iter([False, True, False])

    def update_scale(self):
        """Update as scripts of mixtures of experts do: an overflow on any process is one on all."""
        if not self._has_overflow:
            self._has_overflow = self._overflow_buf.item()
        skips = bool(self._has_overflow) or next(other_overflows)
        self._loss_scale = self._loss_scale / 4.0 if skips else self._loss_scale
        self._unskipped = 0 if skips else self._unskipped + 1
        return skips

    monkeypatch.setattr(LossScaler, "update_scale", update_scale)
    assert steps_taken(model, optimizer, (1.0, 1.0, float("inf"), 1.0)) == [True, False, False, True]
    assert amp.state_dict() == state_of((4.0, 1))


@pytest.mark.parametrize("with_buffer", [True, False])
@pytest.mark.parametrize("make", [torch.optim.SGD, FusedSGD])
def test_the_overflow_check_of_bert(amp, make, with_buffer, device):
    """NVIDIA's BERT delays the check, sums gradients itself, judges them by a buffer of its own, and steps or skips."""
    import amp_C
    import apex_C

    model, optimizer = initialized_by(amp, "O2", lambda p: make(p, lr=0.5), device)
    scaler()._loss_scale = 16.0
    overflow_buf = torch.zeros(1, dtype=torch.int32, device=device)
    judged, stepped = [], 0
    for overflows in (False, True, False, False):
        for micro_batch in range(2):
            loss = model(torch.full((2, 4), 1.0 + micro_batch, device=device)).float().pow(2).mean() / 2
            factor = float("inf") if overflows and micro_batch == 0 else 1.0
            backward(loss * factor, optimizer, delay_overflow_check=True)
        grads = [p.grad for p in amp.master_params(optimizer) if p.grad is not None]
        flat = torch.empty(sum(p.numel() for p in grads), device=device)
        views = apex_C.unflatten(flat, grads)
        overflow_buf.zero_()
        amp_C.multi_tensor_scale(65536, overflow_buf, [grads, views], scaler().loss_scale())
        overflow_buf.zero_()
        amp_C.multi_tensor_scale(65536, overflow_buf, [views, grads], 1.0 / scaler().loss_scale())
        if with_buffer:
            assert scaler()._overflow_buf.item() == overflows
            scaler()._overflow_buf = overflow_buf
        judged.append(scaler().update_scale())
        assert not with_buffer or scaler()._overflow_buf is overflow_buf
        if judged[-1]:
            for param in optimizer._amp_stash.all_fp32_from_fp16_params:
                param.grad = None
        else:
            expected = [p.detach() - 0.5 * p.grad for p in amp.master_params(optimizer)]
            optimizer.step()
            stepped += 1
            assert all(map(torch.allclose, amp.master_params(optimizer), expected))
        for param in model.parameters():
            param.grad = None
    assert judged == [False, True, False, False] and stepped == 3
    assert amp.state_dict() == state_of((8.0, 2))


@pytest.mark.parametrize("make", [torch.optim.SGD, FusedSGD])
def test_a_verdict_in_a_buffer_that_stays_the_scripts_is_not_written_over(amp, make):
    """Copies of NVIDIA's BERT misspell the line that restores the old buffer: from then on ``_overflow_buf`` is their own."""
    model, optimizer = initialized_by(amp, "O2", lambda p: make(p, lr=0.5))
    script_buffer, judged = torch.zeros(1, dtype=torch.int32), []
    scaler()._loss_scale = 16.0
    for by_block, by_script in ((0, 1), (0, 1), (0, 0), (1, 1), (1, 0), (0, 0)):
        backward(loss_of(model, float("inf") if by_block else 1.0), optimizer, delay_overflow_check=True)
        script_buffer.fill_(by_script)
        old = scaler()._overflow_buf
        scaler()._overflow_buf = script_buffer
        judged.append(scaler().update_scale())
        scaler()._overfloat_buf = old
        optimizer.zero_grad()
    assert judged == [True, True, False, True, False, False]
    assert amp.state_dict() == state_of((2.0, 2))


def test_the_overflow_buffer_holds_what_was_found(amp):
    model, optimizer = initialized_by(amp)
    first = scaler()
    assert first._overflow_buf.tolist() == [0]
    iterate(loss_of(model, float("inf")), optimizer)
    assert first._overflow_buf.tolist() == [1] and first._has_overflow
    iterate(loss_of(model), optimizer)
    assert first._overflow_buf.tolist() == [0] and not first._has_overflow
    first.clear_overflow_state()
    first.unscale([torch.full((2,), float("nan"))], [torch.zeros(2)])
    assert first._overflow_buf.tolist() == [1] and first._overflow_buf.dtype is torch.int32
    # The buffer of a script's own is written and cleared like the one that it replaces.
    first._overflow_buf = script_buffer = torch.zeros(1, dtype=torch.int32)
    assert first.update_scale() is False and first._overflow_buf is script_buffer
    script_buffer.fill_(1)
    assert first.update_scale() is True and first._overflow_buf is script_buffer
    for factor, found in ((1.0, 0), (float("inf"), 1)):
        iterate(loss_of(model, factor), optimizer)
        assert script_buffer.tolist() == [found]


def test_options_that_a_script_puts_in_place_of_initialize_switch_amp_off(amp):
    """Ports to other devices replace initialize, and leave scale_loss with disabled options."""
    model = nn.Linear(4, 1)
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.5), loss_of(model)
    with pytest.raises(RuntimeError, match="initialize"):
        backward(loss, optimizer)
    amp._amp_state.opt_properties = Properties()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss


def test_a_model_is_initialized_with_no_losses_and_its_optimizer_by_another_call(amp):
    model = amp.initialize(net_with_norm(4, 4, 2), opt_level="O1", num_losses=0, verbosity=0)
    assert amp._amp_state.loss_scalers == [] and amp.state_dict() == {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    _, optimizer = amp.initialize(nn.Identity(), optimizer, opt_level="O1", verbosity=0)
    assert steps_taken(model, optimizer, (1.0, float("inf"), 1.0)) == [True, False, True]
    assert amp.state_dict() == state_of((32768.0, 1))


def test_every_attribute_of_a_loss_scaler_can_be_set(amp):
    model, optimizer = initialized_by(amp)
    first = scaler()
    limits = dict(_max_loss_scale=128.0, _min_loss_scale=32.0, _scale_seq_len=2)
    values = dict(_loss_scale=64.0, _unskipped=1, _has_overflow=False, **limits)
    for dynamic in (True, False, True):
        first.dynamic = dynamic
        for name, value in values.items():
            setattr(first, name, value)
        assert first.dynamic is dynamic and {name: getattr(first, name) for name in values} == values
    iterate(loss_of(model), optimizer)
    assert first.loss_scale() == 128.0  # the second clean iteration in a row
    for expected in (64.0, 32.0, 32.0):
        iterate(loss_of(model, float("inf")), optimizer)
        assert first.loss_scale() == expected
    first.dynamic = False
    iterate(loss_of(model, float("inf")), optimizer)
    assert first.loss_scale() == 32.0 and first._has_overflow
    first.dynamic = True
    assert {name: getattr(first, name) for name in limits} == limits


def test_a_loss_scaler_of_ones_own():
    new = LossScaler("dynamic", init_scale=8.0, scale_window=2, min_loss_scale=2.0, max_loss_scale=16.0)
    grads, out = [torch.tensor([8.0, 16.0]).half()], [torch.zeros(2)]

    def judged(value=1.0):
        new.clear_overflow_state()
        new.unscale([grads[0] * value], out, new.loss_scale())
        return new.update_scale()

    assert not judged() and torch.equal(out[0], torch.tensor([1.0, 2.0])) and new._unskipped == 1
    assert not judged() and new.loss_scale() == 16.0
    assert [judged(float("inf")) for _ in range(5)] == [True] * 5 and new.loss_scale() == 2.0
    stashed = [torch.ones(2)]
    new.unscale_with_stashed(grads, stashed, stashed)
    assert torch.equal(stashed[0], torch.tensor([5.0, 9.0]))
    assert LossScaler(128.0).loss_scale() == 128.0 and not LossScaler("64").dynamic
    again = saved_and_loaded(new, weights_only=False)
    assert again.loss_scale() == 2.0 and again._scale_seq_len == 2


def test_state_dicts_have_the_format_of_apex(amp):
    initialized_by(amp, "O1", num_losses=2)
    one = {"loss_scale": 65536.0, "unskipped": 0}
    assert amp.state_dict() == {"loss_scaler0": one, "loss_scaler1": one}
    outer = {"epoch": 3}
    assert amp.state_dict(outer) is outer and list(outer) == ["epoch", "loss_scaler0", "loss_scaler1"]
    amp.load_state_dict(state_of((8.0, 7), (2.0, 0)))
    assert amp.state_dict() == state_of((8.0, 7), (2.0, 0)) and scaler()._unskipped == 7
    with pytest.raises(RuntimeError, match="Unexpected key"):
        amp.load_state_dict({**state_of((4.0, 0)), "epoch": 3})


def test_another_number_of_scalers_is_a_printed_warning(amp, capsys):
    initialized_by(amp, "O1", num_losses=2, verbosity=1)
    capsys.readouterr()
    amp.load_state_dict(state_of((8.0, 7)))
    assert "num_losses" in capsys.readouterr().out and scaler().loss_scale() == 8.0


def test_levels_and_names_of_rocm(amp):
    assert callable(amp.bfloat16_function) and callable(amp.register_bfloat16_function)
    for settings in (dict(level="O4"), dict(level="O1", patch_torch_functions_type=torch.bfloat16)):
        assert initialized_by(amp, **settings)[0](torch.ones(1, 4)).dtype is torch.bfloat16
    model, _optimizer = initialized_by(amp, "O5")
    assert model[0].weight.dtype is torch.bfloat16 and scaler().loss_scale() == 1.0


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_nothing_is_left_alive(amp, level):
    model, optimizer = initialized_by(amp, level)
    iterate(loss_of(model), optimizer)
    gone = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert list(amp.state_dict()) == ["loss_scaler0"]  # until the next initialize


def test_helpers_under_their_old_names(amp):
    half, handle = torch.ones(1).half(), amp.init()
    assert utils.maybe_float(half).dtype is torch.float32 and utils.maybe_half([half.float()])[0].dtype is HALF
    assert utils.type_string(half) == "HalfTensor" and utils.is_fp_tensor([half]) and not utils.is_fp_tensor([1])
    assert to_type(HALF, torch.ones(1)).dtype is applier({"a": torch.ones(1)}, lambda x: x.half())["a"].dtype is HALF
    assert compat.is_tensor_like(half) and "lstm" in rnn_compat.RNN_NAMES
    namespace = types.SimpleNamespace(same=lambda x: x)
    wrap.cached_cast(namespace, "same", utils.maybe_half, handle)
    assert namespace.same(torch.ones(1)).dtype is HALF
    handle._deactivate()
    assert namespace.same(torch.ones(1)).dtype is torch.float32
