"""Optimizers: what a session does to one (masters, gradients, a step that can be skipped), and the fused ones."""

from .adapter import OptimizerAdapter as OptimizerAdapter
from .adapter import adapter_of as adapter_of
from .fused_adagrad import FusedAdagrad as FusedAdagrad
from .fused_adam import FusedAdam as FusedAdam
from .fused_lamb import FusedLAMB as FusedLAMB
from .fused_lamb import FusedMixedPrecisionLamb as FusedMixedPrecisionLamb
from .fused_lars import FusedLARS as FusedLARS
from .fused_novograd import FusedNovoGrad as FusedNovoGrad
from .fused_sgd import FusedSGD as FusedSGD
from .gradients import LISTS_OF_A_COLLECTION as LISTS_OF_A_COLLECTION
from .gradients import Gradients as Gradients
from .larc import LARC as LARC
from .master import Slot as Slot
from .scales import Scale as Scale
from .scales import on as on
