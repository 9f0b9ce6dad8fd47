"""The front end as a role: binds its port, loads the tokenizer, then serves until it is closed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import resource
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from moonpool.base.address import Address, parse_address
from moonpool.base.cluster import FRONTEND_SERVICE
from moonpool.base.errors import ConfigError, Internal
from moonpool.base.metrics import GetMetrics
from moonpool.base.rpc import Call, RpcPeer, RpcServer
from moonpool.conductor.retries import RetryPolicy
from moonpool.engine.model_fetch import DEFAULT_MODEL
from moonpool.frontend.app import make_app
from moonpool.frontend.connection import ConnectionLimits
from moonpool.frontend.metrics import FrontendMetrics
from moonpool.frontend.preparing import Preparer, load_call
from moonpool.frontend.prompts import ServedModel, load_model
from moonpool.frontend.protocol import GuardedProtocol
from moonpool.frontend.request_handler import RequestHandler
from moonpool.frontend.status import StatusCollector
from moonpool.frontend.tenants import load_tenants
from moonpool.frontend.tour import add_tour
from moonpool.frontend.tracing import Tracing, make_tracing
from moonpool.frontend.workers import Connections

# Time in which running requests may finish when the front end is closed.
GRACE_S = 1.0
_BACKLOG = 2048
_TICKS_PER_SWEEP = 5  # uvicorn ticks every 0.1 s
_SPARE_FILES = 128  # descriptors for everything that is not a client's connection


@dataclass(frozen=True)
class FrontendConfig:
    conductor_address: str  # address of the conductor; of several, separated by commas: the next one if one is away
    state_dir: str  # folder for secrets and other files that must survive a restart
    master_address: str | None = None  # address of the pool's master, to show its metrics; default: not shown
    model: str = DEFAULT_MODEL  # a name from `moonpool model list`, a Hugging Face folder or a .gguf file
    model_name: str | None = None  # model name shown to clients; default: the model's own name
    listen: str = "tcp:127.0.0.1:8000"  # address of the OpenAI API; port 0: any free port
    host: str | None = field(default=None, metadata={"hidden": True})  # with `port`: the older form of `listen`
    port: int | None = field(default=None, metadata={"hidden": True})
    name: str = "frontend"  # name in logs and metrics; unique if there are several front ends
    expected_workers: tuple[str, ...] = ()  # worker that /health reports when it is missing; may be repeated
    expected_nodes: tuple[str, ...] = ()  # node that /health reports when it is missing; may be repeated
    # NAME=ADDRESS of each front end that listens at the same port, this one included; ADDRESS is where the others ask
    # for its metrics; may be repeated; default: this one has the port alone
    siblings: tuple[str, ...] = ()
    tour_dir: str | None = None  # run directory of the launcher whose tour the live page offers; default: no tour
    tenants_file: str | None = None  # JSON file of tenants and their API keys; default: one tenant, no API key needed
    max_model_len: int | None = None  # longest prompt plus answer in tokens; default: the model's limit
    request_timeout_s: float = 600.0  # seconds after which a request fails
    max_attempts: int = RetryPolicy.max_attempts  # attempts per request, not counting those whose worker died
    worker_wait_s: float = RetryPolicy.worker_wait_s  # seconds a request waits for lost workers to come back
    max_body_nbytes: int | None = None  # largest request body; default: enough for the longest prompt
    prompt_process: bool = True  # tokenize long prompts in a separate process, so that they do not delay streams
    max_connections: int = ConnectionLimits.max_connections  # most client connections at the same time
    access_log: bool = False  # log one line per request
    # OpenTelemetry collector (OTLP over HTTP) that gets one trace per request, for example http://127.0.0.1:4318; needs
    # moonpool[otel]; default: no traces
    otlp: str | None = None

    def __post_init__(self) -> None:
        if self.siblings and self.name not in self.sibling_addresses:
            raise ConfigError(f"--siblings must name this front end too: {self.name}=ADDRESS", param="siblings")
        if not 0 <= self.http_address.port < 65536:
            raise ConfigError(f"{self.port} is not a port", param="port")
        if self.http_address.scheme != "tcp":
            raise ConfigError("HTTP is served at an address like tcp:127.0.0.1:8000", param="listen")
        for name in ("max_model_len", "request_timeout_s", "max_attempts", "max_body_nbytes", "max_connections"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be above 0", param=name)

    @property
    def sibling_addresses(self) -> dict[str, str]:
        """The addresses in `siblings` by name. Raises ConfigError for one without a name or a valid address."""
        pairs = [each.partition("=") for each in self.siblings]
        for name, _, address in pairs:
            if not name or not address:
                raise ConfigError("a sibling is written NAME=ADDRESS", param="siblings")
            parse_address(address)
        return {name: address for name, _, address in pairs}

    @property
    def http_address(self) -> Address:
        """`listen`, with `host` and `port` replaced where they are set. Raises ConfigError for a bad address."""
        address = parse_address(self.listen)
        host = address.host if self.host is None else self.host
        return Address(address.scheme, address.path, host, address.port if self.port is None else self.port)


def _number_of(config: FrontendConfig) -> int:
    """Return this front end's number among those of its port, so that they begin with different conductors."""
    names = sorted(config.sibling_addresses)
    return names.index(config.name) if names else 0


