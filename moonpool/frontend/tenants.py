"""Who is asking: API keys become tenants, and each tenant has a secret that keeps its KV apart from all others'.

    tenant secret = BLAKE2b(key=cluster secret, tenant name)

The cluster secret is made once and kept in the state folder, so a restart finds the same keys in the pool. Neither
secrets nor API keys appear in a log, an error or a repr; API keys are kept as keyed hashes only.

An admin key reads what all tenants did (status, records, the pool's blocks) and sends no prompts. Admin keys are in the
tenants file; one more is made on first use and kept in the state folder, for commands of the same user.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from moonpool.base.config import from_json
from moonpool.base.errors import ConfigError, Unauthorized
from moonpool.base.ranges import Weight

SECRET_NBYTES = 32
SECRET_FILE = "cluster.secret"
ADMIN_KEY_FILE = "admin.key"
DEFAULT_TENANT = "default"
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tenant:
    """`weight` is its share of a busy service, relative to those of other tenants."""

    name: str
    secret: bytes = field(repr=False)
    weight: float = 1.0


@dataclass(frozen=True)
class Reader:
    """Who reads status and records. `tenant` None: all rows; otherwise the rows of this tenant."""

    tenant: str | None


class TenantEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    api_keys: list[str] = []
    weight: Weight = 1.0

    def __repr__(self) -> str:
        return f"TenantEntry(name={self.name!r}, {len(self.api_keys)} keys)"


@dataclass(frozen=True)
class TenantsFile:
    """The configuration file: {"tenants": [{"name": "acme", "api_keys": ["..."], "weight": 2}], "admin_keys": ["..."]}.
    `weight` may be left out and is then 1."""

    tenants: list[TenantEntry]
    admin_keys: list[str] = field(default_factory=list, repr=False)


class Tenants:
    """Finds the tenant of an Authorization header. Without entries every request belongs to the default tenant."""

    def __init__(self, cluster_secret: bytes, entries: list[TenantEntry], admin_keys: Iterable[str] = ()) -> None:
        self._salt = secrets.token_bytes(SECRET_NBYTES)
        self._default = _tenant(cluster_secret, DEFAULT_TENANT) if not entries else None
        self._by_key: list[tuple[bytes, Tenant]] = []
        for entry in entries:
            tenant = _tenant(cluster_secret, entry.name, entry.weight)
            self._by_key += [(self._hash(key), tenant) for key in entry.api_keys]
        self._admin_keys = [self._hash(key) for key in admin_keys]

    def find_reader(self, authorization: str | None) -> Reader:
        """Return whose rows the header may read. Raise Unauthorized as find() does. The default tenant is the only one,
        so it reads everything."""
        if self._default is not None or self._is_admin(authorization):
            return Reader(None)
        return Reader(self.find(authorization).name)

    def _is_admin(self, authorization: str | None) -> bool:
        hashed = self._hash(_bearer(authorization))
        matches = [hmac.compare_digest(known, hashed) for known in self._admin_keys]  # always all of them
        return any(matches)

    def find(self, authorization: str | None) -> Tenant:
        """Return the tenant. Raise Unauthorized if keys are configured and the header has none of them."""
        if self._default is not None:
            return self._default
        key = _bearer(authorization)
        if not key:
            raise Unauthorized("no API key was given; send it as 'Authorization: Bearer KEY'")
        hashed, found = self._hash(key), None
        for known, tenant in self._by_key:  # always all of them, so that the time taken reveals nothing
            if hmac.compare_digest(known, hashed):
                found = tenant
        if found is None:
            raise Unauthorized("the API key is unknown")
        return found

    def _hash(self, key: str) -> bytes:
        return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), key=self._salt, digest_size=32).digest()


def _bearer(authorization: str | None) -> str:
    """Return the key in the header; empty if there is none."""
    scheme, _, key = (authorization or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def load_tenants(state_dir: Path, tenants_file: Path | None) -> Tenants:
    """Return the tenants. Raise ConfigError if the file is bad, or a secret can be neither read nor created."""
    content = TenantsFile([]) if tenants_file is None else _read_file(tenants_file)
    admin_keys = [*content.admin_keys, load_admin_key(state_dir)]
    return Tenants(load_cluster_secret(state_dir), content.tenants, admin_keys)


def load_cluster_secret(state_dir: Path) -> bytes:
    """Return the secret of this state folder, created on first use. Safe to call from several processes at once."""
    return _load_secret(state_dir / SECRET_FILE)


def load_admin_key(state_dir: Path) -> str:
    """Return the admin key of this state folder, created on first use, as load_cluster_secret()."""
    return _load_secret(state_dir / ADMIN_KEY_FILE).hex()


def _load_secret(path: Path) -> bytes:
    state_dir = path.parent
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _create_secret(path)
        if path.stat().st_mode & 0o077:
            _LOG.warning("%s can be read by others than its owner; chmod 600 it", path)
        secret = bytes.fromhex(path.read_text("ascii"))
    except OSError as error:
        raise ConfigError(f"cannot keep a secret in {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} does not hold a secret; restore it, or remove it to create a new one") from error
    if len(secret) != SECRET_NBYTES:
        raise ConfigError(f"{path} does not hold a secret of {SECRET_NBYTES} bytes")
    return secret


def _create_secret(path: Path) -> None:
    """Create the file atomically: write a temporary file (mode 0600), then link it. The first process to link wins."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(SECRET_NBYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.unlink(name)


def _read_file(path: Path) -> TenantsFile:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the tenants file {path}: {error.strerror or error}") from error
    try:
        content = from_json(TenantsFile, text)
    except ConfigError as error:
        raise ConfigError(f"tenants file {path}: {error}") from error
    _check(path, content)
    return content


def _check(path: Path, content: TenantsFile) -> None:
    entries = content.tenants
    names = [entry.name for entry in entries]
    keys = [*(key for entry in entries for key in entry.api_keys), *content.admin_keys]
    if not entries or not all(names):
        raise ConfigError(f"tenants file {path}: there must be at least one tenant, and each needs a name")
    if len(set(names)) != len(names):
        raise ConfigError(f"tenants file {path}: two tenants have the same name")
    if not all(keys) or len(set(keys)) != len(keys):
        raise ConfigError(f"tenants file {path}: an API key is empty or given twice")


def _tenant(cluster_secret: bytes, name: str, weight: float = 1.0) -> Tenant:
    digest = hashlib.blake2b(name.encode(), key=cluster_secret, digest_size=SECRET_NBYTES, person=b"moonpool-tenant")
    return Tenant(name, digest.digest(), weight)
