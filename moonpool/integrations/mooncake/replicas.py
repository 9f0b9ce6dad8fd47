"""Where the replicas of an object lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moonpool.integrations.mooncake.base_store import BaseStore
from moonpool.integrations.mooncake.pool import MooncakePool
from moonpool.integrations.mooncake.replica_descriptor import (
    Descriptor,
    DiskDescriptor,
    MemoryDescriptor,
    ReplicaDescriptor,
)
from moonpool.store.messages import ObjectInfo, Placement, Tier


class ReplicaMethods(BaseStore):
    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        """[] when it is not there."""
        return self.batch_get_replica_desc([key]).get(key, [])

    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[ReplicaDescriptor]]:
        """By key, leased; those that are not there are left out."""

        def places(pool: MooncakePool) -> dict[str, list[ReplicaDescriptor]]:
            infos, tiers = pool.places([self._key(key) for key in keys]), pool.tiers()
            return {key: _describe(info, tiers) for key, info in zip(keys, infos, strict=True) if info is not None}

        return self._ask("get_replica_desc", places, lambda _: {})


def _describe(info: ObjectInfo, tiers: Mapping[str, Tier]) -> list[ReplicaDescriptor]:
    return [ReplicaDescriptor(_placed(info.nbytes, replica, tiers)) for replica in info.replicas]


def _placed(nbytes: int, replica: Placement, tiers: Mapping[str, Tier]) -> MemoryDescriptor | DiskDescriptor:
    if tiers.get(replica.segment) is Tier.SSD:
        return DiskDescriptor(replica.segment, nbytes)
    return MemoryDescriptor(Descriptor(nbytes, replica.offset, replica.segment))
