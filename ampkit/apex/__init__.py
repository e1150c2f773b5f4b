"""The drop-in: modules under Apex's names for scripts that say ``from apex import amp``.

``ampkit.apex.install()`` makes them importable as ``apex``; ``python -m ampkit run script.py`` does it around a whole
script. The modules here hold names, forward, and translate; the implementation lives in the rooms of ampkit.

Modules that only scripts from before 2019 need lie in ``legacy/``. That folder is on this package's path: they are imported, and
pickled, as ``ampkit.apex.fp16_utils`` and the like.
"""

from .importing import install as install
from .importing import is_installed as is_installed
from .importing import uninstall as uninstall

__path__.append(f"{__path__[0]}/legacy")
