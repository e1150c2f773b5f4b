"""The kernels divide long lists among threads, so they are tested on two threads; all other tests have one."""

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def several_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(max(before, 2))
    yield
    torch.set_num_threads(before)
