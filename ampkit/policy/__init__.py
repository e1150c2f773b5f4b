"""Which torch function runs in which precision under O1, as data."""

from ampkit.policy.rules import CastKind as CastKind
from ampkit.policy.rules import CastRule as CastRule
from ampkit.policy.rules import RuleGroup as RuleGroup
from ampkit.policy.rules import expand as expand
from ampkit.policy.tables import POLICIES as POLICIES
from ampkit.policy.tables import tables_for as tables_for
