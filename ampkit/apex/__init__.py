"""The drop-in: modules under Apex's names for scripts that say ``from apex import amp``.

``ampkit.apex.install()`` makes them importable as ``apex``; ``python -m ampkit run script.py`` does it around a whole
script. The modules here hold names, forward, and translate; what they forward to lives in the rooms of ampkit.
"""

from .importing import install as install
from .importing import is_installed as is_installed
from .importing import uninstall as uninstall
