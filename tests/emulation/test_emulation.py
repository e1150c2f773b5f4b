"""The emulation itself: the faults that it must report, and that the tests beside it do run on it."""

import faulthandler
import os
import re
import signal

import pytest
import torch

from ampkit import kernels

pytestmark = pytest.mark.emulated

#: The kernels of broken.cu, and the message about each before the process ends.
BROKEN = {
    "barrier_missed": r"broken.cu:\d+: not all threads reach this barrier: thread 0 is here, thread 7 has ended",
    "two_barriers": r"broken.cu:\d+: not all threads reach this barrier: thread 0 is here, thread 32 is at a barrier",
    "shuffle_missed": r"broken.cu:\d+: not all threads reach this shuffle: thread 32 is here, thread 40 has ended",
    "shuffle_of_absent_lane": r"broken.cu:\d+: a shuffle reads lane \d+, which takes no part in it",
    "misaligned": r"broken.cu:\d+:\d+: runtime error: .* misaligned address",
    "out_of_bounds": r"broken.cu:\d+:\d+: runtime error: index 4 out of bounds",
    "shift": r"broken.cu:\d+:\d+: runtime error: shift exponent 32 is too large",
    "overflow": r"broken.cu:\d+:\d+: runtime error: signed integer overflow",
    "too_many_threads": r"an invalid launch: 1 blocks of 2048 threads",
    "unchecked": r"nothing has checked the launch before this one",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_ends_the_process_with_a_word(name, tmp_path):
    status, said = launch_in_a_fork(name, tmp_path / "stderr")
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGABRT, (status, said)
    assert re.search(BROKEN[name], said), said


def test_an_unknown_kernel_does_not_end_the_process(tmp_path):
    assert launch_in_a_fork("none", tmp_path / "stderr") == (0, "")


def launch_in_a_fork(name, log):
    """Launch a kernel of broken.cu in a fork; return the exit status and the printed text."""
    import ampkit_emulated

    child = os.fork()
    if child == 0:
        faulthandler.disable()
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
        os._exit(0 if ampkit_emulated.run_broken(name) is False else 1)
    _, status = os.waitpid(child, 0)
    return status, log.read_text()


def test_the_operators_launch_emulated_kernels():
    import ampkit_emulated

    before = ampkit_emulated.launches()
    x, out = [torch.ones(70_000)], [torch.empty(70_000)]
    kernels.multi_tensor_scale(x, out, 0.5)
    assert ampkit_emulated.launches() == before + 1 and out[0].eq(0.5).all()
    kernels.multi_tensor_l2norm(x)  # sums of blocks, and then of these
    assert ampkit_emulated.launches() == before + 3


def test_norms_do_not_hang_on_the_order_of_threads():
    """Equal bit for bit, since sums have the order of the elements, not the order in which threads arrive."""
    import ampkit_emulated

    tensors = [torch.randn(size) for size in (70_001, 5, 131_072)]
    results = []
    for seed in range(5):
        ampkit_emulated.seed(seed)
        norm, norms = kernels.multi_tensor_l2norm(tensors, per_tensor=True)
        results.append((norm.item(), *norms.tolist()))
    assert len(set(results)) == 1
