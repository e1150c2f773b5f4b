"""A whole training step at O1 beside torch.autocast with GradScaler: time, and bytes kept for the backward pass.

    python benchmarks/bench_step.py [--rounds 30] [--device cpu] [--dtype bfloat16] [--only gpt] [--compile]

Each contender trains in a process of its own, since O1 patches torch for the whole process. The processes take turns, so
that another job on the machine disturbs all alike. A turn is one step, or as many as fit into a tenth of a second: a
training loop does not find its code gone from the caches at every step. Figures are medians over the rounds, after a
warm-up. Bytes are those of all tensors that autograd saves in one step, each storage counted once, parameters left out.

The processes keep the memory that they free (memory.py). "bare" is the floor: forward and backward passes alone, of a model
that is in lower precision throughout, without float32 weights, scaling or an optimizer; what is left of autocast's step is
all that a way of mixing precisions can save.
With ``--compile`` both compile their models with torch.compile; the autocast region is then around the compiled call.
"""

import argparse
import contextlib
import itertools
import multiprocessing
import statistics
import time

import torch
import torch.nn.functional as F
from memory import keep_freed_memory
from torch import nn

WARM_UP = 3  # steps
TURN = 0.1  # seconds


class Mlp(nn.Module):
    """Twelve layers of width 64: so little work that overhead decides."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))

    def forward(self, x):
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


class Block(nn.Module):
    """A pre-norm Transformer block with projections of their own for query, key and value."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.project = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """Six blocks of width 512 over 256 tokens."""

    def __init__(self, vocabulary=1000, width=512, layers=6, heads=8, length=256):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x))).flatten(0, 1)


class Lstm(nn.Module):
    """Two layers of width 256."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(128, 256, num_layers=2, batch_first=True), nn.Linear(256, 10)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def make_case(name):
    """(model, list of micro-batches (x, y), name of the loss function)."""
    if name == "mlp":
        return Mlp(), [(torch.randn(32, 64), torch.randn(32, 64))], "mse_loss"
    if name == "resnet18":
        import torchvision

        return (
            torchvision.models.resnet18(num_classes=10),
            [(torch.randn(32, 3, 64, 64), torch.arange(32) % 10)],
            "cross_entropy",
        )
    if name == "gpt":
        tokens = torch.randint(1000, (2, 257))
        return Gpt(), [(tokens[:, :-1], tokens[:, 1:].flatten())], "cross_entropy"
    if name == "lstm":
        return Lstm(), [(torch.randn(16, 64, 128), torch.arange(16) % 10)], "cross_entropy"
    if name == "accumulation":  # of four micro-batches
        model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(6)))
        return model, [(torch.randn(8, 2048), torch.randn(8, 2048)) for _ in range(4)], "mse_loss"
    raise ValueError(f"no model is called {name!r}")


CASES = ("mlp", "resnet18", "gpt", "lstm", "accumulation")
CONTENDERS = ("ampkit", "autocast", "bare")
ORDERS = list(itertools.permutations(CONTENDERS))


