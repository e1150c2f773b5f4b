"""From forward to step: what happens around every backward pass, and what `initialize` puts on an optimizer."""
