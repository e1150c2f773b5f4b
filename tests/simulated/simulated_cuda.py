"""torch's operators and ampkit's kernels on the simulated devices of README.md: for pytest (``-p simulated_cuda``) and scripts."""

import importlib.abc
import importlib.util
import sys
from pathlib import Path

import torch

BUILT = Path(__file__).resolve().parents[2] / "build" / "simulated"


class _Kernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder that imports the kernels compiled for the host as ``ampkit._cuda``."""

    def find_spec(self, name, path, target=None):
        return importlib.util.spec_from_loader(name, self) if name == "ampkit._cuda" else None

    def create_module(self, spec):
        library = BUILT / "kernels" / "ampkit_emulated.abi3.so"
        found = importlib.util.spec_from_file_location("ampkit_emulated", library)
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        return module.kernels

    def exec_module(self, module):
        pass


def install():
    """Raise unless the process was started with LD_PRELOAD=build/simulated/libruntime.so."""
    if torch.cuda.device_count() != 2:
        raise RuntimeError("the simulated devices are not there: see tests/simulated/README.md")
    torch.ops.load_library(str(BUILT / "liboperators.so"))
    # Libraries of NVIDIA's, which compute on real devices only.
    torch.backends.cudnn.enabled = False
    for library in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{library}_sdp")(False)

    sys.meta_path.insert(0, _Kernels())


install()