class Trainer:
    """One contender's model, and one step of it."""

    def __init__(self, contender, case, device, dtype, compiled):
        torch.manual_seed(0)
        self.model, batches, self.loss_name = make_case(case)
        self.model.to(device)
        self.batches = [(x.to(device), y.to(device)) for x, y in batches]
        self.device, self.dtype = device, dtype
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        if case == "lstm" and (compiled or not torch.ops.mkldnn._is_mkldnn_bf16_supported()):
            # No graph can hold oneDNN's LSTM, and torch.autocast asks for it in bfloat16 where there is none, and raises.
            torch.backends.mkldnn.set_flags(False)
        if contender == "ampkit":
            import ampkit

            self.model, self.optimizer = ampkit.initialize(
                self.model, self.optimizer, opt_level="O1", patch_torch_functions_type=dtype, verbosity=0
            )
            self.step = self.step_of_ampkit
        elif contender == "autocast":
            self.scaler = torch.amp.GradScaler(device.type)
            self.step = self.step_of_autocast
        else:
            self.model.to(dtype)
            self.batches = [(x.to(dtype) if x.is_floating_point() else x, y) for x, y in self.batches]
            self.step = self.step_of_bare
        if compiled:
            torch._dynamo.config.allow_rnn = True
            self.model = torch.compile(self.model, fullgraph=True)

    def step_of_ampkit(self):
        import ampkit

        self.optimizer.zero_grad()
        for index, (x, y) in enumerate(self.batches, start=1):
            loss = getattr(F, self.loss_name)(self.model(x), y)
            with ampkit.scale_loss(loss, self.optimizer, delay_unscale=index < len(self.batches)) as scaled:
                scaled.backward()
        self.optimizer.step()

    def step_of_autocast(self):
        self.optimizer.zero_grad()
        for x, y in self.batches:
            with torch.autocast(self.device.type, self.dtype):
                loss = getattr(F, self.loss_name)(self.model(x), y)
            self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def step_of_bare(self):
        for x, y in self.batches:
            getattr(F, self.loss_name)(self.model(x).float(), y).backward()
            self.model.zero_grad()

    def timed_step(self, steps):
        """Seconds a step takes, over ``steps`` of them."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.synchronize()
        return (time.perf_counter() - start) / steps

    def saved_bytes(self):
        """The bytes of everything that autograd saves in one step."""
        parameters = {param.untyped_storage().data_ptr() for param in self.model.parameters()}
        alive, sizes = [], {}

        def note(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                alive.append(storage)  # so that no other storage comes to lie at its address
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            self.step()
        return sum(sizes.values())

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def serve(connection, contender, case, device, dtype, compiled, threads):
    """Steps when told to, until told to stop: the body of a contender's process."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    with contextlib.suppress(EOFError):
        trainer = Trainer(contender, case, torch.device(device), dtype, compiled)
        while (task := connection.recv()) != "stop":
            name, *arguments = task
            connection.send(getattr(trainer, name)(*arguments))


def compare(case, rounds, device, dtype, compiled=False):
    """{contender: (median seconds, bytes saved)}, and the median and quartiles of the ratios of steps of one round."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for contender in CONTENDERS:
        pipes[contender], theirs = context.Pipe()
        process = context.Process(
            target=serve, args=(theirs, contender, case, device, dtype, compiled, torch.get_num_threads()), daemon=True
        )
        process.start()
        processes.append(process)

    def ask(contender, *task):
        pipes[contender].send(task)
        return pipes[contender].recv()

    saved = {contender: ask(contender, "saved_bytes") for contender in CONTENDERS}
    fastest = min(ask(contender, "timed_step", 1) for _ in range(WARM_UP) for contender in CONTENDERS)
    steps = max(1, int(TURN / fastest))
    times = {contender: [] for contender in CONTENDERS}
    for index in range(rounds):
        for contender in ORDERS[index % len(ORDERS)]:
            times[contender].append(ask(contender, "timed_step", steps))
    for contender, process in zip(CONTENDERS, processes, strict=True):
        pipes[contender].send("stop")
        process.join()
    ratios = [ours / theirs for ours, theirs in zip(times["ampkit"], times["autocast"], strict=True)]
    return {c: (statistics.median(times[c]), saved[c]) for c in CONTENDERS}, statistics.quantiles(ratios, n=4)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="bfloat16")
    parser.add_argument("--only", choices=CASES, action="append", help="one of the cases; may be given several times")
    parser.add_argument("--compile", action="store_true", help="compile both models")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds is {args.rounds}; quartiles take two or more")
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    print(f"torch {torch.__version__}, {device}, {args.dtype}, {torch.get_num_threads()} threads, {args.rounds} rounds")
    print(
        f"{'step of':<14}{'autocast':>12}{'O1':>12}{'ratio':>8}{'quartiles':>14}{'bare':>8}{'saved MB':>18}{'ratio':>8}"
    )
    for case in args.only or CASES:
        found, (low, ratio, high) = compare(case, args.rounds, device, dtype, args.compile)
        (ours, our_bytes), (theirs, their_bytes), (bare, _) = (found[contender] for contender in CONTENDERS)
        print(
            f"{case:<14}{theirs * 1e3:>9.2f} ms{ours * 1e3:>9.2f} ms{ratio:>8.2f}{low:>8.2f}-{high:.2f}"
            f"{bare / theirs:>8.2f}"
            f"{their_bytes / 1e6:>10.2f} {our_bytes / 1e6:>7.2f}{our_bytes / their_bytes:>8.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
