"""Two machines, two rails, real packets: throughput, a rail cut in the middle, its return. See _rails_lab.py.

The rails are slow, so that the links limit and not the cores. A claim about time is measured up to three times, one
about bytes once. Where the host of a virtual machine took processor time away each time, the test is skipped and says
so. benchmarks/transfer_rails.py measures fast rails.
"""

from __future__ import annotations

import fcntl
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from _rails_lab import RailsLab, Result, missing
from wall_time import stolen_s

OPS = pytest.mark.parametrize("op", ["read", "write"])
FAULTS = pytest.mark.parametrize("fault", ["unplugged", "silent"])
REASON = missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
MIB = 1 << 20
RATE_MBIT = 400
ATTEMPTS = 3
MAX_STOLEN = 0.1


class MissedError(AssertionError):
    """A claim about time does not hold in this measurement."""


def claim(shown: bool, what: str) -> None:
    if not shown:
        raise MissedError(what)


def measured(measure: Callable[[], object]) -> None:
    """Measures until the claims hold, at most ATTEMPTS times. Then raises what was missed with the most processor time,
    or skips the test if the host took more than MAX_STOLEN of it away even then.
    """
    misses: list[tuple[float, MissedError]] = []  # with the share of processor time that was stolen
    for _ in range(ATTEMPTS):
        began_s, stolen_before = time.monotonic(), stolen_s()
        try:
            measure()
        except MissedError as missed:
            available_s = (time.monotonic() - began_s) * len(stolen_before)
            stolen = (sum(stolen_s()) - sum(stolen_before)) / available_s
            print(f"missed while the host took {stolen:.0%} of the processor time away: {missed}")
            misses.append((stolen, missed))
        else:
            return
    least_stolen, error = min(misses, key=lambda miss: miss[0])
    if least_stolen > MAX_STOLEN:
        pytest.skip(f"the host took {least_stolen:.0%} of the processor time away or more: {error}")
    raise error


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """One at a time on this machine: two of these at once would measure each other."""
    with open(Path(tempfile.gettempdir()) / "moonpool-rails-lab.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="module")
def equal() -> Iterator[RailsLab]:
    with RailsLab([RATE_MBIT, RATE_MBIT]) as lab:
        yield lab


@OPS
def test_two_rails_carry_what_two_rails_can(equal: RailsLab, op: str) -> None:
    def measure() -> None:
        one = equal.transfer(op=op, nbytes=48 * MIB, only=0)
        both = equal.transfer(op=op, nbytes=96 * MIB)
        assert one.correct
        assert both.correct
        ratio = both.rate / one.rate
        print(f"{op}: {both.rate / 1e6:.0f} MB/s by two rails, {one.rate / 1e6:.0f} by one: {ratio:.2f}")
        claim(ratio >= 1.6, f"two rails carried only {ratio:.2f} of what one carries")

    measured(measure)


@OPS
def test_uneven_rails_carry_their_sum(op: str) -> None:
    with RailsLab([RATE_MBIT, RATE_MBIT // 4]) as lab:

        def measure() -> None:
            fast, slow = lab.transfer(op=op, nbytes=32 * MIB, only=0), lab.transfer(op=op, nbytes=12 * MIB, only=1)
            both = lab.transfer(op=op, nbytes=96 * MIB)
            assert fast.correct
            assert slow.correct
            assert both.correct
            ratio = both.rate / (fast.rate + slow.rate)
            print(f"{op}: {both.rate / 1e6:.0f} MB/s, {ratio:.2f} of the sum")
            claim(ratio >= 0.75, f"both carried only {ratio:.2f} of their sum")

        measured(measure)


@OPS
@FAULTS
def test_a_rail_cut_in_the_middle_costs_no_byte_and_no_second(equal: RailsLab, op: str, fault: str) -> None:
    cut_and_return(equal, op, fault, away_s=1.2, seconds=3.2)


@pytest.mark.soak
@OPS
@FAULTS
def test_rails_cut_again_and_again(equal: RailsLab, op: str, fault: str) -> None:
    for turn in range(5):
        cut_and_return(equal, op, fault, away_s=1.0 + turn, seconds=8.0 + turn, rail=turn % 2)


@OPS
def test_a_rail_silent_from_the_start(equal: RailsLab, op: str) -> None:
    def measure() -> None:
        started_s = time.monotonic()
        with equal.silent(0):
            result = equal.transfer(op=op, nbytes=64 * MIB)
        took_s = time.monotonic() - started_s
        assert result.correct
        assert result.samples[-1].done_nbytes[0] == 0
        claim(took_s < 10, f"took {took_s:.1f} s")

    measured(measure)


def cut_and_return(lab: RailsLab, op: str, fault: str, *, away_s: float, seconds: float, rail: int = 1) -> None:
    measured(lambda: cut_once(lab, op, fault, rail, rail, away_s=away_s, seconds=seconds))


class Cut(NamedTuple):
    """A transfer during which one rail was away."""

    cut_s: float
    used_s: float  # when the rail carried bytes again
    result: Result


def cut_once(lab: RailsLab, op: str, fault: str, rail: int, path: int, *, away_s: float, seconds: float) -> Cut:
    """The rail, `path` in the samples, is away in the middle of a transfer: all bytes come, no second is lost."""
    lab.start(op=op, seconds=seconds)
    time.sleep(0.4)  # in the middle
    cut_s = time.monotonic()
    with lab.fault(fault, rail):
        time.sleep(away_s)
    returned_s = time.monotonic()
    result = lab.finish()
    assert result.correct
    used_s = result.first_use_s(path, returned_s) or math.inf
    print(f"{op}, {fault}: longest stall {result.longest_stall_s:.2f} s, back after {used_s - returned_s:.2f} s")
    claim(result.longest_stall_s < 1.0, f"no byte for {result.longest_stall_s:.2f} s")
    claim(used_s - returned_s < 5.0, "the rail that returned was not used within 5 s")
    return Cut(cut_s, used_s, result)


@pytest.fixture(scope="module")
def uneven() -> Iterator[RailsLab]:
    """By the owner's topology rail 1 serves its memory; rail 0 stands in."""
    with RailsLab([RATE_MBIT, RATE_MBIT], preferred=1) as lab:
        yield lab


PREFERRED_PATH, SECONDARY_PATH = 0, 1  # in the samples


@OPS
def test_the_rail_of_the_memory_carries_all(uneven: RailsLab, op: str) -> None:
    counter = uneven.sent_nbytes if op == "read" else uneven.received_nbytes

    def measure() -> None:
        before = [counter(rail) for rail in (0, 1)]
        result = uneven.transfer(op=op, nbytes=96 * MIB)
        grown = [counter(rail) - then for rail, then in zip((0, 1), before, strict=True)]
        print(f"{op}: rail 0 carried {grown[0]} bytes, rail 1 {grown[1]}")
        assert result.correct
        # Connections, the client's first look, and what moves while a process that waits for a core seems to be silent.
        claim(grown[0] < 10 * MIB and grown[1] > 86 * MIB, f"the rails carried {grown}")

    measured(measure)


@OPS
@FAULTS
def test_the_other_rail_stands_in_while_it_is_cut(uneven: RailsLab, op: str, fault: str) -> None:
    def measure() -> None:
        cut = cut_once(uneven, op, fault, 1, PREFERRED_PATH, away_s=1.2, seconds=4.5)
        stood_in_s = cut.result.first_use_s(SECONDARY_PATH, 0.0)
        assert stood_in_s is not None
        claim(stood_in_s > cut.cut_s, "the rail that stands in was used before the cut")
        late = [sample.done_nbytes for sample in cut.result.samples if sample.at_s > cut.used_s + 0.7]
        claim(len(late) > 1 and late[-1][PREFERRED_PATH] > late[0][PREFERRED_PATH], "what returned carries nothing")
        claim(late[-1][SECONDARY_PATH] == late[0][SECONDARY_PATH], "what returned does not carry everything")

    measured(measure)


@pytest.mark.parametrize("own_sysfs", [True, False], ids=["own-sysfs", "machine-sysfs"])
def test_rails_are_found_in_a_container(uneven: RailsLab, own_sysfs: bool) -> None:
    if not own_sysfs and shutil.which("nsenter") is None:
        pytest.skip("entering a namespace without its /sys needs nsenter: apt-get install -y util-linux")
    hosts = [address.rpartition(":")[0] for address in uneven.owner_addresses(own_sysfs=own_sysfs)]
    assert sorted(hosts) == ["10.77.0.1", "10.77.1.1"]
