"""Eviction policies, by name. benchmarks/eviction.py compares them; the default is the best there."""

from __future__ import annotations

from collections.abc import Callable

from moonpool.base.errors import ConfigError
from moonpool.master.policies.base import EvictionPolicy
from moonpool.master.policies.prefix import PrefixAware
from moonpool.master.policies.s3fifo import S3Fifo
from moonpool.master.policies.sweep import LeastRecentlyUsed

__all__ = ["POLICIES", "EvictionPolicy", "LeastRecentlyUsed", "PrefixAware", "S3Fifo", "make_policy"]

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": LeastRecentlyUsed,
    "s3fifo": S3Fifo,
    "prefix": PrefixAware,
}


def make_policy(name: str) -> EvictionPolicy:
    """Raise ConfigError if there is no such policy."""
    if name not in POLICIES:
        raise ConfigError(f"no eviction policy {name!r}; there are {', '.join(POLICIES)}", param="eviction")
    return POLICIES[name]()
