"""NIXL's Python package through a small typed window: the one place that imports it and maps its exceptions.

The package is optional (`pip install 'moonpool[nixl]'`) and needs neither torch nor CUDA. An agent listens for its
peers, moves bytes on a thread of its own, and lets everybody who holds its metadata at the memory registered with it;
closing it ends all three at once. Safe to use from several threads: NIXL's strict mode has one lock around everything.

NIXL cannot cancel: releasing a transfer that has not ended lets go of the handle while the bytes keep coming. So
nothing here does that, except close().
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np

from moonpool.base.errors import ConfigError, Internal, PeerLost, ProtocolError

BACKEND = "UCX"
_PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")  # the last one chooses between the others, and loads torch to do so
# One class per status, with no common base.
_LOST = ("RemoteDisconnect", "Backend", "NotFound", "Unknown", "Cancelled")
_NONSENSE = ("Mismatch", "InvalidParam")
_RDMA_DEVICES = Path("/sys/class/infiniband")


class NixlOp(Enum):
    READ = "READ"
    WRITE = "WRITE"


class Memory(NamedTuple):
    """Memory as NIXL names it. `kind` is DRAM, or VRAM of GPU number `device`."""

    address: int
    nbytes: int
    device: int = 0
    kind: Literal["DRAM", "VRAM"] = "DRAM"


def installed_package() -> str | None:
    """The name of the package to import; None when there is none."""
    return next((name for name in _PACKAGES if importlib.util.find_spec(name) is not None), None)


def check_installed() -> str:
    """As installed_package(); ConfigError, saying what to do, when there is none."""
    name = installed_package()
    if name is None:
        raise ConfigError("NIXL is not installed; pip install 'moonpool[nixl]'")
    return name


def available_backends() -> list[str]:
    """What the installed package has plug-ins for; ConfigError when there is none or it cannot be loaded."""
    backends: list[str] = _make_agent(_load(), "probe").get_plugin_list()
    return sorted(backends)


class Agent:
    """One of NIXL's agents over UCX; `loopback_only` keeps it off the network. Owns its threads and sockets, and
    borrows the memory registered with it until close().
    """

    def __init__(self, *, loopback_only: bool = False) -> None:
        package = _load()
        self._errors = _Errors(package)
        # Over cma a peer would reach into our memory by its address alone, even after this agent is closed; our own
        # shm does better between processes of one machine. UCX_TLS and UCX_NET_DEVICES overrule both settings.
        ucx = ["TLS=^cma", *(["NET_DEVICES=lo"] if loopback_only else [])]
        with self._errors.mapped("NIXL's agent does not start"):
            agent = _make_agent(package, f"moonpool-{uuid.uuid4().hex}")  # no two of a name, ever: peers tell by it
            agent.create_backend(BACKEND, {"engine_config": ",".join(ucx)})
        self._agent: Any = agent

    def register(self, memory: Memory) -> None:
        with self._errors.mapped("memory cannot be registered"):
            regions = [(memory.address, memory.nbytes, memory.device, "")]
            self._live().register_memory(regions, memory.kind, [BACKEND])

    def metadata(self) -> bytes:
        """What a peer's add_peer() takes: how to connect, and the keys to all memory registered so far."""
        with self._errors.mapped("NIXL gives no metadata"):
            packed: bytes = self._live().get_agent_metadata()
            return packed

    def add_peer(self, metadata: bytes) -> str:
        with self._errors.mapped("the owner's agent cannot be reached"):
            name = self._live().add_remote_agent(metadata)
            return name.decode() if isinstance(name, bytes) else str(name)

    def remove_peer(self, name: str) -> None:
        """Not while a transfer with it is under way: NIXL would free the keys in use."""
        with self._errors.mapped("the owner's agent cannot be removed"):
            self._live().remove_remote_agent(name)

    def start(self, op: NixlOp, local: Sequence[Memory], remote: Sequence[Memory], peer: str) -> Transfer:
        """Begins to move local[i] from or to remote[i], for all i. All of one side are of one kind of memory."""
        agent = self._live()
        with self._errors.mapped("the transfer cannot start"):
            handle = agent.initialize_xfer(op.value, _descriptors(agent, local), _descriptors(agent, remote), peer)
        return Transfer(agent, handle, self._errors)

    def close(self) -> None:
        """Idempotent. Frees everything once the last transfer is released and the last call has returned."""
        self._agent = None

    def _live(self) -> Any:
        agent = self._agent
        if agent is None:
            raise PeerLost("this NIXL agent is closed")
        return agent


