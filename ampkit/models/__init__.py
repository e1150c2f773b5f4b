"""What a session does to a model: cast its weights, keep norms float32, cast the inputs and outputs of its forward."""

from .exporting import exports as exports
from .forward import ForwardCasts as ForwardCasts
from .forward import cast_inputs as cast_inputs
from .forward import clearers as clearers
from .forward import install as install
from .forward import take_off_copies as take_off_copies
from .forward import uninstall as uninstall
from .forward import watchers as watchers
from .forward_scope import cast_submodules as cast_submodules
from .keep import AsTheyAre as AsTheyAre
from .keep import Kept as Kept
from .keep import bridge as bridge
from .keep import refuse_unmatched as refuse_unmatched
from .keep import unbridge as unbridge
from .operators import is_detector as is_detector
from .operators import operators as operators
from .operators import unwiden_targets as unwiden_targets
from .operators import widen_targets as widen_targets
from .weights import Float32Value as Float32Value
from .weights import bring_into_agreement as bring_into_agreement
from .weights import cast_weights as cast_weights
from .weights import lower_entries as lower_entries
from .weights import restore_weights as restore_weights
from .weights import settle_originals as settle_originals
