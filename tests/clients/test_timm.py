"""timm, unmodified: its train script's loop with ApexScaler and with our `NativeScaler`, its architectures and its optimizers.

The judges are a loop with `scale_loss`, timm's own clipping in float32, and float32 beside torch.autocast.
"""

import importlib
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from beside_float32 import assert_as_close_to_float32_as_autocast
from by_hand import (
    OPTIMIZERS,
    STEPS,
    assert_equal,
    assert_same_steps,
    loss_of,
    settings_of,
    spoiled_at,
    trained_by_hand,
    values,
)
from helpers import (
    STORED_BF16,
    assert_steps_as_over_float32,
    initialize_quietly,
    net_with_norm,
    others_slow,
    saved_and_loaded,
)
from torch import nn

import ampkit.apex
from ampkit.integrations.timm import NativeScaler

timm = pytest.importorskip("timm", reason="`make clients` installs timm")
optim, utils = pytest.importorskip("timm.optim"), pytest.importorskip("timm.utils")


@pytest.fixture
def cuda_utils():
    """Import timm.utils.cuda, which looks for apex when it is imported."""
    ampkit.apex.install()
    yield importlib.reload(importlib.import_module("timm.utils.cuda"))
    ampkit.close()
    ampkit.apex.uninstall()


@pytest.mark.parametrize("level, expected", [("O1", torch.float16), ("O2", torch.float16), ("O0", torch.float32)])
def test_apex_scaler_trains_in_mixed_precision(cuda_utils, level, expected):
    amp, seen = ampkit.apex.amp, set()
    assert cuda_utils.has_apex and cuda_utils.amp is amp
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=4, img_size=32)
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for layer in model.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            layer.register_forward_hook(lambda module, args, out: seen.add(out.dtype))
    scaler = cuda_utils.ApexScaler()
    x, y = torch.randn(2, 3, 32, 32), torch.tensor([0, 1])
    losses = []
    for _ in range(4):
        loss = F.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters(), create_graph=False)
        losses.append(loss.item())
    assert seen == {expected}
    assert losses[-1] < losses[0]
    state = scaler.state_dict()
    assert set(state["loss_scaler0"]) == {"loss_scale", "unskipped"}
    scaler.load_state_dict({"loss_scaler0": {"loss_scale": 64.0, "unskipped": 1}})
    assert amp._amp_state.loss_scalers[0].loss_scale() == (64.0 if level != "O0" else 1.0)


PATCHES = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4)
SWIN = dict(img_size=32, window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4))
LEVIT = dict(img_size=64, embed_dim=(32, 48, 64), key_dim=8, num_heads=(2, 3, 4), depth=(1, 1, 1))
SEQUENCER = dict(img_size=32, layers=(1, 1, 1, 1), embed_dims=(16, 32, 32, 32), hidden_sizes=(8, 16, 16, 16))


class Architecture(NamedTuple):
    name: str
    settings: dict[str, Any]
    learning_rate: float = 1e-3


ARCHITECTURES = {
    "ResNet": Architecture("resnet18", dict(channels=(8, 8, 16, 16), output_stride=8)),
    "EfficientNet": Architecture("test_efficientnet", dict(output_stride=8)),
    "ConvNeXtV2": Architecture("convnextv2_atto", dict(depths=(1, 1, 2, 1), dims=(8, 16, 32, 64))),
    "ViT with relative positions": Architecture("vit_relpos_small_patch16_224", PATCHES),
    "BEiT": Architecture("beit_base_patch16_224", {**PATCHES, "init_values": 0.1}),
    "Swin": Architecture("swin_tiny_patch4_window7_224", SWIN),
    "LeViT": Architecture("levit_128s", LEVIT),
    "Sequencer": Architecture("sequencer2d_s", SEQUENCER),
}


@pytest.mark.parametrize("architecture", others_slow("BEiT", "LeViT", of=ARCHITECTURES))
def test_trains_as_close_to_float32_as_under_autocast(architecture):
    """Four classes, each a picture under some noise; the loss is computed outside of the model."""
    row = ARCHITECTURES[architecture]
    size = row.settings.get("img_size", 32)
    pictures = torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(5))

    def images(generator):
        labels = torch.randint(0, 4, (8,), generator=generator)
        return dict(x=pictures[labels] + 0.5 * torch.randn(8, 3, size, size, generator=generator), labels=labels)

    assert_as_close_to_float32_as_autocast(
        lambda: timm.create_model(row.name, num_classes=4, **row.settings),
        lambda model, batch: F.cross_entropy(model(batch["x"]), batch["labels"]),
        images,
        row.learning_rate,
    )


# NativeScaler


def prepared(level, make_optimizer=OPTIMIZERS["AdamW"], **model):
    settings = settings_of(level)
    return initialize_quietly(net_with_norm(**model), make_optimizer, settings.pop("opt_level"), **settings)


