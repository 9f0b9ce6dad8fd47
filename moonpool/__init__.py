"""Moonpool: KVCache-centric LLM serving. Importing this package imports no torch and starts nothing."""

__version__ = "0.1.0"
