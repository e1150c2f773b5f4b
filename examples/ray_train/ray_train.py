"""Ray Train at an opt level: `initialize` takes the bare model on its device, then ``prepare_model`` wraps it in DDP.

$ python examples/ray_train/ray_train.py --opt-level O2 --workers 2

Prints whether all ranks hold the same weights.
"""

import argparse

import ray.train.torch
import torch
from ray.train import ScalingConfig
from torch import nn
from torch.nn import functional as F

import ampkit

STEPS = 20


def train(config):
    rank, workers = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    device = ray.train.torch.get_device()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = ampkit.initialize(model, optimizer, opt_level=config["opt_level"], verbosity=int(rank == 0))
    model = ray.train.torch.prepare_model(model)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        x = torch.randn(32, 16, generator=generator).to(device)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x[:, :1].sin())
        with ampkit.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    weights = torch.cat([param.detach().double().flatten() for param in ampkit.master_params(optimizer)])
    everywhere = [torch.empty_like(weights) for _ in range(workers)]
    torch.distributed.all_gather(everywhere, weights)
    agree = all(torch.equal(other, weights) for other in everywhere)
    if rank == 0:
        print(f"ray {config['opt_level']}: loss {loss.item():.3f}, {workers} ranks agree: {agree}")
    ampkit.close()
    ray.train.report({"loss": loss.item()})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt-level", default="O2")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true")
    args = parser.parse_args()
    scaling = ScalingConfig(num_workers=args.workers, use_gpu=args.gpu)
    trainer = ray.train.torch.TorchTrainer(train, train_loop_config=vars(args), scaling_config=scaling)
    trainer.fit()
