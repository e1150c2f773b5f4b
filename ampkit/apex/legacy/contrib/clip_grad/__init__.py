"""``apex.contrib.clip_grad``: ``clip_grad_norm_`` is torch's, which works on lists of tensors too by now."""

from .clip_grad import clip_grad_norm_ as clip_grad_norm_
