"""`TaskCalls`: where the replicas of an object are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moonpool.integrations.mooncake.base_store import StoreBase
from moonpool.integrations.mooncake.segment_names import endpoint_of
from moonpool.integrations.mooncake.types import Descriptor, DiskDescriptor, MemoryDescriptor, ReplicaDescriptor
from moonpool.store import Store
from moonpool.store.messages import ObjectInfo, Placement, Tier


class TaskCalls(StoreBase):
    # where replicas are

    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        """Return the replicas of one object; [] when it does not exist."""
        return self.batch_get_replica_desc([key]).get(key, [])

    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[ReplicaDescriptor]]:
        """Return the replicas by key, and lease the objects. Keys that do not exist are left out."""

        def look_up(client: Store) -> dict[str, list[ReplicaDescriptor]]:
            infos = client.lookup([self._key(key) for key in keys])
            tiers = {each.name: each.tier for each in client.stats().segments}
            return {key: _describe(info, tiers) for key, info in zip(keys, infos, strict=True) if info is not None}

        return self._ask("get_replica_desc", look_up, lambda _: {})


def _describe(info: ObjectInfo, tiers: Mapping[str, Tier]) -> list[ReplicaDescriptor]:
    return [ReplicaDescriptor(_placed(info.nbytes, replica, tiers)) for replica in info.replicas]


def _placed(nbytes: int, replica: Placement, tiers: Mapping[str, Tier]) -> MemoryDescriptor | DiskDescriptor:
    if tiers.get(replica.segment) is Tier.SSD:
        return DiskDescriptor(replica.segment, nbytes)
    return MemoryDescriptor(Descriptor(nbytes, replica.offset, endpoint_of(replica.segment)))
