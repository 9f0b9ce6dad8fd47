"""What every other package shares: errors, keys, formats, clock, units, config, frames and RPC, metrics, log.

Nothing here knows a model, a pool or a request; nothing here imports from the packages above.
"""
