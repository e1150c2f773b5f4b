"""Builds the optional libraries: the kernels ampkit/_C (CPU) and ampkit/_cuda, and O1's wrappers ampkit/_casting.

The kernels serve every torch from 2.10 on, ampkit/_casting the torch it is built with; pyproject.toml has the rest.

AMPKIT_BUILD_EXT  auto (default)  build what can be built, and report what was not
                  0               pure Python
                  1               a failure is an error
AMPKIT_CUDA       1               build ampkit/_cuda; a failure is an error
                  0               do not
                  unset           build it if CUDA_HOME is set, with or without a GPU

torch must be importable, which means ``pip install --no-build-isolation .``
"""

import os
import sys
import threading
import time
from pathlib import Path

from setuptools import setup

TARGET_TORCH = "0x020a000000000000"  # 2.10, the oldest torch whose stable ABI suffices for csrc/
OLDEST_PYTHON = "cp311"  # of requires-python in pyproject.toml
DEFAULT_CUDA_ARCHITECTURES = "7.5;8.0;9.0+PTX"


def main():
    mode = read_switch("AMPKIT_BUILD_EXT", ("auto", "0", "1"), default="auto")
    cuda_mode = read_switch("AMPKIT_CUDA", ("", "0", "1"), default="")
    if mode == "0":
        announce("AMPKIT_BUILD_EXT=0: installing ampkit as pure Python, without its compiled kernels.")
        return setup()
    try:
        from torch.utils import cpp_extension
    except ImportError as error:
        if mode == "1" or cuda_mode == "1":
            raise SystemExit(
                f"ampkit: the extension was asked for, and torch cannot be imported here ({error}). "
                "Install torch first, then: pip install --no-build-isolation ."
            ) from error
        announce(
            f"torch is not visible to this build ({error}): installing ampkit as pure Python.",
            "Every feature works, slower. For the compiled kernels: pip install --no-build-isolation .",
        )
        return setup()
    wants_cuda = cuda_mode == "1" or (cuda_mode == "" and bool(os.environ.get("CUDA_HOME")))
    required = {
        "ampkit._C": mode == "1" or cuda_mode == "1",
        "ampkit._cuda": cuda_mode == "1",
        "ampkit._casting": mode == "1",
    }
    extensions = [cpu_extension(cpp_extension), casting_extension(cpp_extension)]
    setup(
        ext_modules=extensions + ([cuda_extension(cpp_extension)] if wants_cuda else []),
        cmdclass={"build_ext": build_command(cpp_extension, required)},
        # The kernels are for this Python and newer ones. ampkit/_casting is for this Python and this torch; others ignore the
        # file: ampkit-0.1.0-2.11.0-cp311-abi3-linux_x86_64.whl
        options={"bdist_wheel": {"build_number": torch_release(), "py_limited_api": OLDEST_PYTHON}},
    )


def read_switch(name, allowed, default):
    value = os.environ.get(name, default)
    if value not in allowed:
        raise SystemExit(f"ampkit: {name}={value!r}; expected one of {', '.join(v or '(unset)' for v in allowed)}")
    return value


def announce(*lines):
    """A box on standard error, since pip hides what goes to standard output."""
    width = max(map(len, lines))
    bar = "+" + "-" * (width + 2) + "+"
    print("", bar, *(f"| {line:<{width}} |" for line in lines), bar, "", sep="\n", file=sys.stderr, flush=True)


CXX_FLAGS = [
    f"-DTORCH_TARGET_VERSION={TARGET_TORCH}",
    "-std=c++17",
    "-O3",
    "-fvisibility=hidden",
    # Let loops vectorise: nobody reads errno or floating point traps. The compiler must not fuse multiply-adds, so
    # that results do not depend on the instruction set (see functors/multi_tensor_axpby.h).
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),  # gcc's own intrinsics cause them
    "-Wno-psabi",  # vectors are passed to inlined functions only
    "-g0",
]
NVCC_FLAGS = [f"-DTORCH_TARGET_VERSION={TARGET_TORCH}", "-DUSE_CUDA", "-std=c++17", "-O3", "-fmad=false", "--threads=2"]


