"""``apex.normalization``: layer norm and RMS norm."""

from .fused_layer_norm import FusedLayerNorm as FusedLayerNorm
from .fused_layer_norm import FusedRMSNorm as FusedRMSNorm
from .fused_layer_norm import MixedFusedLayerNorm as MixedFusedLayerNorm
from .fused_layer_norm import MixedFusedRMSNorm as MixedFusedRMSNorm
