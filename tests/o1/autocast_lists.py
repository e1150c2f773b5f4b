"""torch's own lists of what its autocast tests call, without what importing them does to the process."""

import pytest
import torch

lists = pytest.importorskip("torch.testing._internal.autocast_test_lists", reason="needs expecttest")

# torch's test utilities forbid torch.backends.cudnn.deterministic = True and the like, for every test that follows.
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