def timms_step(scaler, model, optimizer, step, spoiled=None, **settings):
    optimizer.zero_grad()
    scaler(loss_of(model, step, spoiled), optimizer, parameters=model.parameters(), **settings)


@pytest.mark.parametrize("level", ("O1", "O2", "O5"))
def test_a_call_is_backward_clipping_and_step(level):
    spoiled, results = spoiled_at(level, 2), []
    expected = trained_by_hand(level, spoiled=spoiled, clip=0.1)
    (model, optimizer), scaler = prepared(level), NativeScaler()
    for step in range(STEPS):
        timms_step(scaler, model, optimizer, step, spoiled, clip_grad=0.1)
        results.append((values(model), ampkit.step_was_skipped(optimizer), ampkit.state_dict()))
    assert_same_steps(results, expected)
    assert [skipped for _, skipped, _ in results] == [step == spoiled for step in range(STEPS)]
    if spoiled is not None:  # half of it once, and growth after three clean ones
        assert [state["loss_scaler0"]["loss_scale"] for *_, state in results] == [256, 256, 128, 128, 128, 256]


def test_micro_batches_add_up_in_float32():
    model, optimizer = prepared("O2")
    twin, scaler = net_with_norm(), NativeScaler()
    before = values(model)
    for step in range(3):
        loss_of(twin, step).backward()
        scaler(loss_of(model, step), optimizer, need_update=step == 2)
        if step < 2:
            assert_equal(values(model), before)
    for master, param in zip(ampkit.master_params(optimizer), twin.parameters(), strict=True):
        assert (master.grad - param.grad).abs().max() <= 0.01


@pytest.mark.parametrize("mode", ("norm", "value", "agc"))
@pytest.mark.parametrize("level", ("O0", "O1", "O2"))
def test_what_is_clipped_is_what_timm_clips_in_float32(level, mode):
    """Clip all parameters but the last layer's, as timm's ``exclude_head`` chooses; a step of SGD at lr 1 is the gradient."""
    twin = net_with_norm()
    loss_of(twin, 0).backward()
    unclipped = [param.grad.clone() for param in twin.parameters()]
    utils.dispatch_clip_grad(list(twin.parameters())[:-2], 0.01, mode=mode)
    model, optimizer = prepared(level, lambda params: torch.optim.SGD(params, lr=1.0))
    chosen = list(model.parameters())[:-2]
    NativeScaler()(loss_of(model, 0), optimizer, clip_grad=0.01, clip_mode=mode, parameters=chosen)
    after = ampkit.master_params(optimizer)
    for master, before, param, plain in zip(after, net_with_norm().parameters(), twin.parameters(), unclipped):
        # Where elements are clamped, all others are as inexact as before.
        largest = (param.grad if mode == "norm" else plain).abs().max()
        assert (before - master - param.grad).abs().max() <= (1e-6 if level == "O0" else 0.02 * largest)


@pytest.mark.parametrize("level", ("O1", "O2", "O5"))
def test_a_resumed_run_goes_on_bit_for_bit(level):
    model, optimizer = prepared(level)
    scaler, spoiled = NativeScaler(), spoiled_at(level, 1)
    for step in range(4):
        timms_step(scaler, model, optimizer, step, spoiled)
    saved = saved_and_loaded([model.state_dict(), optimizer.state_dict(), {scaler.state_dict_key: scaler.state_dict()}])
    again, optimizer_again = prepared(level, seed=9)
    again.load_state_dict(saved[0])
    optimizer_again.load_state_dict(saved[1])
    scaler.load_state_dict(saved[2]["amp_scaler"])
    assert set(saved[2]["amp_scaler"]) == set(torch.amp.GradScaler("cpu").state_dict())
    timms_step(scaler, again, optimizer_again, 4, spoiled)
    resumed = values(again), scaler.state_dict()
    model, optimizer = prepared(level)
    for step in range(5):
        timms_step(scaler, model, optimizer, step, spoiled)
    assert_equal(resumed[0], values(model))
    assert resumed[1] == scaler.state_dict()


# Optimizers: the steps at O2 are those over float32 parameters with the same gradients.

OF_TIMM = {
    "Lion": lambda p: optim.Lion(p, lr=1e-2, weight_decay=0.1),
    "Adafactor": lambda p: optim.Adafactor(p, lr=1e-2, betas=(0.9, 0.999)),
    "AdamP": lambda p: optim.AdamP(p, lr=1e-2, weight_decay=0.1),
    "MADGRAD": lambda p: optim.MADGRAD(p, lr=1e-2),
    "Muon": lambda p: optim.Muon(p, lr=1e-2),
    "Lookahead": lambda p: optim.Lookahead(optim.NAdamW(p, lr=1e-2), k=2),
}


@pytest.mark.parametrize("level", ["O2", STORED_BF16])
@pytest.mark.parametrize("name", OF_TIMM)
def test_steps_are_those_over_float32_parameters(name, level):
    assert_steps_as_over_float32(net_with_norm(20, 24, 18), OF_TIMM[name], level, tolerance=2e-6)
