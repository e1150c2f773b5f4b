"""``apex.multi_tensor_apply.multi_tensor_apply``: ``multi_tensor_applier(op, noop_flag, tensor_lists, *args)``.

The ops are those of ``amp_C``; they are always there.
"""

from __future__ import annotations

from typing import Any


class MultiTensorApply:
    """A caller of ops of ``amp_C``, with the chunk size that they expect first."""

    available = True
    warned = False
    import_err: ImportError | None = None

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Raise RuntimeError where the ops cannot be used; ampkit's can."""
        if not MultiTensorApply.available:
            raise RuntimeError(
                f"multi_tensor_applier was switched off (available is False; {MultiTensorApply.import_err})."
            )

    def __call__(self, op: Any, noop_flag_buffer: Any, tensor_lists: Any, *args: Any) -> Any:
        self.check_avail()
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)
