"""``apex.amp.__version__``: the version of amp, apart from Apex's own."""

VERSION = (0, 1, 0)
__version__ = ".".join(map(str, VERSION))
