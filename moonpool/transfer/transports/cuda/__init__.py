"""GPU memory: CUDA IPC on one machine, the driver's own API, no torch."""