class Frontend:
    """A base.process.Service. `start` returns the URL."""

    def __init__(
        self,
        config: FrontendConfig,
        load: Callable[[FrontendConfig], ServedModel] | None = None,
        limits: ConnectionLimits | None = None,
    ) -> None:
        self.config = config
        self._load = load or load_model
        self._limits = limits or ConnectionLimits(max_connections=_possible_connections(config.max_connections))
        self._connections: Connections | None = None
        self._preparer: Preparer | None = None
        self._handler: RequestHandler | None = None
        self._socket: socket.socket | None = None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._for_siblings: RpcServer | None = None
        self._collector: StatusCollector | None = None
        self._tracing: Tracing | None = None

    async def start(self) -> str:
        """Return the URL. Raise ConfigError if the port is taken, ModelError if the model's files cannot be used."""
        config = self.config
        if config.otlp is not None:
            self._tracing = make_tracing(config.otlp, config.name)
        self._socket = bind(config.http_address.host, config.http_address.port, shared=bool(config.siblings))
        model = await asyncio.to_thread(self._load, config)
        tenants_file = None if config.tenants_file is None else Path(config.tenants_file)
        tenants = await asyncio.to_thread(load_tenants, Path(config.state_dir), tenants_file)
        call = load_call(self._load, config.model, config.model_name, config.max_model_len)
        self._preparer = Preparer(model, call if config.prompt_process else None)
        self._preparer.start()
        siblings = config.sibling_addresses
        group = " ".join(sorted(siblings.values()))
        own_address = siblings.pop(config.name, None)
        self._connections = Connections(
            config.conductor_address, config.master_address, siblings, group, first_conductor=_number_of(config)
        )
        self._handler = RequestHandler(
            model,
            tenants,
            self._connections,
            self._preparer,
            policy=RetryPolicy(max_attempts=config.max_attempts, worker_wait_s=config.worker_wait_s),
            request_timeout_s=config.request_timeout_s,
            expected_workers=config.expected_workers,
            expected_nodes=config.expected_nodes,
        )
        if own_address is not None:
            self._for_siblings = _sibling_server(config.name, self._handler.metrics)
            await self._for_siblings.listen(own_address)
        await self._serve(self._handler, self._socket)
        return url_of(self._socket)

    async def _serve(self, handler: RequestHandler, sock: socket.socket) -> None:
        limits = self._limits
        max_body_nbytes = self.config.max_body_nbytes or handler.model.max_body_nbytes
        tour_dir = None if self.config.tour_dir is None else Path(self.config.tour_dir)
        self._collector = StatusCollector(handler, self.config.name, has_tour=tour_dir is not None)
        app = make_app(
            handler,
            self._collector,
            max_body_nbytes=max_body_nbytes,
            name=self.config.name,
            tracing=self._tracing,
            add_more=None if tour_dir is None else lambda app: add_tour(app, tour_dir, self.config.http_address.host),
        )
        self._server = _Server(
            uvicorn.Config(
                app,
                http=functools.partial(GuardedProtocol, limits=limits),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="info" if self.config.access_log else "warning",
                access_log=self.config.access_log,
                timeout_keep_alive=math.ceil(limits.keep_alive_s),
                timeout_graceful_shutdown=int(GRACE_S) + 1,
            )
        )
        self._serving = asyncio.create_task(self._server.serve(sockets=[sock]), name="http server")
        await self._server.wait_started(self._serving)
        self._collector.start()

    async def close(self) -> None:
        """Stop serving. Running requests get GRACE_S to finish, then end with an error. Idempotent."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait((self._serving,), timeout=GRACE_S)
        if self._for_siblings is not None:
            await self._for_siblings.close()
        if self._collector is not None:
            await self._collector.close()
        if self._tracing is not None:
            await self._tracing.close()
            self._tracing = None
        if self._connections is not None:
            await self._connections.close()
        if self._serving is not None:
            await asyncio.wait((self._serving,))
        if self._preparer is not None:
            await self._preparer.close()
        if self._socket is not None:
            self._socket.close()


class _Server(uvicorn.Server):
    """Leaves signals to the process (base/process.py) and can wait until it has started."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ready = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS_PER_SWEEP == 0:
            now_s = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                if isinstance(connection, GuardedProtocol):
                    connection.sweep(now_s)
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready.set()

    async def wait_started(self, serving: asyncio.Task[None]) -> None:
        ready = asyncio.create_task(self._ready.wait())
        await asyncio.wait((ready, serving), return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if serving.done():
            raise Internal("the HTTP server ended as soon as it started") from serving.exception()


def _sibling_server(name: str, metrics: FrontendMetrics) -> RpcServer:
    """Return the server that the other front ends of this port ask."""
    handlers: dict[type[Call[Any]], Callable[[Any, RpcPeer], Any]] = {
        GetMetrics: lambda _call, _peer: metrics.families()
    }
    return RpcServer(FRONTEND_SERVICE, handlers, name=name, incarnation=time.time_ns())


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Return a bound and listening socket. Raise ConfigError, before anything has started, if the port is taken.

    A port may be `shared` with other processes of this user that share it, too: the kernel gives each connection to one
    of those that listen. The socket does not listen yet then, because a front end that is starting would keep the
    connections that the others could serve.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise ConfigError(f"cannot serve at {host!r}: {error.strerror or error}", param="host") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
        if not shared:
            sock.listen(_BACKLOG)  # with SO_REUSEADDR, bind alone does not notice another bound socket
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot serve at {host}:{port}: {error.strerror or error}", param="port") from error
    return sock


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _possible_connections(wanted: int) -> int:
    """Raise this process's limit of open files as far as allowed; return how many connections it leaves."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - _SPARE_FILES))
