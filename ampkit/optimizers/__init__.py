"""The fused optimizers, and LARC around any."""

from .fused_adagrad import FusedAdagrad as FusedAdagrad
from .fused_adam import FusedAdam as FusedAdam
from .fused_lamb import FusedLAMB as FusedLAMB
from .fused_lamb import FusedMixedPrecisionLamb as FusedMixedPrecisionLamb
from .fused_lars import FusedLARS as FusedLARS
from .fused_novograd import FusedNovoGrad as FusedNovoGrad
from .fused_sgd import FusedSGD as FusedSGD
from .larc import LARC as LARC
