"""Replays the world: traces, physics and the simulated cluster, on the cores that also run live."""
