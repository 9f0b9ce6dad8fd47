"""How many cores a process may use, and how workers that do not know each other share them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moonpool.base.limits import CorePresence, available_cores, divide_cores

OTHER = """
import sys
from moonpool.base.limits import CorePresence
with CorePresence():
    print("here", flush=True)
    sys.stdin.readline()
"""


def fake_machine(root: Path, cgroup: str) -> tuple[Path, Path]:
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "net").mkdir()
    (proc / "self" / "cgroup").write_text(cgroup)
    return proc, cgroups


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))


def test_the_affinity_counts_not_the_machine(tmp_path: Path) -> None:
    proc, cgroups = fake_machine(tmp_path, "0::/\n")
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert available_cores(proc, cgroups) == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 16), ("250000 100000", 3), ("50000 100000", 1), ("9900000 100000", 16)]
)
def test_the_quota_of_a_container_counts(tmp_path: Path, quota: str, cores: int) -> None:
    proc, cgroups = fake_machine(tmp_path, "0::/outer/inner\n")
    (cgroups / "outer" / "inner").mkdir(parents=True)
    (cgroups / "outer" / "cpu.max").write_text(quota)
    assert available_cores(proc, cgroups) == cores


@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize(("quota", "cores"), [("-1", 16), ("400000", 4)])
def test_control_groups_of_version_1_have_quotas_too(tmp_path: Path, quota: str, cores: int) -> None:
    proc, cgroups = fake_machine(tmp_path, "4:cpu,cpuacct:/job\n5:memory:/job\n")
    folder = cgroups / "cpu,cpuacct" / "job"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text(quota)
    (folder / "cpu.cfs_period_us").write_text("100000")
    assert available_cores(proc, cgroups) == cores


def test_all_cores_are_given_and_none_twice() -> None:
    for num_cores in range(1, 20):
        for num_workers in range(1, num_cores + 1):
            assert sum(divide_cores(num_cores, num_workers)) == num_cores
    assert divide_cores(2, 5) == [1] * 5


@pytest.mark.usefixtures("many_cores")
def test_workers_on_other_cores_do_not_count(tmp_path: Path) -> None:
    proc, cgroups = fake_machine(tmp_path, "0::/\n")
    lines = ["@moonpool-worker-cores/1/ff", "@moonpool-worker-cores/2/ff0000", "@something-else/3/ff", "/run/x.sock"]
    (proc / "net" / "unix").write_text("".join(f"0: 00000002 00000000 00000000 0002 01 77 {line}\n" for line in lines))
    with CorePresence(proc, cgroups) as presence:
        assert presence.num_workers() == 2
        assert presence.num_threads() == 8


def test_a_worker_is_seen_until_its_process_ends() -> None:
    with CorePresence() as presence:
        before = presence.num_workers()
        other = subprocess.Popen(
            [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ
        )
        listed = Path("/proc/net/unix")
        mark = f"@moonpool-worker-cores/{other.pid}/"
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == b"here\n"
            assert mark in listed.read_text()
            assert presence.num_workers() >= 2
        finally:
            other.kill()
            other.communicate()
        assert mark not in listed.read_text()
    assert before >= 1
