"""Exception types of ampkit: one base, and a few that say where the fault lies.

Each also derives from the built-in exception that Apex or plain Python would have raised, so that scripts which catch
that one keep working.
"""


class AmpkitError(Exception):
    """Base of every exception that ampkit raises on its own account."""


class ConfigurationError(AmpkitError, RuntimeError, ValueError):
    """Settings, models or optimizers given to ``initialize`` contradict each other or what was found."""


class NotInitializedError(AmpkitError, RuntimeError):
    """Something that needs a session was used before ``initialize``, or with an object no session owns."""


class LossIdError(AmpkitError, IndexError, ValueError):
    """A ``loss_id`` outside 0 to ``num_losses`` - 1."""


class CheckpointError(AmpkitError, RuntimeError, ValueError):
    """A ``state_dict`` that does not fit; nothing of it was loaded."""


class ClosureError(AmpkitError, RuntimeError):
    """``optimizer.step(closure)`` together with a dynamic loss scale."""


class RefusedOperation(AmpkitError, NotImplementedError):
    """A torch function that is unsafe in lower precision was called with a lower-precision tensor where calls are cast."""


class LossScaleError(AmpkitError, FloatingPointError):
    """The dynamic loss scale sits at its floor and the gradients still are not finite: training has diverged."""


class ExtensionError(AmpkitError, ImportError):
    """``AMPKIT_EXTENSION=require`` was set and the compiled kernels could not be loaded."""
