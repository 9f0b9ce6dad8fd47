"""Triton kernels of the GPU engine. Imported only where a GPU computes; each has a torch reference in the tests."""
