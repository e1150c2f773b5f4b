"""The CPU kernels under ThreadSanitizer: threads that one call starts, and several threads that call at once."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mutants.run import copy_of_project

# Two threads write to the same outputs, without Python's lock: a race that must be reported.
SHARED_OUTPUTS = """
import threading, torch, ampkit
outputs, start = [torch.zeros(20_000)], threading.Barrier(2)
def scale():
    inputs = [torch.ones(20_000)]
    start.wait()
    for _ in range(50):
        torch.ops.ampkit.multi_tensor_scale(inputs, outputs, 0.5, None, None, None)
threads = [threading.Thread(target=scale) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
# glibc frees a thread's memory after the thread has left the sanitizer.
SUPPRESSED = "race:_dl_deallocate_tls\n"

pytestmark = [pytest.mark.slow, pytest.mark.cpu_kernels, pytest.mark.compiled("kernels")]


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    """A function that runs Python in a copy of the project with sanitized kernels; it returns the process and the reports."""
    sanitizer = subprocess.run(["g++", "-print-file-name=libtsan.so"], capture_output=True, text=True).stdout.strip()
    if not Path(sanitizer).is_absolute():
        pytest.skip("g++ has no ThreadSanitizer here")
    project = copy_of_project(tmp_path_factory.mktemp("sanitized") / "project")
    for library in (project / "ampkit").glob("*.so"):
        library.unlink()
    (project / "suppressed").write_text(SUPPRESSED)
    openmp = project / "libopenmp.so"
    command = ["g++", "-O1", "-fsanitize=thread", "-shared", "-fPIC", "tests/kernels/openmp.cpp", "-o", str(openmp)]
    subprocess.run(command, cwd=project, check=True)
    build = {
        **os.environ,
        "AMPKIT_BUILD_EXT": "1",
        "AMPKIT_CUDA": "0",
        "CFLAGS": "-fsanitize=thread",
        "LDFLAGS": "-fsanitize=thread",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # where ninja is
    }
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run(command, cwd=project, env=build, check=True, capture_output=True)

    def run(*arguments):
        for report in project.glob("report.*"):
            report.unlink()
        options = f"log_path={project}/report suppressions={project}/suppressed allocator_may_return_null=1 exitcode=0"
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(project),
            "AMPKIT_EXTENSION": "require",
            "OMP_NUM_THREADS": "4",
            "LD_PRELOAD": f"{sanitizer} {openmp}",
            "TSAN_OPTIONS": options,
        }
        # The sanitizer has a place in the address space of its own, which may be taken where addresses are random.
        command = [*(["setarch", "-R"] if shutil.which("setarch") else []), sys.executable, *arguments]
        done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)
        return done, "".join(report.read_text() for report in project.glob("report.*"))

    return run


def test_a_race_is_found(sanitized):
    done, report = sanitized("-c", SHARED_OUTPUTS)
    assert done.returncode == 0, done.stderr
    assert "data race" in report and "multi_tensor_scale" in report


def test_kernels_have_no_data_races(sanitized):
    files = sorted(path.name for path in Path(__file__).parent.glob("test_*.py") if path.name != Path(__file__).name)
    done, report = sanitized(
        "-m", "pytest", "-q", "-p", "no:xdist", "-m", "not slow", *(f"tests/kernels/{name}" for name in files)
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert report == ""
