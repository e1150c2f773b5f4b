"""Faults in FSDP2, in batch norm over processes and in the averages of gradients."""

from ..mutant import Mutant

FAULTS = [
    Mutant(
        "collectives: what is written to weights is not noted",
        "ampkit/models/collectives.py",
        "note_uncounted_write(written)",
        "pass",
        breaks="what a collective writes to a weight reaches its master",
        tests=("parallel/test_uncounted_writes.py::test_what_a_collective_writes_to_a_weight_reaches_its_master",),
    ),
    Mutant(
        "collectives: DDP leaves masters as they were",
        "ampkit/models/collectives.py",
        "entry.put(tensor, value)",
        "pass",
        breaks="DDP gives all ranks the float32 values of one",
        tests=("parallel/test_uncounted_writes.py::test_ddp_gives_all_ranks_the_float32_values_of_one",),
    ),
    Mutant(
        "optimizer wrapper: what an average brings in is not judged",
        "ampkit/iteration/findings.py",
        "if found and self._is_averaged_by_hand():",
        "if False:",
        breaks="gradients that stop being finite behind the block are not stepped with",
        tests=("parallel/test_process_group.py::test_nan_written_behind_the_block_skips_the_step_of_a_group_of_one",),
    ),
    Mutant(
        "fsdp2: each rank checks its own shard",
        "ampkit/iteration/loss_scaling.py",
        "highest(found.flag, dict.fromkeys(groups))",
        "pass",
        breaks="an inf in one shard skips on every rank",
        tests=(
            "parallel/test_fsdp2.py::test_sharded_training_equals_one_process_and_an_inf_in_one_shard_skips_on_every_rank",
        ),
    ),
    Mutant(
        "fsdp2: gradients are clipped by the norm of the shard",
        "ampkit/iteration/gradients.py",
        "total_over(groups, kernels.multi_tensor_l2norm(parts)[0].double().square())",
        "total_over((), kernels.multi_tensor_l2norm(parts)[0].double().square())",
        breaks="the norm is that of all shards",
        tests=(
            "parallel/test_fsdp2.py::test_sharded_training_equals_one_process_and_an_inf_in_one_shard_skips_on_every_rank",
        ),
    ),
    Mutant(
        "fsdp2: casts of gathered weights are kept",
        "ampkit/models/sharded.py",
        "casting.caches.forget(param)",
        "pass",
        breaks="a cast of a gathered weight does not outlive its group's forward",
        tests=("parallel/test_fsdp2.py::test_no_cast_of_a_gathered_weight_outlives_its_groups_forward",),
    ),
    Mutant(
        "gradient sync: predivision is not made up for",
        "ampkit/apex/parallel/gradient_sync.py",
        "values.mul_(settings.predivide / dist.get_world_size(bucket.group))",
        "values.mul_(1.0 / dist.get_world_size(bucket.group))",
        breaks="gradients are averages, whatever they are divided by before",
        tests=("parallel/test_gradient_sync.py::test_gradients_are_averaged_with_every_setting",),
    ),
    Mutant(
        "gradient sync: the last backward is not forgotten",
        "ampkit/apex/parallel/gradient_sync.py",
        "flags[i] = 0.0",
        "flags[i] = 1.0",
        breaks="parameters that no rank reached keep no gradient",
        tests=("parallel/test_gradient_sync.py",),
    ),
    Mutant(
        "sync batch norm: biased running variance",
        "ampkit/parallel.py",
        "unbiased = var * (count / (count - 1.0))",
        "unbiased = var",
        breaks="running variances are unbiased, over the joined batch",
        tests=("parallel/test_parallel.py::test_syncbn_equals_float64_batch_norm_over_the_joined_batch",),
    ),
    Mutant(
        "sync batch norm: converted layers train",
        "ampkit/parallel.py",
        "return twin.train(layer.training)",
        "return twin",
        breaks="a converted layer is in the mode of its original",
        tests=("parallel/test_parallel.py::test_convert_shares_tensors_and_leaves_other_norms",),
    ),
]
