"""Triton kernels and their thin launchers; imported only where they run, never at start."""
