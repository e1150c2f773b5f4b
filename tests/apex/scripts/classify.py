"""After the ImageNet pattern of Apex's examples: legacy CUDA calls, distributed where it is launched so, a checkpoint."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

try:
    from apex import amp, optimizers  # noqa: F401
    from apex.fp16_utils import *  # noqa: F403
    from apex.multi_tensor_apply import multi_tensor_applier
    from apex.parallel import DistributedDataParallel as DDP
except ImportError as error:
    raise ImportError("Please install apex from https://www.github.com/nvidia/apex to run this example.") from error


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", "--local-rank", default=os.getenv("LOCAL_RANK", 0), type=int)
    parser.add_argument("--opt-level", type=str, default="O1")
    parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
    parser.add_argument("--loss-scale", type=str, default=None)
    parser.add_argument("--sync_bn", action="store_true")
    parser.add_argument("--checkpoint", default="")
    parser.add_argument("--results", default="")
    return parser.parse_args()


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.full((1, 8, 8), index / 12.0), index % 2


def main():
    args = parse()
    args.distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    args.gpu, args.world_size = 0, 1
    if args.distributed:
        args.gpu = args.local_rank
        torch.cuda.set_device(args.gpu)
        dist.init_process_group(backend="nccl", init_method="env://")
        args.world_size = dist.get_world_size()
    assert torch.backends.cudnn.enabled, "Amp requires cudnn backend to be enabled."
    assert torch.cuda.is_available() and multi_tensor_applier.available
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    if args.sync_bn:
        import apex

        model = apex.parallel.convert_syncbn_model(model)
    model = model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )
    if args.distributed:
        model = DDP(model, delay_allreduce=True)
    criterion = nn.CrossEntropyLoss().cuda()
    loader = torch.utils.data.DataLoader(Images(), batch_size=4, pin_memory=True)
    for _epoch in range(2):
        for input, target in loader:
            input, target = input.cuda(non_blocking=True), target.cuda(non_blocking=True)
            output = model(input - 0.5)
            loss = criterion(output, target)
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            if args.distributed:
                dist.all_reduce(loss.data)
            torch.cuda.synchronize()
    with torch.no_grad():
        model.eval()
        first = next(model.parameters())
        print("RESULT", args.local_rank, output.dtype, first.dtype, args.world_size, f"{loss.item():.3f}", flush=True)
        if args.results:  # lines of two processes may run into each other
            with open(f"{args.results}/rank{args.local_rank}", "w") as file:
                print(output.dtype, first.dtype, args.world_size, file=file)
    if args.checkpoint and args.local_rank == 0:
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}, args.checkpoint
        )
        loaded = torch.load(args.checkpoint, map_location=lambda storage, loc: storage.cuda(args.gpu))
        amp.load_state_dict(loaded["amp"])
    if args.distributed:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
