"""The gate of the tests: what runs them, what judges their verdicts, and what takes processor time away from them.

docs/testing.md says how it works.
"""
