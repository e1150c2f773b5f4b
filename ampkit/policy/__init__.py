"""The precision of each torch function where calls are cast, as data."""

from .cast_rules import CastKind as CastKind
from .cast_rules import CastRule as CastRule
from .cast_rules import RuleGroup as RuleGroup
from .cast_rules import expand as expand
from .policy import Policy as Policy
from .tables import TABLES as TABLES
