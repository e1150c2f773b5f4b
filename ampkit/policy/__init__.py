"""Which torch function runs in which precision under O1, as data."""

from .policy import Policy as Policy
from .rules import CastKind as CastKind
from .rules import CastRule as CastRule
from .rules import RuleGroup as RuleGroup
from .rules import expand as expand
from .tables import TABLES as TABLES
from .tables import tables_for as tables_for
