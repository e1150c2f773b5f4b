"""``apex.contrib.optimizers.fp16_optimizer``: the class of ``apex.fp16_utils``."""

from ...fp16_utils import FP16_Optimizer as FP16_Optimizer
