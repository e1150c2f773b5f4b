"""The multi-tensor operators, in plain torch and by compiled kernels; backend.py loads these."""

from ampkit.kernels.backend import Implementation as Implementation
from ampkit.kernels.backend import implementation as implementation
from ampkit.kernels.reference import NO_BAD as NO_BAD
from ampkit.kernels.reference import joined as joined
from ampkit.kernels.reference import multi_tensor_axpby as multi_tensor_axpby
from ampkit.kernels.reference import multi_tensor_join as multi_tensor_join
from ampkit.kernels.reference import multi_tensor_l2norm as multi_tensor_l2norm
from ampkit.kernels.reference import multi_tensor_scale as multi_tensor_scale
from ampkit.kernels.reference import multi_tensor_split as multi_tensor_split
from ampkit.kernels.reference import multi_tensor_unscale_l2norm as multi_tensor_unscale_l2norm
from ampkit.kernels.reference import parted as parted
from ampkit.kernels.reference import update_scale as update_scale
from ampkit.kernels.reference_optimizers import clip_coefficient as clip_coefficient
from ampkit.kernels.reference_optimizers import multi_tensor_adam as multi_tensor_adam
from ampkit.kernels.reference_optimizers import multi_tensor_sgd as multi_tensor_sgd
from ampkit.kernels.split import join as join
from ampkit.kernels.split import split as split