def cpu_extension(cpp_extension):
    return cpp_extension.CppExtension(
        "ampkit._C",
        ["csrc/registration.cpp", *sources("csrc/cpu", "*.cpp")],
        include_dirs=[str(Path("csrc").resolve())],
        depends=[*sources("csrc/cpu", "*.h"), *shared_headers()],
        extra_compile_args={"cxx": CXX_FLAGS},
        py_limited_api=True,
    )


def cuda_extension(cpp_extension):
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", DEFAULT_CUDA_ARCHITECTURES)
    return cpp_extension.CUDAExtension(
        "ampkit._cuda",
        ["csrc/cuda/registration.cpp", *sources("csrc/cuda", "*.cu")],
        include_dirs=[str(Path("csrc").resolve())],
        depends=[*sources("csrc/cuda", "*.cuh"), *sources("csrc/moments", "*.cuh"), *shared_headers()],
        extra_compile_args={"cxx": [*CXX_FLAGS, "-DUSE_CUDA"], "nvcc": NVCC_FLAGS},
        py_limited_api=True,
    )


def torch_release():
    """2.11.0 of 2.11.0+cu130: a wheel's build tag."""
    import torch

    return torch.__version__.partition("+")[0]


def casting_extension(cpp_extension):
    import torch

    return cpp_extension.CppExtension(
        "ampkit._casting",
        ["csrc/casting/all.cpp"],
        depends=[*sources("csrc/casting", "*"), "csrc/tensor_access.h"],
        define_macros=[("AMPKIT_BUILT_WITH_TORCH", f'"{torch.__version__}"')],
        extra_compile_args={"cxx": ["-std=c++20", "-O3", "-fvisibility=hidden", "-g0"]},
    )


def shared_headers():
    return [header for folder in ("csrc", "csrc/functors", "csrc/moments") for header in sources(folder, "*.h")]


def sources(folder, pattern):
    return sorted(str(path) for path in Path(folder).glob(pattern))


class Progress:
    """``with Progress(extension, folder):`` prints a line for each object file that a compiler writes below ``folder``.

    The lines go to the terminal, where there is one: pip shows the output of a build only with -v, or after a failure.
    """

    def __init__(self, extension, folder):
        self.name, self.folder, self.start = extension.name, Path(folder), time.time()
        self.waiting = {Path(source).with_suffix(".o").name: source for source in extension.sources}
        self.total, self.done = len(self.waiting), threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)

    def __enter__(self):
        try:
            self.terminal = open("/dev/tty", "w")
        except OSError:
            self.terminal = sys.stderr
        self.say(f"compiling {self.total} file{'s' * (self.total > 1)} with {os.cpu_count()} cores")
        self.thread.start()

    def __exit__(self, *_):
        self.done.set()
        self.thread.join()
        if self.terminal is not sys.stderr:
            self.terminal.close()

    def watch(self):
        while not self.done.wait(0.5):
            self.look()
        self.look()

    def look(self):
        for path in self.folder.rglob("*.o"):
            if path.name in self.waiting and path.stat().st_mtime >= self.start:
                source = self.waiting.pop(path.name)
                self.say(
                    f"{self.total - len(self.waiting)} of {self.total}: {source}, {time.time() - self.start:.0f} s"
                )

    def say(self, line):
        print(f"{self.name}: {line}", file=self.terminal, flush=True)


def build_command(cpp_extension, required):
    class BuildWhatCanBeBuilt(cpp_extension.BuildExtension):
        """BuildExtension that leaves out an optional library that fails, and says what became of each."""

        def build_extensions(self):
            built = []
            for extension in list(self.extensions):
                self.extensions = [extension]
                try:
                    with Progress(extension, self.build_temp):
                        super().build_extensions()
                except Exception as error:
                    if required[extension.name]:
                        raise
                    announce(
                        f"{extension.name} could not be built: {type(error).__name__}; the compiler's words are above.",
                        f"({str(error).strip().splitlines()[-1][:200] if str(error).strip() else 'no message'})",
                        "ampkit works without it, slower. AMPKIT_BUILD_EXT=1 turns this into an error.",
                    )
                else:
                    built.append(extension)
            self.extensions = built
            if built:
                announce(f"Built {', '.join(extension.name for extension in built)}.")

    return BuildWhatCanBeBuilt


main()
