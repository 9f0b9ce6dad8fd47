"""The simulator: replays traces on simulated machines, with the code that also runs in production."""
