"""A real Prometheus (Debian's package) that reads a live service, for tests and benchmarks."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from _live_load import free_port

JOB = "moonpool"  # as in docs/operations.md
_STARTS = 5  # another process may take the port before Prometheus does
_START_S = 60.0


class Prometheus:
    """Asks the server at `url`, which is process `pid`. Use `running_prometheus`."""

    def __init__(self, url: str, pid: int) -> None:
        self.url, self.pid = url, pid

    def query(self, text: str) -> list[tuple[dict[str, str], float]]:
        """Return the labels and values that a query answers with now. Raise AssertionError if it is not valid."""
        found = self._get("query", query=text)
        if found["resultType"] == "scalar":
            return [({}, float(found["result"][1]))]
        return [(each["metric"], float(each["value"][1])) for each in found["result"]]

    def rules(self) -> dict[str, dict[str, Any]]:
        """Return the alert rules by their names: `state`, `health`, `lastError`, ..."""
        return {rule["name"]: rule for group in self._get("rules")["groups"] for rule in group["rules"]}

    def _get(self, path: str, **parameters: str) -> Any:
        reply = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, trust_env=False, timeout=30)
        body = reply.json()
        assert body["status"] == "success", f"{parameters}: {body.get('error')}"
        return body["data"]


@contextlib.contextmanager
def running_prometheus(
    folder: Path,
    targets: Sequence[str],
    *,
    interval_s: int,
    rules: Path | None = None,
    program: str = "prometheus",
    prefix: Sequence[str] = (),
) -> Iterator[Prometheus]:
    """Run a server that reads `targets` (HOST:PORT) every `interval_s` seconds and evaluates the rules as often."""
    config = {
        "global": {"scrape_interval": f"{interval_s}s", "evaluation_interval": f"{interval_s}s"},
        "rule_files": [] if rules is None else [str(rules)],
        "scrape_configs": [{"job_name": JOB, "static_configs": [{"targets": list(targets)}]}],
    }
    file = folder / "prometheus.yml"
    file.write_text(json.dumps(config))  # JSON is YAML, too
    process, url = _start([*prefix, program, f"--config.file={file}", "--log.level=warn"], folder)
    try:
        yield Prometheus(url, process.pid)
    finally:
        process.terminate()
        process.wait(30)


def _start(command: list[str], folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    for attempt in range(_STARTS):
        port = free_port()
        log = folder / f"prometheus-{attempt}.log"
        options = [f"--storage.tsdb.path={folder / f'data-{attempt}'}", f"--web.listen-address=127.0.0.1:{port}"]
        with log.open("wb") as output:
            process = subprocess.Popen([*command, *options], stdout=output, stderr=subprocess.STDOUT)
        url = f"http://127.0.0.1:{port}"
        if _is_ready(process, url):
            return process, url
        process.kill()
        process.wait()
    raise AssertionError(f"prometheus did not start:\n{log.read_text()}")


def _is_ready(process: subprocess.Popen[bytes], url: str) -> bool:
    """Wait until the server is ready; return False if it ends first, or takes longer than _START_S."""
    transport = httpx.HTTPTransport(retries=0)
    with httpx.Client(transport=transport, trust_env=False) as client:
        for _ in range(int(_START_S / 0.1)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
                return False
            with contextlib.suppress(httpx.TransportError):
                if client.get(f"{url}/-/ready").status_code == 200:
                    return True
    return False
