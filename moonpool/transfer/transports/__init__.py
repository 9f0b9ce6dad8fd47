"""The ways bytes can travel: base (the interface), memory, shm, tcp. One conformance suite covers them all."""
