"""A worker process: an engine on its own thread, a role (prefill or decode), an RPC face and its reports.

config      what a worker is told (no torch)
loop        the thread that owns the engine
prefill     computes prompts and hands their KV to decode workers
decode      keeps pages for prompts to come, and decodes
threads     how many CPU threads it computes with
reporter    tells the conductor what this worker holds and how busy it is
service     builds all of it and serves worker/messages.py
"""
