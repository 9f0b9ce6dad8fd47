"""Run Mooncake's own Python tests against Moonpool, from a checkout of kvcache-ai/Mooncake given by its path.

    python tests/upstream/run_mooncake_tests.py CHECKOUT [--only NAME ...] [--json FILE]

Each file of tests runs in a process of its own, with a new master on a free port and our `mooncake` package on the
path, and nothing of upstream's. The script prints per file how many tests passed, failed, could not be run (errors) and
were skipped, the names of those that did not pass, and the totals. It returns 1 when a test did not pass.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHADOW = ROOT / "moonpool" / "integrations" / "mooncake" / "shadow"
LEASE_MS = 500  # as upstream's scripts/run_tests.sh has it
SEGMENT_NBYTES = 1 << 30
START_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class TestFile:
    """`path` is inside the checkout. `partner` is a program that must run beside the tests; `select` is pytest's -k;
    `port` is the master's where the tests have it written in them.
    """

    path: str
    needs_master: bool = True
    partner: str | None = None
    select: str | None = None
    port: int | None = None


FILES = (
    TestFile("mooncake-wheel/tests/test_import_structure.py", needs_master=False),
    TestFile("mooncake-wheel/tests/test_mooncake_config.py", needs_master=False),
    TestFile("mooncake-wheel/tests/test_distributed_object_store.py"),
    TestFile("mooncake-wheel/tests/test_replicated_distributed_object_store.py"),
    TestFile("mooncake-wheel/tests/test_batch_replica_clear.py"),
    TestFile("mooncake-wheel/tests/test_put_get_tensor.py"),
    TestFile("mooncake-wheel/tests/test_safetensor_functions.py"),
    TestFile("mooncake-wheel/tests/test_buffer_pool_native.py", port=50051),
    TestFile("mooncake-wheel/tests/test_structured_object_store.py"),
    TestFile("mooncake-wheel/tests/test_dataproto_catalog.py", needs_master=False),
    TestFile("mooncake-wheel/tests/test_http_metadata_server.py", needs_master=False),
    TestFile(
        "mooncake-wheel/tests/transfer_engine_initiator_test.py",
        needs_master=False,
        partner="mooncake-wheel/tests/transfer_engine_target.py",
    ),
    TestFile("scripts/test_upsert_api.py"),
    TestFile("scripts/test_async_store.py", select="not Benchmark and not Stress"),
    TestFile("scripts/test_copy_move_api.py"),
    TestFile("scripts/test_tensor_api.py", select="not Benchmark and not Stress"),
)


@dataclass
class Outcome:
    path: str
    passed: int = 0
    failed: int = 0
    errors: int = 0
    skipped: int = 0
    seconds: float = 0.0
    not_passed: list[str] = field(default_factory=list)

    def line(self) -> str:
        numbers = f"{self.passed:4} passed {self.failed:4} failed {self.errors:4} errors {self.skipped:4} skipped"
        return f"{numbers} {self.seconds:6.1f} s  {self.path}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="a checkout of kvcache-ai/Mooncake")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="only files whose path contains one of these")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that runs the tests")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="time for one file")
    parser.add_argument("--json", type=Path, help="write the outcomes to this file")
    parser.add_argument("--verbose", action="store_true", help="show what pytest prints")
    options = parser.parse_args()
    chosen = [each for each in FILES if not options.only or any(name in each.path for name in options.only)]
    outcomes = []
    for each in chosen:
        outcomes.append(run_file(each, options))
        print(outcomes[-1].line(), flush=True)
        for name in outcomes[-1].not_passed:
            print(f"       not passed: {name}", flush=True)
    total = Outcome("in all")
    for outcome in outcomes:
        for name in ("passed", "failed", "errors", "skipped", "seconds"):
            setattr(total, name, getattr(total, name) + getattr(outcome, name))
    print(total.line())
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(each) for each in [*outcomes, total]], indent=2) + "\n")
    return 1 if total.failed or total.errors else 0


def run_file(file: TestFile, options: argparse.Namespace) -> Outcome:
    path = options.checkout / file.path
    outcome = Outcome(file.path)
    if not path.is_file():
        outcome.errors, outcome.not_passed = 1, ["the checkout has no such file"]
        return outcome
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mp-upstream-") as folder, services(file, options, Path(folder)) as env:
        report = Path(folder) / "report.xml"
        # A copy: some files put upstream's own sources, which lie beside them, before ours on the path.
        copy = Path(folder) / "copy" / "tests" / path.name
        copy.parent.mkdir(parents=True)
        shutil.copy(path, copy)
        command = [options.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", "--tb=short"]
        command += [f"--junitxml={report}", "-c", os.devnull, f"--rootdir={copy.parent}", str(copy)]
        command += ["-k", file.select] if file.select else []
        shown = None if options.verbose else subprocess.DEVNULL
        try:
            subprocess.run(command, cwd=folder, env=env, timeout=options.timeout_s, stdout=shown, stderr=shown)
        except subprocess.TimeoutExpired:
            outcome.errors, outcome.not_passed = 1, [f"took longer than {options.timeout_s:g} s"]
        else:
            read_report(report, outcome)
    outcome.seconds = time.monotonic() - started
    return outcome


def read_report(report: Path, outcome: Outcome) -> None:
    """Count the outcomes of pytest's report. A file that could not be collected is one error."""
    if not report.is_file():
        outcome.errors, outcome.not_passed = 1, ["pytest wrote no report: the process ended"]
        return
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        kind = next((name for name in ("error", "failure", "skipped") if name in kinds), "passed")
        attribute = {"error": "errors", "failure": "failed"}.get(kind, kind)
        setattr(outcome, attribute, getattr(outcome, attribute) + 1)
        if kind in ("error", "failure"):
            outcome.not_passed.append(f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}")


