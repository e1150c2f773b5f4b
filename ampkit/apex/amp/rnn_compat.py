"""``apex.amp.rnn_compat``: the core's tables cast recurrent layers, so nothing is patched here."""

from typing import Any

RNN_NAMES = ["rnn_relu", "rnn_tanh", "gru", "lstm"]


def has_old_rnns() -> bool:
    """Whether torch still has the recurrent layers of before 1.0."""
    return False


def whitelist_rnn_cells(handle: Any, verbose: bool) -> None:
    """Do nothing: the core's tables cast these cells."""
