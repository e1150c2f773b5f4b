import pytest
import torch.distributed as dist

import ampkit


@pytest.fixture
def group_of_one():
    """A process group of this process alone; sessions that a test leaves are closed before it ends."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    ampkit.close()
    dist.destroy_process_group()
