import pytest
import torch.distributed as dist
from helpers import results_of_ranks

import ampkit


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    """The results of the test file, run as a script, on each of two processes."""
    return results_of_ranks(str(request.path), tmp_path_factory.mktemp("ranks"))


@pytest.fixture
def group_of_one():
    """A process group of this process alone; sessions that a test leaves are closed before it ends."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    ampkit.close()
    dist.destroy_process_group()
