"""A process's side of the pool: moves bytes to and from nodes itself, and asks the master only where they are."""

from moonpool.store.client.config import ClientConfig
from moonpool.store.client.put_batch import OPAQUE_PIECE_NBYTES
from moonpool.store.client.put_request import Put, PutRequest
from moonpool.store.client.views import ObjectView
from moonpool.store.messages import PutOptions

__all__ = ["OPAQUE_PIECE_NBYTES", "ClientConfig", "ObjectView", "Put", "PutOptions", "PutRequest"]
