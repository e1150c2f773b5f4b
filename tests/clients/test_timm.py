"""timm's ApexScaler, in a training loop like the one of its train script; and its architectures, unmodified: at O1, O2 and O5
they train as close to float32 as under torch.autocast.
"""

import importlib
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from beside_float32 import assert_as_close_to_float32_as_autocast
from helpers import others_slow

timm = pytest.importorskip("timm")
pytest.importorskip("timm.optim")


@pytest.fixture
def cuda_utils(apex):
    """Import timm.utils.cuda, which looks for apex when it is imported."""
    import timm.utils.cuda as module

    importlib.reload(module)
    return module


@pytest.mark.parametrize("level, expected", [("O1", {torch.float16}), ("O2", {torch.float16}), ("O0", {torch.float32})])
def test_apex_scaler_trains_in_mixed_precision(cuda_utils, matmul_dtypes, level, expected):
    from apex import amp

    assert cuda_utils.has_apex and cuda_utils.amp is amp
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=4, img_size=32)
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    scaler = cuda_utils.ApexScaler()
    x, y = torch.randn(2, 3, 32, 32), torch.tensor([0, 1])
    losses = []
    for _ in range(4):
        with matmul_dtypes:
            loss = F.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters(), create_graph=False)
        losses.append(loss.item())
    assert matmul_dtypes.seen.keys() >= {"linear", "conv2d"}
    assert matmul_dtypes.dtypes == expected
    assert losses[-1] < losses[0]
    state = scaler.state_dict()
    assert set(state["loss_scaler0"]) == {"loss_scale", "unskipped"}
    scaler.load_state_dict({"loss_scaler0": {"loss_scale": 64.0, "unskipped": 1}})
    assert amp._amp_state.loss_scalers[0].loss_scale() == (64.0 if level != "O0" else 1.0)


PATCHES = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4)


class Architecture(NamedTuple):
    name: str
    settings: dict[str, Any]
    learning_rate: float = 1e-3


ARCHITECTURES = {
    "ResNet": Architecture("resnet18", dict(channels=(8, 8, 16, 16), output_stride=8)),
    "EfficientNet": Architecture("test_efficientnet", dict(output_stride=8)),
    "ConvNeXtV2": Architecture("convnextv2_atto", dict(depths=(1, 1, 2, 1), dims=(8, 16, 32, 64))),
    "ViT with relative positions": Architecture("vit_relpos_small_patch16_224", PATCHES),
    "DeiT3": Architecture("deit3_small_patch16_224", {**PATCHES, "init_values": 0.1}),
    "CaiT": Architecture("cait_xxs24_224", {**PATCHES, "init_values": 0.1}),
    "EVA02": Architecture("eva02_tiny_patch14_224", PATCHES),
    "BEiT": Architecture("beit_base_patch16_224", {**PATCHES, "init_values": 0.1}),
    "Swin": Architecture(
        "swin_tiny_patch4_window7_224",
        dict(img_size=32, window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4)),
    ),
    "XCiT": Architecture("xcit_nano_12_p16_224", dict(img_size=32, embed_dim=32, depth=2, num_heads=4)),
    "LeViT": Architecture(
        "levit_128s",
        dict(img_size=64, embed_dim=(32, 48, 64), key_dim=8, num_heads=(2, 3, 4), depth=(1, 1, 1)),
    ),
    "Sequencer": Architecture(
        "sequencer2d_s",
        dict(img_size=32, layers=(1, 1, 1, 1), embed_dims=(16, 32, 32, 32), hidden_sizes=(8, 16, 16, 16)),
    ),
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
