"""``apex.contrib.clip_grad.clip_grad``: the function, under the name by which scripts also import it."""

from torch.nn.utils import clip_grad_norm_ as clip_grad_norm_
