"""A model of the time of one training step on N GPUs: measured compute, bytes that travel, and link speeds.

$ python benchmarks/step_time_model.py

Prints a table for each amount of work; step_time_model.md has those of little work on each GPU. Nothing is measured here: compute
on one GPU and link speeds are published figures, whose sources stand beside them. A step computes; what is sent hides behind the
pass that runs meanwhile, and what does not fit there is waited for.
"""

from dataclasses import dataclass

REACHED = 0.8  # of a link's published speed, by a large collective: an assumption
FORWARD = 1 / 3  # of the compute; the backward pass takes twice the forward's operations


@dataclass
class Link:
    """A link between GPUs. ``speed`` is that of one GPU, in one direction, in bytes a second."""

    name: str
    gpus: int
    speed: float


LINKS = [
    Link("8, NVLink", 8, 300e9),  # third generation: 600 GB/s both ways, nvidia.com/en-us/data-center/nvlink
    Link("8, PCIe 4.0 x16", 8, 31.5e9),  # 16 GT/s on 16 lanes, 128 of 130 bits: pcisig.com
    Link("64, InfiniBand HDR", 64, 25e9),  # 200 Gb/s for each GPU, as in a DGX A100: its data sheet
    Link(
        "64, 100 Gb/s Ethernet", 64, 12.5e9
    ),  # one port for each machine of 8, which a ring goes through once each way
]


@dataclass
class Work:
    """The work of one GPU in a step: ``seconds`` of compute, on parameters of which ``norms`` stay float32 at O2 and O5."""

    name: str
    params: float
    norms: float
    seconds: float


# ResNet-50 v1.5 on one A100 80GB, mixed precision: 2,470 images/s (github.com/NVIDIA/DeepLearningExamples, PyTorch/Classification/
# ConvNets/resnet50v1.5, "Training performance: NVIDIA DGX A100"). The same rate is taken for the small batch, which flatters it.
RESNET_PARAMS, RESNET_NORMS, RESNET_RATE = 25_557_032, 53_120, 2470.0

# 24 layers of width 2048, 2,048 tokens, 50,257 words. One A100 reached 137e12 operations a second on a GPT of 1.7 B parameters
# (arxiv.org/abs/2104.04473, Table 1), recomputed activations counted, which are none here.
LAYERS, WIDTH, LENGTH, WORDS, GPT_RATE = 24, 2048, 2048, 50_257, 137e12
GPT_PARAMS = LAYERS * (12 * WIDTH**2 + 13 * WIDTH) + (WORDS + LENGTH) * WIDTH + 2 * WIDTH
GPT_NORMS = (2 * LAYERS + 1) * 2 * WIDTH
OPERATIONS_PER_TOKEN = 6 * GPT_PARAMS + 12 * LAYERS * WIDTH * LENGTH  # both passes; the second term is attention

WORKS = [
    *(Work(f"ResNet-50, {n} images", RESNET_PARAMS, RESNET_NORMS, n / RESNET_RATE) for n in (256, 32)),
    *(
        Work(f"GPT 1.3 B, {n:,} tokens", GPT_PARAMS, GPT_NORMS, n * OPERATIONS_PER_TOKEN / GPT_RATE)
        for n in (16_384, 2_048)
    ),
]

# name: bytes for each parameter that are averaged, or for FSDP2 (gathered for each pass, reduced)
WRAPPERS = {
    "DDP, O1 and O5": (4,),
    "DDP, O2": (2,),
    "FSDP2, O1": (4, 4),
    "FSDP2, O2 and O5": (2, 4),
    "FSDP2, O5, `reduce_dtype=torch.bfloat16`": (2, 2),
}


def waited(work: Work, wrapper: str, gpus: int, speed: float) -> float:
    """Seconds of a step in which the GPU waits for what is sent."""
    share = (gpus - 1) / gpus  # the share that a ring sends from each GPU, once through
    forward, backward = FORWARD * work.seconds, (1 - FORWARD) * work.seconds

    def seconds(size: int) -> float:
        """Seconds to send this many bytes for each parameter; norms are float32 in any case."""
        return share * (size * (work.params - work.norms) + 4 * work.norms) / (REACHED * speed)

    sizes = WRAPPERS[wrapper]
    if len(sizes) == 1:  # reduced and then handed on, both in the backward pass
        return max(0.0, 2 * seconds(sizes[0]) - backward)
    gathered, reduced = sizes
    return max(0.0, seconds(gathered) - forward) + max(0.0, seconds(gathered) + seconds(reduced) - backward)


def speed_needed(work: Work, wrapper: str) -> float:
    """The speed of a link, in bytes a second, at which nothing is waited for, with any number of GPUs."""
    slow, fast = 1e6, 1e13
    for _ in range(60):
        middle = (slow * fast) ** 0.5
        slow, fast = (middle, fast) if waited(work, wrapper, 10**9, middle) else (slow, middle)
    return fast


def tables(works: list[Work] = WORKS[1::2]) -> str:
    """Tables, one for each work; by default for those with little work on each GPU.

    A cell is the step, and how much of it is compute; bold where waiting takes more than half.
    """
    lines = []
    for work in works:
        lines += [
            f"**{work.name} on each GPU**: {1000 * work.seconds:.0f} ms of compute",
            "",
            "| step, share of compute | " + " | ".join(link.name for link in LINKS) + " | hides from |",
            "|---" * (len(LINKS) + 2) + "|",
        ]
        for wrapper in WRAPPERS:
            cells = []
            for link in LINKS:
                step = work.seconds + waited(work, wrapper, link.gpus, link.speed)
                cell = f"{1000 * step:.0f} ms, {100 * work.seconds / step:.0f}%"
                cells.append(f"**{cell}**" if step > 2 * work.seconds else cell)
            lines.append(f"| {wrapper} | {' | '.join(cells)} | {speed_needed(work, wrapper) / 1e9:.1f} GB/s |")
        lines.append("")
    return "\n".join(lines).rstrip()


if __name__ == "__main__":
    print(tables(WORKS))
