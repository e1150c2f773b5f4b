"""DDP and FSDP2 on two and on four gloo processes, judged by one process on the joined batch; checkpoints on other numbers of them.

Each case takes four steps; one rank spoils the third, which all skip.
"""

import itertools
import math
import sys
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import GatedNet, as_one_of_two_ranks, assert_moved_alike, results_of_ranks, whole
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as recomputed

import ampkit
from ampkit.optimizers import FusedAdam, FusedSGD
from ampkit.parallel import fully_shard
from ampkit.sharding import local

ROWS, STEPS, SPOILED = 16, 4, 2
OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.1, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "torch's fused AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "FusedAdam": lambda params: FusedAdam(params, lr=1e-2),
    "FusedAdam in int8": lambda params: FusedAdam(params, lr=1e-2, state_dtype="int8"),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3),
}
#: Settings of initialize; a dynamic scale checks at every level.
SCALES = {
    "none": {},
    "dynamic": {"loss_scale": "dynamic"},
    "growing": {"loss_scale": ampkit.DynamicLossScale(init_scale=8.0, growth_factor=4.0, growth_interval=1)},
    "checked": {"check_gradients": True},
}
#: Settings of DistributedDataParallel and `fully_shard`.
OPTIONS = {
    "": {},
    "views": {"gradient_as_bucket_view": True},
    "gathered once": {"reshard_after_forward": False},
    "reduced in bfloat16": {"reduce_dtype": torch.bfloat16},
    "replicas of shards": {"mesh": (2, 2)},
}


@dataclass(frozen=True)
class Case:
    wrapper: str
    level: str
    optimizer: str
    scale: str = "dynamic"
    options: str = ""
    clip: float | None = None
    micro_batches: int = 2
    #: Average gradients after each micro-batch, not at last.
    each_time: bool = False
    #: Leave gradients scaled until the last micro-batch.
    delayed: bool = False
    #: Backward passes without a block of `ampkit.scale_loss`.
    without_blocks: bool = False
    #: What is infinite in one step: the first loss, or, after gradients were averaged, the shard of one of them.
    spoiled: str = "loss"
    on_rank: int = -1
    #: "compiled", "recomputed" or "born in bfloat16".
    model: str = ""

    def __str__(self):
        """Name what differs from the plainest case."""
        plain = {each.name: each.default for each in fields(self)}
        pairs = [(name, value) for name, value in vars(self).items() if value != plain[name]]
        return ", ".join(value if isinstance(value, str) else f"{name}={value}" for name, value in pairs)


#: On two processes.
QUICK = [
    *(Case("fsdp2", level, name, spoiled="shard") for level in ("O1", "O2", "O5") for name in ("AdamW", "FusedAdam")),
    *(
        Case("fsdp2", *row, "checked", micro_batches=1, without_blocks=without, spoiled="shard", on_rank=rank)
        for row in (("O4", "AdamW"), ("O5", "AdamW"), ("O5", "torch's fused AdamW"), ("O5", "FusedAdam"))
        for rank, without in ((0, False), (1, True), (1, False))
    ),
    *(
        Case(wrapper, *row, scale, options, each_time=each_time, delayed=delayed)
        for wrapper, scale, options in (("ddp", "dynamic", "views"), ("ddp", "growing", ""), ("fsdp2", "growing", ""))
        for row in (("O1", "SGD"), ("O2", "SGD"), ("O2", "FusedSGD"))
        for each_time in (False, True)
        for delayed in (False, True)
    ),
    *(Case("ddp", level, "AdamW", scale, clip=0.25) for level, scale in (("O2", "dynamic"), ("O5", "none"))),
    Case("ddp", "O5", "torch's fused AdamW", "none", clip=0.25),
    Case("ddp", "O2", "RMSprop", clip=0.25),
]
#: On four.
SLOW = [
    *(
        Case(wrapper, level, name, clip=0.25)
        for wrappers, levels, names in (
            (("ddp", "fsdp2"), ("O1", "O2", "O5"), ("AdamW", "FusedAdam")),
            (("fsdp2",), ("O0", "O4", "O5"), ("FusedSGD", "torch's fused AdamW")),
        )
        for wrapper, level, name in itertools.product(wrappers, levels, names)
    ),
    Case("fsdp2", "O3", "AdamW", clip=0.25),
    Case("fsdp2", "O5", "AdamW", options="reduced in bfloat16"),
    Case("fsdp2", "O5", "FusedAdam", options="replicas of shards", clip=0.25),
    Case("fsdp2", "O5", "AdamW", model="born in bfloat16"),
    *(Case("fsdp2", level, "AdamW", options="gathered once") for level in ("O1", "O5")),
    *(Case("fsdp2", level, "AdamW", model=how) for level in ("O1", "O5") for how in ("compiled", "recomputed")),
]
#: Checkpoints, by the name of a folder.
SAVED = {
    "O1": Case("fsdp2", "O1", "AdamW", clip=0.25),
    "O5": Case("fsdp2", "O5", "AdamW", clip=0.25),
    "O5, moments in 8 bits": Case("fsdp2", "O5", "FusedAdam in int8", clip=0.25),
}


