"""torchvision's operators and detection models, at every level: boxes are compared and moved in float32."""

import itertools
import sys

import pytest
import torch
from helpers import backward, o1, others_slow
from torch import nn
from torch._ops import OpOverloadPacket

import ampkit
from ampkit.patching import PatchSet

torchvision = pytest.importorskip("torchvision")
detection = torchvision.models.detection
faster_rcnn = detection.faster_rcnn

LOW = torch.bfloat16
VISION = torch.ops.torchvision


def boxes():
    corners = torch.rand(10, 2, generator=torch.Generator().manual_seed(0)) * 8
    return torch.cat([corners, corners + 4], 1).bfloat16()


def scores():
    return torch.rand(10, generator=torch.Generator().manual_seed(1)).bfloat16()


def image():
    return torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(2)).bfloat16()


def rois():
    return torch.cat([torch.zeros(10, 1), boxes().float()], 1)


def deformed(x):
    weight = torch.linspace(-1, 1, 72).reshape(2, 4, 3, 3)
    offsets = torch.linspace(-1, 1, 18 * 14 * 14).reshape(1, 18, 14, 14)
    return torchvision.ops.deform_conv2d(x, offsets, weight)


# Of a layer's output and a float32 tensor of the script, and of the output of a layer alone.
OPERATORS = {
    "nms": (lambda s: torchvision.ops.nms(boxes().to(torch.float32), s, 0.3), scores),
    "batched_nms": (lambda b: torchvision.ops.batched_nms(b, scores().float(), torch.arange(10) % 2, 0.3), boxes),
    "roi_align": (lambda x: torchvision.ops.roi_align(x, rois(), 3, sampling_ratio=2), image),
    "roi_pool": (lambda x: torchvision.ops.roi_pool(x, rois(), 3), image),
    "ps_roi_align": (lambda x: torchvision.ops.ps_roi_align(x, rois(), 2, sampling_ratio=2), image),
    "ps_roi_pool": (lambda x: torchvision.ops.ps_roi_pool(x, rois(), 2), image),
    "deform_conv2d": (deformed, image),
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
    call, given = OPERATORS[name]
    x = given().to(lower)
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
    call, make_input = OPERATORS[name]
    expected = call(make_input().float())
    settings = {} if level == "O5" else {"cast_model_type": LOW}
    session_model = ampkit.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0, **settings)
    assert torch.equal(call(make_input().float()), expected)  # float32 stays float32
    result = call(make_input())
    ampkit.close()
    del session_model
    assert result.dtype is expected.dtype and torch.equal(result, expected)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_batched_nms_tells_boxes_of_far_classes_apart(level):
    # Two boxes 8 apart do not overlap; class 90 moves them by 90 * 105, where bfloat16 counts in steps of 64.
    apart = torch.tensor([[80.0, 80, 86, 86], [88, 80, 94, 86], [98, 98, 104, 104]], dtype=LOW)
    classes, order = torch.tensor([90, 90, 0]), torch.tensor([0.5, 0.25, 0.75], dtype=LOW)
    held = torchvision.ops.batched_nms
    ampkit.initialize(model := nn.Linear(2, 2), opt_level=level, verbosity=0, **lower_precision_of(level))
    assert torchvision.ops.batched_nms(apart, order, classes, 0.5).tolist() == [2, 0, 1]
    if level == "O2":
        assert held(apart, order, classes, 0.5).tolist() == [2, 0, 1]
    ampkit.close()
    del model


def lower_precision_of(level):
    return {"patch_torch_functions_type": LOW} if level == "O1" else {"cast_model_type": LOW}


@pytest.fixture
def unloaded(monkeypatch):
    """Make torchvision look not yet imported; calling the fixture makes it look imported since."""
    monkeypatch.delitem(sys.modules, "torchvision")
    return lambda: monkeypatch.setitem(sys.modules, "torchvision", torchvision)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_torchvision_may_be_imported_after_initialize(level, unloaded):
    model = ampkit.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0, **lower_precision_of(level))
    assert isinstance(VISION.ps_roi_align, OpOverloadPacket)
    unloaded()
    model(torch.ones(1, 2))
    result = torchvision.ops.ps_roi_align(image(), rois(), 2, sampling_ratio=2)
    ampkit.close()
    assert isinstance(VISION.ps_roi_align, OpOverloadPacket)
    expected = torchvision.ops.ps_roi_align(image().float(), rois(), 2, sampling_ratio=2)
    assert torch.equal(result, expected.to(result.dtype))


@pytest.mark.parametrize("first_to_close", ["O1", "O2"])
@pytest.mark.parametrize("first", ["O1", "O2"])
def test_operators_are_given_back_in_any_order(first, first_to_close):
    before = VISION.nms, torchvision.ops.boxes.batched_nms, torchvision.ops.boxes._batched_nms_coordinate_trick
    models, sessions = {}, {}
    for level in (first, {"O1": "O2", "O2": "O1"}[first]):
        settings = lower_precision_of(level)
        models[level] = ampkit.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0, **settings)
        sessions[level] = ampkit.current_session()
    assert VISION.nms is not before[0]
    sessions.pop(first_to_close).close()
    assert VISION.nms is not before[0]
    assert torchvision.ops.nms(boxes(), scores(), 0.3).numel()
    next(iter(sessions.values())).close()
    after = VISION.nms, torchvision.ops.boxes.batched_nms, torchvision.ops.boxes._batched_nms_coordinate_trick
    assert all(one is other for one, other in zip(before, after))


