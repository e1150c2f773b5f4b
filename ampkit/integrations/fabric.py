"""Lightning Fabric: ``Fabric(plugins=AmpkitFabricPrecision())``, and `ampkit.initialize` before ``fabric.setup``.

Works with ``lightning`` and with ``lightning_fabric``: import the one that you use before this module.
"""

from __future__ import annotations

from typing import Any

import torch

from ..api import master_params, scale_loss
from ..errors import NotInitializedError
from ..registry import current_session
from . import framework

Precision = framework("lightning.fabric", "lightning_fabric", install="lightning").plugins.Precision


class AmpkitFabricPrecision(Precision):
    """A Fabric precision plugin: ``fabric.backward(loss)`` is a `scale_loss` block over all optimizers of the newest session.

    Call ``ampkit.initialize(model, optimizer, ...)`` first, then ``fabric.setup(model, optimizer)``. ``clip_gradients``
    clips the gradients that the step uses. The loss scale is saved by ``ampkit.state_dict()``. ``backward`` raises
    `NotInitializedError` without a session.
    """

    precision = "32-true"  # Fabric itself casts nothing

    def backward(self, tensor: torch.Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        session = current_session()
        if session is None:
            raise NotInitializedError(
                "fabric.backward(loss) was called before ampkit.initialize(model, optimizer, ...), which comes before "
                "fabric.setup(model, optimizer)."
            )
        with scale_loss(tensor, session.optimizers) as scaled:
            super().backward(scaled, model, *args, **kwargs)

    def main_params(self, optimizer: Any) -> Any:
        return master_params(optimizer)