def data(step, part, rank, count):
    """The rows of a rank in a micro-batch; all ranks together have the same rows, whatever their number."""
    drawn = torch.randn(ROWS, 9, generator=torch.Generator().manual_seed(2 * step + part))
    mine = drawn.chunk(count)[rank]
    return mine[:, :6], mine[:, 6:]


def prepared(case):
    """(model, what is called, optimizer)."""
    model = GatedNet()
    if case.model == "born in bfloat16":
        model.bfloat16()
    for block in model.blocks if case.wrapper != "alone" else ():
        if case.model == "compiled":  # what inductor makes of the graphs is the same without FSDP2, and takes minutes
            block.compile(backend="aot_eager")
        elif case.model == "recomputed":
            plain = block.forward
            block.forward = lambda x, plain=plain: recomputed(plain, x, use_reentrant=False)
    options = dict(OPTIONS[case.options])
    if case.wrapper == "fsdp2":
        if "mesh" in options:
            options["mesh"] = init_device_mesh("cpu", options["mesh"], mesh_dim_names=("replicas", "shards"))
        for module in (*model.blocks, model):
            fully_shard(module, opt_level=case.level, **options)
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    ampkit.initialize(model, optimizer, opt_level=case.level, verbosity=0, **SCALES[case.scale])
    called = DistributedDataParallel(model, **options) if case.wrapper == "ddp" else model
    return model, called, optimizer


#: Calls of ``dist.all_reduce`` on this rank.
CALLS: list[None] = []


def take_steps(case, model, called, optimizer, steps, rank=0, count=1, spoiled=None):
    """Take steps, of which the number ``spoiled`` is. For each: whether it was skipped, its norm if clipped, and collectives."""
    results = {"skipped": [], "norms": [], "collectives": []}
    for step in steps:
        optimizer.zero_grad()
        CALLS.clear()
        for part in range(case.micro_batches):
            last = part == case.micro_batches - 1
            averages = last or case.each_time
            spoils = step == spoiled and rank == case.on_rank % count
            if case.wrapper == "fsdp2":
                called.set_requires_gradient_sync(averages)
            with called.no_sync() if case.wrapper == "ddp" and not averages else nullcontext():
                x, y = data(step, part, rank, count)
                loss = F.mse_loss(called(x).float(), y) / case.micro_batches
                loss = loss * math.inf if spoils and part == 0 and case.spoiled == "loss" else loss
                block = ampkit.scale_loss(loss, optimizer, delay_unscale=case.delayed and not last)
                with nullcontext(loss) if case.without_blocks else block as scaled:
                    scaled.backward()
                    if spoils and last and case.spoiled == "shard":
                        local(model.head.weight.grad).view(-1)[-1] = math.nan if case.scale == "checked" else math.inf
        if case.clip is not None:
            results["norms"].append(ampkit.clip_grad_norm_(optimizer, case.clip).item())
        optimizer.step()
        results["collectives"].append(len(CALLS))
        results["skipped"].append(ampkit.step_was_skipped(optimizer))
    return results


def trained(case, rank=0, count=1):
    torch._dynamo.utils.counters.clear()
    model, called, optimizer = prepared(case)
    steps = take_steps(case, model, called, optimizer, range(STEPS), rank, count, SPOILED)
    scaler, graphs = ampkit.state_dict()["loss_scaler0"], torch._dynamo.utils.counters["stats"]["unique_graphs"]
    result = {**steps, "weights": whole(model.state_dict()), "scaler": scaler, "graphs": graphs}
    ampkit.close()
    return result


def saved(rank, count, case, folder):
    """Take two steps, a checkpoint, and two steps more; return the weights then and now."""
    model, called, optimizer = prepared(case)
    take_steps(case, model, called, optimizer, range(2), rank, count)
    weights, state = get_state_dict(model, optimizer)
    assert {value.dtype for value in weights.values()} == {torch.float32}
    checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    return then_and_now(case, model, called, optimizer, rank, count)


