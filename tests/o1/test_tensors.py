"""Finding and casting tensors in containers of every kind."""

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from types import MappingProxyType

import numpy as np
import pytest
import torch

from ampkit.casting.tensors import cast_floating, map_tensors

Point = namedtuple("Point", "x y")
Box, FrozenBox, SlottedBox = (
    dataclasses.make_dataclass("Box", [("data", torch.Tensor), ("label", str, "box")], **settings)
    for settings in ({}, {"frozen": True}, {"frozen": True, "slots": True})
)


class Weights(list):
    pass


@dataclasses.dataclass
class ModelOutput(OrderedDict):
    """A dict as in Hugging Face's transformers, whose entries are attributes too."""

    logits: torch.Tensor = None

    def __post_init__(self):
        super().__setitem__("logits", self.logits)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self):
        return type(self), (self.logits,)


class Batch:
    def __init__(self, image):
        self.image = image
        self.parent = self

    def to(self, device):
        return self


class Tokens(UserDict):
    def to(self, device):
        return self


CONTAINERS = {
    "list": (lambda t: [1, t], lambda c: c[1]),
    "list subclass": (lambda t: Weights([t]), lambda c: c[0]),
    "tuple": (lambda t: (1, t), lambda c: c[1]),
    "named tuple": (lambda t: Point(1, t), lambda c: c.y),
    "return type": (lambda t: torch.max(t, dim=0), lambda c: c.values),
    "dict": (lambda t: {"a": t}, lambda c: c["a"]),
    "OrderedDict": (lambda t: OrderedDict(a=t), lambda c: c["a"]),
    "defaultdict": (lambda t: defaultdict(list, a=t), lambda c: c["a"]),
    "mapping proxy": (lambda t: MappingProxyType({"a": t}), lambda c: c["a"]),
    "UserDict": (lambda t: Tokens(a=t), lambda c: c["a"]),
    "ModelOutput": (lambda t: ModelOutput(logits=t), lambda c: c.logits),
    "dataclass": (lambda t: Box(t), lambda c: c.data),
    "frozen dataclass": (lambda t: FrozenBox(t), lambda c: c.data),
    "slotted dataclass": (lambda t: SlottedBox(t), lambda c: c.data),
    "set": (lambda t: {t}, lambda c: next(iter(c))),
    "frozenset": (lambda t: frozenset({t}), lambda c: next(iter(c))),
    "deque": (lambda t: deque([t], maxlen=3), lambda c: c[0]),
    "packed sequence": (lambda t: torch.nn.utils.rnn.pack_sequence([t, t[:1]]), lambda c: c.data),
    "batch class": (lambda t: Batch(t), lambda c: c.image),
    "nested": (lambda t: {"a": [Point((t,), 2)]}, lambda c: c["a"][0].x[0]),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_cast_floating_keeps_the_type_of(name):
    build, inside = CONTAINERS[name]
    value = build(torch.arange(4.0).reshape(2, 2))
    before = inside(value)
    mapped = cast_floating(value, torch.bfloat16)
    assert type(mapped) is type(value)
    assert inside(mapped).dtype is torch.bfloat16
    torch.testing.assert_close(inside(mapped).float(), before)  # small integers are exact in bfloat16
    assert inside(value) is before, "the container itself was edited"


@pytest.mark.parametrize("name", CONTAINERS)
def test_map_tensors_returns_the_same_object_when_nothing_changes(name):
    build, _ = CONTAINERS[name]
    value = build(torch.rand(2, 2))
    assert map_tensors(value, lambda x: x) is value


def test_map_tensors_keeps_what_else_a_container_holds():
    value = defaultdict(list, a=torch.rand(1), b="text")
    mapped = cast_floating(value, torch.float16)
    assert mapped.default_factory is list
    assert mapped["b"] == "text"
    assert cast_floating(deque([torch.rand(1)], maxlen=3), torch.float16).maxlen == 3
    output = cast_floating(ModelOutput(logits=torch.rand(1)), torch.float16)
    assert output["logits"] is output.logits
    value = [torch.rand(1)]
    value.append(value)  # a list that holds itself
    assert cast_floating(value, torch.bfloat16)[0].dtype is torch.bfloat16


def test_map_tensors_leaves_what_is_no_container():
    array, module = np.ones(3, dtype=np.float32), torch.nn.Linear(2, 2)
    generator = (x for x in [torch.rand(1)])
    for value in ("text", b"bytes", 3, 2.5, None, array, generator, module, torch.Size([1, 2]), torch.float32, Batch):
        assert cast_floating(value, torch.bfloat16) is value
    assert module.weight.dtype is torch.float32
    assert next(generator).dtype is torch.float32, "the generator was consumed"


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.bfloat16])
def test_cast_floating_casts_between_all_pairs_and_leaves_other_dtypes(source, target):
    assert cast_floating(torch.ones(2, dtype=source), target).dtype is target
    for other in (torch.float64, torch.int64, torch.bool, torch.complex64, torch.uint8):
        tensor = torch.ones(2, dtype=other)
        assert cast_floating([tensor], target)[0] is tensor
