"""``apex.optimizers``: the optimizers of ``ampkit.optimizers``, with checkpoints in Apex's layout.

These also load checkpoints of torch.optim.
"""

from .fp16_optimizer import FP16_Optimizer as FP16_Optimizer
from .fused_adagrad import FusedAdagrad as FusedAdagrad
from .fused_adam import FusedAdam as FusedAdam
from .fused_lamb import FusedLAMB as FusedLAMB
from .fused_lars import FusedLARS as FusedLARS
from .fused_mixed_precision_lamb import FusedMixedPrecisionLamb as FusedMixedPrecisionLamb
from .fused_novograd import FusedNovoGrad as FusedNovoGrad
from .fused_sgd import FusedSGD as FusedSGD
