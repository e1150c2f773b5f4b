"""The engine of casts: functions of torch, patched to cast their arguments."""
