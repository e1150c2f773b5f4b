"""Scripts run as ``__main__``: unedited, with CUDA calls on the CPU where asked."""
