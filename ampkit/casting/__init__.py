"""The O1 engine: torch functions patched to cast their arguments."""
