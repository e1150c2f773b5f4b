"""timm's ApexScaler, in a training loop like the one of its train script."""

import importlib

import pytest
import torch
import torch.nn.functional as F

timm = pytest.importorskip("timm")
pytest.importorskip("timm.optim")


@pytest.fixture
def cuda_utils(apex):
    """timm.utils.cuda looks for apex when it is imported."""
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
