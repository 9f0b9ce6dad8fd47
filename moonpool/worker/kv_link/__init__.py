"""Moves KV between an engine's pages, the pool and decode workers.

pieces         the bytes of one layer of one page, in host or (device_pieces) GPU memory
pull_job       one pull as the engine sees it, and its blocks as the store has them
pull           pool -> pages, layer by layer, while the model computes
device_pull    pool -> pages of a GPU, which copies and verifies by itself
push           pages -> a decode worker's reserved pages, and -> the pool
send_queue     the threads that send, hand-offs before puts
device_probe   how fast the pool is for a GPU
pool           whether the pool is worth asking, how fast it is, and pages -> pool
reservations   the decode side of a hand-off: who may write which page until when
"""
