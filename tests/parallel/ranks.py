"""For tests on several processes: batches, whole values of sharded tensors, sharded checkpoints, and comparisons."""

import torch
from helpers import net_with_norm
from torch.nn import functional as F


def batches_of_step(step):
    """Inputs and targets of both ranks."""
    drawn = torch.randn(2, 4, 9, generator=torch.Generator().manual_seed(step))
    return drawn[..., :6], drawn[..., 6:]


def whole(values):
    """Plain copies of tensors, gathered where they are sharded."""
    return {k: (v.full_tensor() if hasattr(v, "full_tensor") else v).detach().clone() for k, v in values.items()}


def movement(values, start):
    """How far float32 values have gone from those of ``start``, in one vector."""
    return torch.cat([(values[name].double() - start[name].double()).flatten() for name in start])


def assert_equal(one, other):
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def assert_moved_alike(found, expected, tolerance, start):
    one, other = movement(found, start), movement(expected, start)
    assert other.norm() > 0 and (one - other).norm() <= tolerance * other.norm(), (one - other).norm() / other.norm()


def in_float32(make_optimizer, steps):
    """`net_with_norm` after these steps of plain float32 on the joined batches."""
    model = net_with_norm()
    optimizer = make_optimizer(model.parameters())
    for step in steps:
        optimizer.zero_grad()
        x, y = (part.flatten(0, 1) for part in batches_of_step(step))
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return whole(model.state_dict())


def write_checkpoint(model, optimizer, folder, **settings):
    """With torch.distributed.checkpoint, each rank its shards; the weights as they are written."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, state = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=folder, **settings)
    return weights


def read_checkpoint(model, optimizer, folder, **settings):
    """Into a model and an optimizer that may be on another number of processes."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    weights, state = get_state_dict(model, optimizer)
    loaded = {"model": weights, "optimizer": state}
    checkpoint.load(loaded, checkpoint_id=folder, **settings)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
