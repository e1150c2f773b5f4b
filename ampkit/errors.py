"""Exception types of ampkit: one base, and a few that say where the fault lies.

Each also derives from the built-in exception that Apex or plain Python would have raised, so that scripts which catch
that one keep working.
"""


class AmpkitError(Exception):
    """Base of every exception that ampkit raises on its own account."""


class ConfigurationError(AmpkitError, RuntimeError, ValueError):
    """The error for settings, models or optimizers that contradict each other or what ampkit finds."""


class NotInitializedError(AmpkitError, RuntimeError):
    """The error for use without a session: before ``initialize``, or with an object that no session owns."""


class LossIdError(AmpkitError, IndexError, ValueError):
    """The error for a ``loss_id`` outside 0 to ``num_losses`` - 1."""


class CheckpointError(AmpkitError, RuntimeError, ValueError):
    """The error for a ``state_dict`` that does not fit; nothing of it was loaded."""


class ClosureError(AmpkitError, RuntimeError):
    """The error for ``optimizer.step(closure)`` together with a dynamic loss scale."""


class RefusedOperation(AmpkitError, NotImplementedError):
    """The error for a torch function that is unsafe in lower precision and gets a lower-precision tensor where calls are cast."""


class LossScaleError(AmpkitError, FloatingPointError):
    """The error for gradients that are not finite with the dynamic loss scale at its floor: training has diverged."""


class ExtensionError(AmpkitError, ImportError):
    """The error for compiled kernels that cannot be loaded although ``AMPKIT_EXTENSION=require`` is set."""
