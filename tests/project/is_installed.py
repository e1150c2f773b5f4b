"""Whether Python imports ampkit and its libraries from this checkout, built after their sources: `make` builds them where not.

The arguments are the sources. The exit code is 0 where all is there, else 1, with the reason on standard output.
"""

import importlib
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def reason_to_build(sources: Iterable[Path], libraries: Sequence[Path], package: Path) -> str | None:
    """Return which library is missing or older than a source; None where all are built."""
    if package.resolve() != ROOT / "ampkit":
        return f"ampkit is imported from {package}"
    for library in libraries:
        newer = next((one for one in sources if one.stat().st_mtime > library.stat().st_mtime), None)
        if newer is not None:
            return f"{newer} is newer than {library.name}"
    return None


def main(arguments: list[str]) -> int:
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).resolve().parent]
    try:
        distribution("ampkit")
        import torch  # noqa: F401  (its libraries, which ampkit's are linked with)

        import ampkit

        modules = [importlib.import_module(f"ampkit.{name}") for name in ("_C", "_casting")]
    except (ImportError, PackageNotFoundError) as error:
        reason: str | None = f"{error}"
    else:
        libraries = [Path(module.__file__ or "") for module in modules]
        reason = reason_to_build([Path(name) for name in arguments], libraries, Path(ampkit.__file__).parent)
    print(f"ampkit is to be built: {reason}" if reason else "ampkit and its libraries are installed from this checkout")
    return int(reason is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
