"""A process's side of the pool: puts and gets that move bytes itself, and ask the master only where they lie."""

from moonpool.store.client.put_batch import OPAQUE_PIECE_NBYTES
from moonpool.store.client.store_client import ClientConfig, ObjectView, Put, PutOptions, PutRequest, StoreClient

__all__ = ["OPAQUE_PIECE_NBYTES", "ClientConfig", "ObjectView", "Put", "PutOptions", "PutRequest", "StoreClient"]
