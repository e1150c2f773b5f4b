"""``apex.optimizers.fp16_optimizer``: the class of ``apex.fp16_utils``, which was here before it went to ``apex.contrib``."""

from ..fp16_utils import FP16_Optimizer as FP16_Optimizer
