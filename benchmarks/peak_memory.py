"""Peak memory of training a GPT of 69 million parameters, beside torch.autocast without a loss scale, in MiB of the process.

    python benchmarks/peak_memory.py [--ways "autocast;O5"] [--micro 1,4] [--stay]

Each way has a process of its own, which gives back what it frees; its peak less its size before the model was made is printed,
of the fourth step. "O5, read" reads every gradient between the backward pass and the step; "O5, int8" keeps moments in 8 bits.
``--stay`` clears gradients between forward and backward pass. Gradients are cleared before the forward pass otherwise.
"""

import argparse
import contextlib
import multiprocessing
import resource
import sys

WAYS = ("autocast", "O1", "O2", "O5", "O5, read", "O5, fused", "O5, int8")
STEPS = 4


def size_now():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def reset_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmHWM"))


def train(way, micro, stays, small, answer):
    import torch
    import torch.nn.functional as F
    from cases import Gpt

    import ampkit
    from ampkit.optimizers import FusedAdam

    torch.manual_seed(0)
    level, _, more = way.partition(", ")
    torch.mm(torch.ones(64, 64).bfloat16(), torch.ones(64, 64).bfloat16())  # what torch allocates once
    before = size_now()
    model = Gpt(width=768, layers=1 if small else 8, heads=12, vocabulary=8000)
    if more in ("fused", "int8"):
        optimizer = FusedAdam(model.parameters(), lr=1e-4, state_dtype="int8" if more == "int8" else "float32")
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if level != "autocast":
        ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
    tokens = torch.randint(0, 8000, (micro, 2, 257))
    reset_peak()
    for _ in range(STEPS):
        if not stays:
            optimizer.zero_grad()
        for batch in tokens:
            with torch.autocast("cpu", torch.bfloat16) if level == "autocast" else contextlib.nullcontext():
                loss = F.cross_entropy(model(batch[:, :-1]), batch[:, 1:].flatten()) / micro
            if stays and batch is tokens[0]:
                optimizer.zero_grad()
            if level == "autocast":
                loss.backward()
            else:
                with ampkit.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
        if more == "read":
            assert all(param.grad.dtype is torch.float32 for param in model.parameters())
        optimizer.step()
    answer.put((peak() - before, sum(param.numel() for param in model.parameters())))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", default=";".join(WAYS), help="separated by ;")
    parser.add_argument("--micro", default="1,4")
    parser.add_argument("--stay", action="store_true")
    parser.add_argument("--small", action="store_true", help="one block, to see that all runs")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for micro in map(int, options.micro.split(",")):
        for way in options.ways.split(";"):
            answer = context.Queue()
            process = context.Process(target=train, args=(way, micro, options.stay, options.small, answer))
            process.start()
            process.join()
            if process.exitcode:
                return process.exitcode
            mebibytes, parameters = answer.get()
            per = mebibytes * 2**20 / parameters
            print(f"{micro} micro-batches  {way:10} {mebibytes:7.0f} MiB  {per:5.1f} bytes per parameter", flush=True)


if __name__ == "__main__":
    sys.exit(main())
