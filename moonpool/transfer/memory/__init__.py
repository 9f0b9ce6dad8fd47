"""Memory that is moved: segments and their fence, callers' buffers, device memory, and where memory lies."""
