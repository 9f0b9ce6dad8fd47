"""Memory that is moved: segments and their fence, callers' buffers, device memory, and spans of all of these."""
