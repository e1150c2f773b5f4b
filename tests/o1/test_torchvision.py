"""torchvision's operators and detection models, at every level: boxes are compared and moved in float32."""

import itertools
import sys

import pytest
import torch
from helpers import backward, initialize_quietly, o1, others_slow, sgd
from torch import nn
from torch._ops import OpOverloadPacket

import ampkit

torchvision = pytest.importorskip("torchvision")
detection = torchvision.models.detection
faster_rcnn = detection.faster_rcnn

LOW = torch.bfloat16
VISION = torch.ops.torchvision


def boxes():
    corners = torch.rand(10, 2, generator=torch.Generator().manual_seed(0)) * 8
    return torch.cat([corners, corners + 4], 1).bfloat16()


def numbers(*shape, seed=1):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


SCORES, IMAGE = numbers(10).bfloat16(), numbers(1, 4, 16, 16).bfloat16() - 0.5
ROIS = torch.cat([torch.zeros(10, 1), boxes().float()], 1)


def session(level):
    """A session of a model that uses no operator; `LOW` is the lower precision of each level."""
    return ampkit.session(nn.Linear(2, 2), opt_level=level, verbosity=0)


def deformed(x):
    weight = torch.linspace(-1, 1, 72).reshape(2, 4, 3, 3)
    offsets = torch.linspace(-1, 1, 18 * 14 * 14).reshape(1, 18, 14, 14)
    return torchvision.ops.deform_conv2d(x, offsets, weight)


# Of a layer's output and a float32 tensor of the script, and of the output of a layer alone.
OPERATORS = {
    "nms": (lambda s: torchvision.ops.nms(boxes().to(torch.float32), s, 0.3), SCORES),
    "batched_nms": (lambda b: torchvision.ops.batched_nms(b, SCORES.float(), torch.arange(10) % 2, 0.3), boxes()),
    "roi_align": (lambda x: torchvision.ops.roi_align(x, ROIS, 3, sampling_ratio=2), IMAGE),
    "roi_pool": (lambda x: torchvision.ops.roi_pool(x, ROIS, 3), IMAGE),
    "ps_roi_align": (lambda x: torchvision.ops.ps_roi_align(x, ROIS, 2, sampling_ratio=2), IMAGE),
    "ps_roi_pool": (lambda x: torchvision.ops.ps_roi_pool(x, ROIS, 2), IMAGE),
    "deform_conv2d": (deformed, IMAGE),
}


def with_gradient(call, x):
    leaf = x.detach().requires_grad_()
    result = call(leaf)
    if result.is_floating_point():
        result.sum().backward()
    return result.detach(), leaf.grad


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_operator_computes_in_float32(name, lower, in_python):
    call, x = OPERATORS[name]
    x = x.to(lower)
    expected, gradient = with_gradient(call, x.float())
    with o1(lower, in_python=in_python):
        found, its_gradient = with_gradient(call, x)
    assert found.dtype is expected.dtype and torch.equal(found, expected)
    if gradient is not None:
        torch.testing.assert_close(its_gradient.float(), gradient, rtol=2**-8, atol=1e-6)  # rounded once
    assert isinstance(VISION.nms, OpOverloadPacket)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
@pytest.mark.parametrize("name", OPERATORS)
def test_operator_takes_lower_precision_beside_cast_weights(name, level):
    call, x = OPERATORS[name]
    expected = call(x.float())
    with session(level):
        assert torch.equal(call(x.float()), expected)  # float32 stays float32
        result = call(x)
    assert result.dtype is expected.dtype and torch.equal(result, expected)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_batched_nms_tells_boxes_of_far_classes_apart(level):
    # Two boxes 8 apart do not overlap; class 90 moves them by 90 * 105, where bfloat16 counts in steps of 64.
    apart = torch.tensor([[80.0, 80, 86, 86], [88, 80, 94, 86], [98, 98, 104, 104]], dtype=LOW)
    classes, order = torch.tensor([90, 90, 0]), torch.tensor([0.5, 0.25, 0.75], dtype=LOW)
    held = torchvision.ops.batched_nms
    with session(level):
        for function in (torchvision.ops.batched_nms, *([held] if level == "O2" else [])):
            assert function(apart, order, classes, 0.5).tolist() == [2, 0, 1]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_torchvision_may_be_imported_after_initialize(level, monkeypatch):
    expected = torchvision.ops.ps_roi_align(IMAGE.float(), ROIS, 2, sampling_ratio=2)
    monkeypatch.delitem(sys.modules, "torchvision")  # it looks as if not yet imported
    with session(level) as model:
        assert isinstance(VISION.ps_roi_align, OpOverloadPacket)
        monkeypatch.setitem(sys.modules, "torchvision", torchvision)
        model(torch.ones(1, 2))
        result = torchvision.ops.ps_roi_align(IMAGE, ROIS, 2, sampling_ratio=2)
    assert isinstance(VISION.ps_roi_align, OpOverloadPacket)
    assert torch.equal(result, expected.to(result.dtype))


def suppress(b, s, classes):
    return torchvision.ops.batched_nms(b, s, classes, 0.3)


