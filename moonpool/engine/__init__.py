"""Runs models on paged KV memory. Importing this package imports nothing else, in particular not torch."""
