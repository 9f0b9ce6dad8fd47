"""The plug-in's settings, which LMCache passes as `adapter_params`, and the keys that follow from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moonpool.base.errors import ConfigError

_PREFIX = "lmcache"


@dataclass(frozen=True, kw_only=True)
class LmcacheSettings:
    """`namespace` separates deployments that must not read each other's KV. LMCache's keys name the model, the rank and
    the tokens, but neither the data type nor the model's revision.
    """

    master: str = ""  # default: MOONPOOL_MASTER, else the one service on this machine
    namespace: str = "default"
    num_replicas: int = 1  # of each chunk, on distinct nodes first
    num_loaders: int = 2  # threads that read chunks; look-ups and stores have one thread each
    max_requests: int = 1024  # waiting look-ups, and as many loads and as many stores; more are refused at once
    max_store_nbytes: int = 1 << 30  # of chunks that wait to be stored; more are refused at once
    silence_s: float = 0.2  # a node that sends nothing for this long during a load is given up
    store_timeout_s: float = 2.0  # of one write to a node
    shm: bool = True  # read and write memory of this machine directly; False: always by tcp
    counters_file: str = ""  # JSON file with the counters, rewritten after changes
    secret_file: str | None = None  # these four default to MOONPOOL_SECRET_FILE and MOONPOOL_TLS_*_FILE
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    tls_ca_file: str | None = None

    def __post_init__(self) -> None:
        if not self.namespace or "/" in self.namespace:
            raise ConfigError(f"{self.namespace!r} is no namespace; write letters without a slash", param="namespace")
        for name in ("num_replicas", "num_loaders", "max_requests", "max_store_nbytes", "silence_s", "store_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0", param=name)

    def pool_keys(self, keys: Iterable[str]) -> list[bytes]:
        """Return the pool's keys for LMCache's: no two of LMCache's, and no two namespaces, share one."""
        prefix = f"{_PREFIX}/{self.namespace}/".encode()
        return [prefix + key.encode("utf-8", "surrogatepass") for key in keys]
