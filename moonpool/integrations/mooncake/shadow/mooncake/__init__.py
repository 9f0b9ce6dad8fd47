"""Stands where upstream's `mooncake` package would, for whoever put this folder on PYTHONPATH."""
