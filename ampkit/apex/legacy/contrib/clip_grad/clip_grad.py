"""``apex.contrib.clip_grad.clip_grad``: the function, where scripts also import it from."""

from torch.nn.utils import clip_grad_norm_ as clip_grad_norm_
