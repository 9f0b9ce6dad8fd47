"""A worker process: an engine on its own thread, a role (prefill or decode), RPC handlers and reports.

config      configuration (no torch)
build       loads the model, allocates KV memory, measures a few runs
loop        the thread that owns the engine
watchdog    ends the process when that thread hangs
prefill     computes prompts and hands their KV to decode workers
decode      reserves pages for prompts, and decodes
kv_link/    moves KV between pages, the pool and other workers
metrics     samples for the conductor, times and counts for /metrics
reporter    reports cached blocks, load and samples to the conductor
service     builds all of this and serves messages.py
"""
