"""timm's optimizers, unmodified, at O2: the steps are those over float32 parameters with the same gradients."""

import pytest
from helpers import STORED_BF16, assert_steps_as_over_float32, net_with_norm

optim = pytest.importorskip("timm.optim", reason="`make clients` installs timm")

OPTIMIZERS = {
    "Lion": lambda p: optim.Lion(p, lr=1e-2, weight_decay=0.1),
    "Lion, one by one": lambda p: optim.Lion(p, lr=1e-2, foreach=False, caution=True),
    "Adafactor": lambda p: optim.Adafactor(p, lr=1e-2, betas=(0.9, 0.999)),
    "AdafactorBigVision": lambda p: optim.AdafactorBigVision(p, lr=1e-2),
    "AdamP": lambda p: optim.AdamP(p, lr=1e-2, weight_decay=0.1),
    "NAdamW": lambda p: optim.NAdamW(p, lr=1e-2),
    "LaProp": lambda p: optim.LaProp(p, lr=1e-2),
    "MADGRAD": lambda p: optim.MADGRAD(p, lr=1e-2),
    "Muon": lambda p: optim.Muon(p, lr=1e-2),
    "Lookahead": lambda p: optim.Lookahead(optim.NAdamW(p, lr=1e-2), k=2),
}


@pytest.mark.parametrize("level", ["O2", STORED_BF16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_over_float32_parameters(name, level):
    assert_steps_as_over_float32(net_with_norm(20, 24, 18), OPTIMIZERS[name], level, tolerance=2e-6)
