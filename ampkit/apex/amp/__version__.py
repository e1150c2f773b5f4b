"""``apex.amp.__version__``: the version that amp called itself, apart from Apex's own."""

VERSION = (0, 1, 0)
__version__ = ".".join(map(str, VERSION))