class Transfer:
    """One transfer under way. For one thread at a time."""

    def __init__(self, agent: Any, handle: Any, errors: _Errors) -> None:
        self._agent = agent
        self._handle = handle
        self._errors = errors
        self._state = "PROC"
        try:
            with errors.mapped("the transfer did not start"):
                self._state = agent.transfer(handle)
        except BaseException:
            self.release()
            raise

    def ended(self) -> bool:
        """PeerLost when it failed; then it has ended, too. A write has ended when the owner's memory holds it."""
        if self._state == "PROC":
            with self._errors.mapped("the transfer broke off"):
                self._state = "ERR"
                self._state = self._agent.check_xfer_state(self._handle)
        if self._state == "ERR":
            raise PeerLost("the transfer broke off")
        return bool(self._state == "DONE")

    def release(self) -> None:
        """Idempotent. Only after it has ended, or right before its agent is closed."""
        agent, handle, self._agent, self._handle = self._agent, self._handle, None, None
        if handle is not None:
            with self._errors.mapped("the transfer cannot be released"):
                agent.release_xfer_handle(handle)


class _Errors:
    """NIXL's exceptions, in our words."""

    def __init__(self, package: ModuleType) -> None:
        bindings = importlib.import_module(f"{package.__name__}._bindings")
        found = {name: kind for name, kind in vars(bindings).items() if name.endswith("Error")}
        self._all = tuple(found.values())
        self._lost = tuple(found[f"nixl{name}Error"] for name in _LOST if f"nixl{name}Error" in found)
        self._nonsense = tuple(found[f"nixl{name}Error"] for name in _NONSENSE if f"nixl{name}Error" in found)

    @contextmanager
    def mapped(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._lost as error:
            raise PeerLost(f"{what}: {error}") from error
        except self._nonsense as error:
            raise ProtocolError(f"{what}: {error}") from error
        except self._all as error:
            raise Internal(f"{what}: {error}") from error


def _load() -> ModuleType:
    """Imports the package, as quiet as a library should be. What the environment says already is left alone."""
    name = check_installed()
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # a lost peer is an error of ours, not a line on the terminal
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    if not _RDMA_DEVICES.is_dir() or not any(_RDMA_DEVICES.iterdir()):
        # Loaded beside the system's own verbs library, UCX's module makes the process crash when it exits.
        os.environ.setdefault("UCX_MODULES", "^ib")
    raise_exceptions = logging.raiseExceptions
    try:
        package = importlib.import_module(name)
        logger = logging.getLogger("nixl")  # it takes standard output for itself
        logger.handlers.clear()
        logger.propagate = True
    except (ImportError, OSError) as error:
        raise ConfigError(f"{name} is installed and cannot be loaded: {error}") from error
    finally:
        logging.raiseExceptions = raise_exceptions
    return package


def _make_agent(package: ModuleType, name: str) -> Any:
    strict = package.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    try:
        return package.nixl_agent(name, package.nixl_agent_config(backends=[], sync_mode=strict))
    except RuntimeError as error:  # it finds no plug-ins at all
        raise ConfigError(f"{package.__name__} is installed and does not work: {error}") from error


def _descriptors(agent: Any, spans: Sequence[Memory]) -> Any:
    rows = np.array([span[:3] for span in spans], dtype=np.uint64)
    return agent.get_xfer_descs(rows, spans[0].kind)