@contextmanager
def services(file: TestFile, options: argparse.Namespace, folder: Path) -> Iterator[dict[str, str]]:
    """Start what the tests need, and yield the environment for them."""
    unset = ("MOONCAKE_", "MC_", "MASTER_SERVER", "LOCAL_HOSTNAME")
    env = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    env["PYTHONPATH"] = os.pathsep.join([str(SHADOW), str(ROOT)])
    env["DEFAULT_KV_LEASE_TTL"] = str(LEASE_MS)
    running: list[subprocess.Popen[bytes]] = []
    try:
        if file.needs_master:
            address = f"127.0.0.1:{file.port or free_port()}"
            running.append(start_master(address, options.python, env, folder))
            env["MASTER_SERVER"] = env["MOONCAKE_MASTER"] = address
            env["MC_METADATA_SERVER"] = "P2PHANDSHAKE"
            env["MOONCAKE_GLOBAL_SEGMENT_SIZE"] = str(SEGMENT_NBYTES)
        if file.partner is not None:
            port = free_port()
            metadata = [options.python, "-m", "mooncake.http_metadata_server", "--port", str(port)]
            running.append(start(metadata, f"127.0.0.1:{port}", env, folder / "metadata.log"))
            env["MC_METADATA_SERVER"] = f"http://127.0.0.1:{port}/metadata"
            env["TARGET_SERVER_NAME"] = f"127.0.0.1:{free_port()}"
            env["INITIATOR_SERVER_NAME"] = f"127.0.0.1:{free_port()}"
            running.append(start_partner([options.python, "-u", str(options.checkout / file.partner)], env))
        yield env
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(START_TIMEOUT_S)


def start_master(address: str, python: str, env: dict[str, str], folder: Path) -> subprocess.Popen[bytes]:
    command = [python, "-m", "moonpool", "master", "--listen", f"tcp:{address}", "--no-journal"]
    command += ["--data-dir", str(folder / "master"), "--lease-s", str(LEASE_MS / 1000)]
    return start(command, address, env, folder / "master.log")


def start_partner(command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start the program, and wait for its line that says that it is ready."""
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    for line in process.stdout:
        if b"ready" in line:
            break
    return process


def start(command: list[str], address: str, env: dict[str, str], log_path: Path) -> subprocess.Popen[bytes]:
    """Start a server, and wait until it takes connections."""
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    host, _, port = address.partition(":")
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()  # the caller does not know of it yet
                process.wait()
                raise SystemExit(f"{' '.join(command)} did not start: {log_path.read_text()}") from None
            time.sleep(0.05)
        else:
            return process


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
