"""torch's own lists of the calls in its autocast tests, without the side effects of importing them."""

import pytest
import torch

lists = pytest.importorskip("torch.testing._internal.autocast_test_lists", reason="needs expecttest")

# torch's test utilities forbid torch.backends.cudnn.deterministic = True and the like, for every test that follows.
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
