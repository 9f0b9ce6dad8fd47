"""The simulator: replays traces on simulated machines, with the code that also runs in production."""

MODEL, GPU, NUM_GPUS, NUM_NODES = "llama3-70b", "a800", 8, 16  # the default cluster
