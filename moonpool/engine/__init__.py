"""The engine: runs the model on paged KV memory. Importing this package imports nothing else, torch least of all."""