def resumed(rank, count, case, folder):
    """Load the checkpoint of `saved` in other processes, and take the same two steps more; a single process has a whole model."""
    case = case if count > 1 else replace(case, wrapper="alone")
    model, called, optimizer = prepared(case)
    model(data(0, 0, rank, count)[0])  # what was gathered before is not used after loading
    weights, state = get_state_dict(model, optimizer)
    loaded = {"model": weights, "optimizer": state}
    checkpoint.load(loaded, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    if count == 2:
        checkpoint.save(loaded, checkpoint_id=folder.parents[1] / "of two" / folder.name)
    return then_and_now(case, model, called, optimizer, rank, count)


def then_and_now(case, model, called, optimizer, rank, count):
    then = whole(model.state_dict())
    take_steps(case, model, called, optimizer, range(2, 4), rank, count)
    now = whole(model.state_dict())
    ampkit.close()
    return {"then": then, "now": now}


def work(rank):
    all_reduce = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: CALLS.append(None) or all_reduce(*args, **kwargs)
    folder, count = Path(sys.argv[1]), dist.get_world_size()
    if folder.name == "quick":
        return {str(case): trained(case, rank, count) for case in QUICK}
    if folder.name == "four":
        checkpoints = {f"saved {n}": saved(rank, count, SAVED[n], folder.parent / "of four" / n) for n in SAVED}
        return {str(case): trained(case, rank, count) for case in SLOW} | checkpoints
    checkpoints = folder.parent / ("of two" if count == 1 else "of four")
    names = SAVED if count == 4 else ("O1", "O5")
    return {name: resumed(rank, count, SAVED[name], checkpoints / name) for name in names}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A function of a run's name and its number of processes, which returns the results of each."""
    folder, by_name = tmp_path_factory.mktemp("ranks"), {}

    def results(name, count):
        if name not in by_name:
            (folder / name).mkdir()
            by_name[name] = results_of_ranks(__file__, folder / name, count)
        return by_name[name]

    return results


def assert_train_as_one_process(ranks, case):
    """Equal on all ranks bit for bit, the spoiled step skipped on all; O3's shards are float32, as O2's values are."""
    first = ranks[0]
    for other in ranks[1:]:
        assert all(torch.equal(first["weights"][name], value) for name, value in other["weights"].items())
        assert (other["skipped"], other["scaler"]) == (first["skipped"], first["scaler"])
    alone = trained(replace(case, wrapper="alone", level="O2" if case.level == "O3" else case.level))
    assert first["skipped"] == alone["skipped"] == [step == SPOILED for step in range(STEPS)]
    assert case.scale != "dynamic" or first["scaler"]["loss_scale"] == 2.0**15
    assert case.scale != "checked" or all(rank["collectives"] == [1] * STEPS for rank in ranks)
    assert case.model != "compiled" or first["graphs"] >= 1
    exact = case.level == "O0"
    assert_moved_alike(first["weights"], alone["weights"], GatedNet().state_dict(), 1e-4 if exact else 0.02)
    for step, (found, expected) in enumerate(zip(first["norms"], alone["norms"])):
        assert step == SPOILED or found == pytest.approx(expected, rel=1e-5 if exact else 0.02)


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_two_ranks_train_as_one_process_on_the_joined_batch(run, case):
    assert_train_as_one_process([rank[str(case)] for rank in run("quick", 2)], case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=str)
def test_four_ranks_train_as_one_process_on_the_joined_batch(run, case):
    assert_train_as_one_process([rank[str(case)] for rank in run("four", 4)], case)


def test_the_comparison_tells_a_rank_that_trains_alone():
    case = Case("alone", "O1", "AdamW")
    model, called, optimizer = prepared(case)
    take_steps(case, model, called, optimizer, [0, 1, 3], 0, 4)
    with pytest.raises(AssertionError):
        assert_moved_alike(model.state_dict(), trained(case)["weights"], GatedNet().state_dict(), 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("case", SAVED)
def test_checkpoint_of_four_continues_on_four_bit_for_bit(run, case):
    four, again = run("four", 4), run("again", 4)
    straight = four[0][f"saved {case}"]
    for weights in (*(rank[f"saved {case}"] for rank in four), *(rank[case] for rank in again)):
        for when in ("then", "now"):
            assert all(torch.equal(weights[when][name], value) for name, value in straight[when].items())


@pytest.mark.slow
@pytest.mark.parametrize("case", ("O1", "O5"))
def test_checkpoint_of_four_continues_on_two_and_on_one(run, case):
    straight = run("four", 4)[0][f"saved {case}"]
    for rank in (*run("two", 2), *run("one", 1)):
        assert all(torch.equal(rank[case]["then"][name], value) for name, value in straight["then"].items())
        assert_moved_alike(rank[case]["now"], straight["now"], GatedNet().state_dict(), 0.02)
        with pytest.raises(AssertionError):  # it went on from there
            assert_moved_alike(rank[case]["now"], straight["then"], GatedNet().state_dict(), 0.1)


if __name__ == "__main__":
    as_one_of_two_ranks(work)
