"""Two machines, two rails, real packets: throughput, a rail cut in the middle, its return. See _rails_lab.py.

The thresholds leave room for a busy machine; benchmarks/transfer_rails.py holds the real claims.
"""

from __future__ import annotations

import fcntl
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from _rails_lab import RailsLab, missing

OPS = pytest.mark.parametrize("op", ["read", "write"])
FAULTS = pytest.mark.parametrize("fault", ["unplugged", "silent"])
REASON = missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
MIB = 1 << 20


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """One at a time on this machine: two of these at once would measure each other."""
    with open(Path(tempfile.gettempdir()) / "moonpool-rails-lab.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="module")
def equal() -> Iterator[RailsLab]:
    with RailsLab([1000, 1000]) as lab:
        yield lab


@OPS
def test_two_rails_carry_what_two_rails_can(equal: RailsLab, op: str) -> None:
    ratios = []
    for _ in range(3):  # two rails need both cores: a measurement that they were taken away from shows nothing
        one = equal.transfer(op=op, nbytes=96 * MIB, only=0)
        both = equal.transfer(op=op, nbytes=192 * MIB)
        ratios.append(both.rate / one.rate)
        print(f"{op}: {both.rate / 1e6:.0f} MB/s by two rails, {one.rate / 1e6:.0f} by one: {ratios[-1]:.2f}")
        assert one.correct
        assert both.correct
        if ratios[-1] >= 1.6:
            return
    raise AssertionError(f"two rails carried only {ratios} of what one carries")


@OPS
def test_uneven_rails_carry_their_sum(op: str) -> None:
    with RailsLab([1000, 250]) as lab:
        fast, slow = lab.transfer(op=op, nbytes=64 * MIB, only=0), lab.transfer(op=op, nbytes=24 * MIB, only=1)
        both = lab.transfer(op=op, nbytes=192 * MIB)
    ratio = both.rate / (fast.rate + slow.rate)
    print(f"{op}: {both.rate / 1e6:.0f} MB/s, {ratio:.2f} of the sum")
    assert both.correct
    assert ratio >= 0.75


@OPS
@FAULTS
def test_a_rail_cut_in_the_middle_costs_no_byte_and_no_second(equal: RailsLab, op: str, fault: str) -> None:
    cut_and_return(equal, op, fault, away_s=1.2, seconds=3.2)


@pytest.mark.soak
@pytest.mark.timeout(600)
@OPS
@FAULTS
def test_rails_cut_again_and_again(equal: RailsLab, op: str, fault: str) -> None:
    for turn in range(5):
        cut_and_return(equal, op, fault, away_s=1.0 + turn, seconds=8.0 + turn, rail=turn % 2)


@OPS
def test_a_rail_silent_from_the_start(equal: RailsLab, op: str) -> None:
    started_s = time.monotonic()
    with equal.silent(0):
        result = equal.transfer(op=op, nbytes=64 * MIB)
    assert result.correct
    assert time.monotonic() - started_s < 10
    assert result.samples[-1].done_nbytes[0] == 0


def cut_and_return(lab: RailsLab, op: str, fault: str, *, away_s: float, seconds: float, rail: int = 1) -> None:
    lab.start(op=op, seconds=seconds)
    time.sleep(0.4)  # in the middle
    with lab.fault(fault, rail):
        time.sleep(away_s)
    returned_s = time.monotonic()
    result = lab.finish()
    used_s = result.first_use_s(rail, returned_s)
    print(
        f"{op}, {fault}: longest stall {result.longest_stall_s:.2f} s, back after {(used_s or 1e9) - returned_s:.2f} s"
    )
    assert result.correct
    assert result.longest_stall_s < 1.0
    assert used_s is not None
    assert used_s - returned_s < 5.0


@pytest.fixture(scope="module")
def uneven() -> Iterator[RailsLab]:
    """By the owner's topology rail 1 serves its memory; rail 0 stands in."""
    with RailsLab([1000, 1000], preferred=1) as lab:
        yield lab


PREFERRED_PATH, SECONDARY_PATH = 0, 1  # in the samples


@OPS
def test_the_rail_of_the_memory_carries_all(uneven: RailsLab, op: str) -> None:
    counter = uneven.sent_nbytes if op == "read" else uneven.received_nbytes
    before = [counter(rail) for rail in (0, 1)]
    result = uneven.transfer(op=op, nbytes=96 * MIB)
    grown = [counter(rail) - then for rail, then in zip((0, 1), before, strict=True)]
    print(f"{op}: rail 0 carried {grown[0]} bytes, rail 1 {grown[1]}")
    assert result.correct
    # Connections, the client's first look, and what moves while a process that waits for a core seems to be silent.
    assert grown[0] < 10 * MIB
    assert grown[1] > 86 * MIB


@OPS
@FAULTS
def test_the_other_rail_stands_in_while_it_is_cut(uneven: RailsLab, op: str, fault: str) -> None:
    uneven.start(op=op, seconds=4.5)
    time.sleep(0.4)  # in the middle
    cut_s = time.monotonic()
    with uneven.fault(fault, 1):
        time.sleep(1.2)
    returned_s = time.monotonic()
    result = uneven.finish()
    used_s = result.first_use_s(PREFERRED_PATH, returned_s)
    print(
        f"{op}, {fault}: longest stall {result.longest_stall_s:.2f} s, back {(used_s or 1e9) - returned_s:.2f} s later"
    )
    assert result.correct
    assert result.longest_stall_s < 1.0
    assert result.first_use_s(SECONDARY_PATH, 0.0) is not None
    assert (result.first_use_s(SECONDARY_PATH, 0.0) or 0.0) > cut_s
    assert used_s is not None
    assert used_s - returned_s < 5.0
    late = [sample.done_nbytes for sample in result.samples if sample.at_s > used_s + 0.7]
    assert late[-1][SECONDARY_PATH] == late[0][SECONDARY_PATH], "what returned carries everything again"
    assert late[-1][PREFERRED_PATH] > late[0][PREFERRED_PATH]


@pytest.mark.parametrize("own_sysfs", [True, False], ids=["own-sysfs", "machine-sysfs"])
def test_rails_are_found_in_a_container(uneven: RailsLab, own_sysfs: bool) -> None:
    if not own_sysfs and shutil.which("nsenter") is None:
        pytest.skip("entering a namespace without its /sys needs nsenter: apt-get install -y util-linux")
    hosts = [address.rpartition(":")[0] for address in uneven.owner_addresses(own_sysfs=own_sysfs)]
    assert sorted(hosts) == ["10.77.0.1", "10.77.1.1"]
