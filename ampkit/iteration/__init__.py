"""An iteration from forward to step: blocks around backward passes, and the wrappers that `initialize` puts on optimizers."""
