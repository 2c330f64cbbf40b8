"""Triton kernels, each beside the torch reference that defines its result. They know nothing of methods."""
