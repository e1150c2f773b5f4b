"""Operators bypass torch's dispatcher where no mode or subclass needs to see the call (csrc/direct.h); elsewhere they do not."""

import pytest
import torch
from helpers import Operators

from ampkit import kernels
from ampkit.kernels import backend
from ampkit.kernels.reference import serve

pytestmark = [pytest.mark.compiled("kernels"), pytest.mark.compiled("wrappers")]
WRITES_OUTPUTS = 0b10


def library():
    return backend.direct["update_scale"].func.__self__


def scale_directly(inputs, outputs, scale=0.5, written=WRITES_OUTPUTS):
    return library().multi_tensor_scale(written, inputs, outputs, scale, None, None, None)


class Weight(torch.nn.Parameter):
    """A subclass that handles no functions, as torch's Parameter does not."""


def test_plain_tensors_are_served_at_once():
    inputs, outputs = [torch.ones(3), torch.ones(2, 2)], [torch.zeros(3), torch.zeros(2, 2)]
    assert scale_directly(inputs, outputs) is None
    assert [out.flatten().tolist() for out in outputs] == [[0.5] * 3, [0.5] * 4]
    assert [t._version for t in (*inputs, *outputs)] == [0, 0, 1, 1]
    assert scale_directly(tuple(inputs), (torch.nn.Parameter(torch.zeros(3)), outputs[1])) is None
    assert scale_directly(inputs, (Weight(torch.zeros(3)), outputs[1])) is None
    norm, norms = library().multi_tensor_unscale_l2norm(0, outputs, [], 1.0, None, True, None, None)
    assert norm.item() == pytest.approx(1.75**0.5) and norms.tolist() == pytest.approx([0.75**0.5, 1.0])


class Subclass(torch.Tensor):
    pass


class Told(torch.nn.Parameter):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


NOT_PLAIN = {
    "a subclass": lambda: torch.ones(3).as_subclass(Subclass),
    "a parameter that is told of functions": lambda: Told(torch.ones(3)),
    "a lazy conjugate": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "a lazy negative": lambda: torch._neg_view(torch.ones(3)),
    "another device": lambda: torch.ones(3, device="meta"),
    "sparse": lambda: torch.ones(3).to_sparse(),
    "inference": torch.inference_mode()(lambda: torch.ones(3)),
    "no tensor": lambda: None,
}


@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_what_is_not_plain_goes_through_the_dispatcher_untouched(kind):
    odd, out = NOT_PLAIN[kind](), torch.full((3,), 7.0)
    assert scale_directly([torch.ones(3), odd], [out, torch.zeros(3)]) is NotImplemented
    assert out.tolist() == [7.0] * 3 and out._version == 0


def test_whoever_listens_hears_of_operators():
    def call():
        out = torch.zeros(3)
        kernels.multi_tensor_scale([torch.ones(3)], [out], 0.5)
        assert out.tolist() == [0.5] * 3 and out._version == 1

    with Operators() as heard:
        call()
    assert "multi_tensor_scale" in heard.names
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    assert any(event.key == "ampkit::multi_tensor_scale" for event in profile.key_averages())
    with torch._subclasses.FakeTensorMode():
        assert kernels.multi_tensor_l2norm([torch.ones(3)], True)[1].shape == (1,)
    call()


def test_errors_are_the_operators_own():
    """Inputs that the operator refuses return NotImplemented, or raise an error that says why."""
    assert scale_directly([torch.ones(3)], []) is NotImplemented
    with pytest.raises(RuntimeError, match=r"^multi_tensor_scale: inputs has 1 tensors, outputs has 0"):
        kernels.multi_tensor_scale([torch.ones(3)], [], 0.5)
    with pytest.raises(TypeError, match="expected 7 arguments, got 2"):
        library().multi_tensor_scale(0, [])
    with pytest.raises(TypeError, match="must be real number, not list"):
        scale_directly([torch.ones(3)], [torch.ones(3)], [1.0])


@pytest.mark.parametrize("directly", [True, False])
def test_an_error_of_the_work_itself_is_told_and_nothing_is_done_twice(directly, monkeypatch):
    """For example the error of a launch, which is checked afterwards: the work may be done by then."""
    done = []

    def work(*args, **kwargs):
        done.append("kernel")
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    at_once = work if directly else lambda *args, **kwargs: NotImplemented
    monkeypatch.setitem(backend.direct, "multi_tensor_double", at_once)
    monkeypatch.setattr(backend, "through_dispatcher", work)
    monkeypatch.setattr(backend, "kernel_devices", frozenset(("cpu",)))
    reference = lambda inputs, outputs: done.append("reference")  # noqa: E731
    with pytest.raises(RuntimeError, match="illegal memory access"):
        serve("multi_tensor_double", reference, dict(inputs=[torch.ones(2)], outputs=[torch.ones(2)]))
    assert done == ["kernel"]