def test_initialize_that_fails_gives_the_operators_back(monkeypatch):
    before = {name: getattr(VISION, name) for name in ("deform_conv2d", "nms", "roi_align")}
    write, written = PatchSet.set, []

    def fail_at_the_third(patches, owner, name, value):
        if owner is VISION:
            written.append(name)
            if len(written) == 3:
                raise MemoryError("made to fail")
        write(patches, owner, name, value)

    monkeypatch.setattr(PatchSet, "set", fail_at_the_third)
    with pytest.raises(MemoryError, match="made to fail"):
        ampkit.initialize(nn.Linear(2, 2), opt_level="O2", verbosity=0)
    assert len(written) == 3 and all(getattr(VISION, name) is original for name, original in before.items())
    # Nothing is counted as living either: the next session comes and goes as if it were the first.
    ampkit.initialize(model := nn.Linear(2, 2), opt_level="O2", verbosity=0)
    assert VISION.nms is not before["nms"]
    ampkit.close()
    del model
    assert all(getattr(VISION, name) is original for name, original in before.items())


@pytest.mark.parametrize("level", ["O1"])
def test_scripts_and_traces_find_the_operators(level):
    def suppress(b, s, classes):
        return torchvision.ops.batched_nms(b, s, classes, 0.3)

    inputs = boxes(), scores(), torch.arange(10) % 2
    in_float32 = inputs[0].float(), inputs[1].float(), inputs[2]
    expected = suppress(*in_float32)
    model = ampkit.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0, **lower_precision_of(level))
    assert VISION.nms.overloads() == ["default"] and VISION.nms.default.name() == "torchvision::nms"
    # torch 2.15 asks every operator of the process for them when the first model is compiled.
    assert VISION.nms.op_overloads() == [VISION.nms.default]
    assert torch.equal(torch.jit.trace(suppress, inputs)(*inputs), expected)
    scripted = torch.jit.script(torchvision.ops.nms)
    ampkit.close()
    del model
    assert torch.equal(scripted(*in_float32[:2], 0.3), torchvision.ops.nms(*in_float32[:2], 0.3))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_compiled_code_has_the_casts(level):
    def suppress(b, s):
        return torchvision.ops.nms(b, s, 0.3)

    expected = suppress(boxes().float(), scores().float())
    model = ampkit.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0, **lower_precision_of(level))
    found = torch.compile(suppress, backend="aot_eager", fullgraph=True)(boxes(), scores())
    ampkit.close()
    del model
    assert torch.equal(found, expected)


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


def pictures():
    return list(torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1)))


def targets():
    masks = torch.zeros(2, 64, 64, dtype=torch.uint8)
    masks[0, 8:40, 8:40] = masks[1, 20:60, 30:60] = 1
    corners = torch.tensor([[8.0, 8, 40, 40], [30, 20, 60, 60]])
    return [{"boxes": corners, "labels": torch.tensor([1, 2]), "masks": masks} for _ in range(2)]


class Wrapped(nn.Module):
    """A detector inside another model: its targets arrive in lower precision where the outer model's inputs are cast."""

    def __init__(self, detector):
        super().__init__()
        self.detector = detector

    def forward(self, images, targets=None):
        return self.detector(images, targets)


def losses_of(model):
    torch.manual_seed(5)  # anchors and proposals are drawn
    return model.train()(pictures(), targets())


def check_training(model, level):
    expected = losses_of(model)
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    own = {} if level in ("O4", "O5") else lower_precision_of(level)
    ampkit.initialize(model, optimizer, opt_level=level, verbosity=0, **own)
    losses = losses_of(model)
    backward(sum(losses.values()), optimizer)
    optimizer.step()
    for name, loss in expected.items():
        assert losses[name].dtype is torch.float32
        assert losses[name].item() == pytest.approx(loss.item(), rel=0.03, abs=1e-3), name
    gradients = [param.grad for param in model.parameters() if param.grad is not None]
    assert len(gradients) > 50 and all(gradient.isfinite().all() for gradient in gradients)
    with torch.no_grad():
        found = model.eval()(pictures())
    assert all(one["boxes"].isfinite().all() and one["boxes"].shape[1] == 4 for one in found)
    assert sum(len(one["boxes"]) for one in found) > 0
    ampkit.close()


TWO_STAGE = itertools.product([detection.FasterRCNN, detection.MaskRCNN], ["O1", "O2", "O4", "O5"])
ONE_STAGE = itertools.product([detection.RetinaNet, detection.FCOS], ["O1", "O2"])


@pytest.mark.parametrize(
    "cls, level", others_slow((detection.MaskRCNN, "O1"), (detection.FasterRCNN, "O2"), of=TWO_STAGE)
)
def test_detector_trains_and_evaluates(cls, level):
    check_training(detector(cls), level)


@pytest.mark.parametrize("cls, level", others_slow((detection.RetinaNet, "O2"), (detection.FCOS, "O1"), of=ONE_STAGE))
def test_one_stage_detector_trains_and_evaluates(cls, level):
    check_training(detector(cls), level)


@pytest.mark.parametrize("level", others_slow("O2", of=["O2", "O5"]))
def test_detector_inside_another_model_trains(level):
    model = Wrapped(detector(detection.FasterRCNN))
    check_training(model, level)
    assert not model.detector.roi_heads._forward_pre_hooks