def test_scripts_and_traces_find_the_operators():
    inputs = boxes(), SCORES, torch.arange(10) % 2
    in_float32 = inputs[0].float(), inputs[1].float(), inputs[2]
    expected = suppress(*in_float32)
    with session("O1"):
        assert VISION.nms.overloads() == ["default"] and VISION.nms.default.name() == "torchvision::nms"
        # torch 2.15 asks every operator of the process for them when the first model is compiled.
        assert VISION.nms.op_overloads() == [VISION.nms.default]
        assert torch.equal(torch.jit.trace(suppress, inputs)(*inputs), expected)
        scripted = torch.jit.script(torchvision.ops.nms)
    assert torch.equal(scripted(*in_float32[:2], 0.3), torchvision.ops.nms(*in_float32[:2], 0.3))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_compiled_code_has_the_casts(level):
    expected = torchvision.ops.nms(boxes().float(), SCORES.float(), 0.3)
    with session(level):
        compiled = torch.compile(lambda b, s: torchvision.ops.nms(b, s, 0.3), backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(boxes(), SCORES), expected)


# Detection models: random weights, a step of training, and boxes.


def detector(cls):
    torch.manual_seed(0)
    backbone = detection.backbone_utils.mobilenet_backbone(
        backbone_name="mobilenet_v3_small", weights=None, fpn=True, trainable_layers=6
    )
    ratios = (0.5, 1.0, 2.0) if cls in (detection.FasterRCNN, detection.MaskRCNN) else (1.0,)
    anchors = detection.anchor_utils.AnchorGenerator(((16,), (32,), (64,)), (ratios,) * 3)
    sizes = {"num_classes": 4, "min_size": 64, "max_size": 64}
    if cls not in (detection.FasterRCNN, detection.MaskRCNN):
        return cls(backbone, anchor_generator=anchors, score_thresh=0.0, detections_per_img=5, **sizes)
    few = {f"rpn_{when}_nms_top_n_{mode}": 20 for when in ("pre", "post") for mode in ("train", "test")}
    sizes["num_classes"] = None  # the heads say it, which are a hundredth of torchvision's
    few |= {"box_head": faster_rcnn.TwoMLPHead(256 * 49, 32), "box_predictor": faster_rcnn.FastRCNNPredictor(32, 4)}
    if cls is detection.MaskRCNN:
        few["mask_head"] = detection.mask_rcnn.MaskRCNNHeads(256, (16,), 1)
        few["mask_predictor"] = detection.mask_rcnn.MaskRCNNPredictor(16, 16, 4)
    return cls(backbone, rpn_anchor_generator=anchors, box_detections_per_img=5, box_score_thresh=0.0, **few, **sizes)


class Wrapped(nn.Module):
    """A detector inside another model: its targets arrive in lower precision where the outer model's inputs are cast."""

    def __init__(self, detector):
        super().__init__()
        self.detector = detector

    def forward(self, images, targets=None):
        return self.detector(images, targets)


def losses_of(model):
    torch.manual_seed(5)  # anchors and proposals are drawn
    masks = torch.zeros(2, 64, 64, dtype=torch.uint8)
    masks[0, 8:40, 8:40] = masks[1, 20:60, 30:60] = 1
    corners = torch.tensor([[8.0, 8, 40, 40], [30, 20, 60, 60]])
    targets = [{"boxes": corners, "labels": torch.tensor([1, 2]), "masks": masks} for _ in range(2)]
    return model.train()(list(numbers(2, 3, 64, 64)), targets)


TWO_STAGE = itertools.product([detection.FasterRCNN, detection.MaskRCNN], ["O1", "O2", "O4", "O5"], [False])
ONE_STAGE = itertools.product([detection.RetinaNet, detection.FCOS], ["O1", "O2"], [False])
INSIDE = itertools.product([detection.FasterRCNN], ["O2", "O5"], [True])
FAST = [
    *[(detection.MaskRCNN, "O1", False), (detection.FasterRCNN, "O2", False), (detection.RetinaNet, "O2", False)],
    *[(detection.FCOS, "O1", False), (detection.FasterRCNN, "O2", True)],
]


@pytest.mark.parametrize("cls, level, inside", others_slow(*FAST, of=[*TWO_STAGE, *ONE_STAGE, *INSIDE]))
def test_detector_trains_and_evaluates(cls, level, inside):
    """Also ``inside`` of another model."""
    model = Wrapped(detector(cls)) if inside else detector(cls)
    expected = losses_of(model)
    model.zero_grad()
    _, optimizer = initialize_quietly(model, lambda params: sgd(params, 0.01), level)
    losses = losses_of(model)
    backward(sum(losses.values()), optimizer)
    optimizer.step()
    for name, loss in expected.items():
        assert losses[name].dtype is torch.float32
        assert losses[name].item() == pytest.approx(loss.item(), rel=0.03, abs=1e-3), name
    gradients = [param.grad for param in model.parameters() if param.grad is not None]
    assert len(gradients) > 50 and all(gradient.isfinite().all() for gradient in gradients)
    with torch.no_grad():
        found = model.eval()(list(numbers(2, 3, 64, 64)))
    assert all(one["boxes"].isfinite().all() and one["boxes"].shape[1] == 4 for one in found)
    assert sum(len(one["boxes"]) for one in found) > 0
    ampkit.close()
    assert not inside or not model.detector.roi_heads._forward_pre_hooks
