"""The services of this user that run on this machine: the nodes of each, and the roles that are missing."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path

from moonpool.base.errors import MoonpoolError
from moonpool.base.rpc import BlockingClient
from moonpool.base.run_dirs import MASTER, live_run_dirs, read_url, socket_address
from moonpool.store.messages import SERVICE, Segments, Tier
from moonpool.transfer.doctor import Finding

_TIMEOUT_S = 2.0
_HINT = "the launcher starts it again; its log, or --log-dir of `moonpool serve`, says why it ended"


def check_services(run_dirs: list[Path] | None = None) -> list[Finding]:
    """Return one finding per service that runs here; none without a service."""
    return [_examine(run_dir) for run_dir in (live_run_dirs() if run_dirs is None else run_dirs)]


def _examine(run_dir: Path) -> Finding:
    nodes, url = _nodes(socket_address(run_dir, MASTER)), read_url(run_dir)
    if url is None:
        return Finding(name="service", status="missing", says=f"the one in {run_dir} is starting or stopping")
    if nodes is None:
        says = f"{url}: its master does not answer; requests run without the pool"
        return Finding(name="service", status="broken", says=says, hint=_HINT)
    says, missing = f"{url}: pool of {', '.join(nodes) or 'no node'}", _missing(url)
    if missing is None:
        return Finding(name="service", status="broken", says=f"{says}; no front end answers", hint=_HINT)
    if missing:
        return Finding(name="service", status="broken", says=f"{says}; missing: {', '.join(missing)}", hint=_HINT)
    return Finding(name="service", status="ok", says=says)


def _nodes(master: str) -> list[str] | None:
    """Return the names of the nodes whose memory is mounted; None if the master does not answer."""
    try:
        with closing(BlockingClient(master, SERVICE, name="moonpool doctor", connect_timeout_s=_TIMEOUT_S)) as client:
            segments = client.call(Segments(), timeout_s=_TIMEOUT_S)
    except MoonpoolError:
        return None
    return sorted({segment.node for segment in segments if segment.tier & Tier.DRAM})


def _missing(url: str) -> list[str] | None:
    """Return the roles that the service's /health lists as missing; None if it does not answer."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2 * _TIMEOUT_S) as reply:
            return list(json.load(reply)["missing"])
    except urllib.error.HTTPError as error:  # 503: it answers, and cannot serve
        with error:
            return list(json.load(error)["missing"])
    except (OSError, ValueError, KeyError):
        return None
