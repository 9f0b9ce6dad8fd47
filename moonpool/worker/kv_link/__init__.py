"""Ties an engine's pages to the world: KV comes from the pool, and goes to the pool and to decode workers.

pieces         the bytes of one layer of one page, wherever the page lies
pull           pool -> pages, layer by layer, while the model computes
outbox         one thread that sends, hand-offs before everything else
pool_health    whether the pool is worth asking now
refusals       what the log says of peers that do not let this worker in
push           pages -> a decode worker's reserved pages, and -> the pool
reservations   the decode side of a hand-off: who may write which page until when
"""
