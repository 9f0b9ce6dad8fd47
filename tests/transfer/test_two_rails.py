"""Two machines, two rails, real packets: which rail carries what, a rail cut in the middle, its return.

The rails are slow, so that the links limit and not the cores. Nothing here is said in seconds: throughput, stalls and
how soon a rail is used again are measured by benchmarks/transfer_rails.py, and the soak test states its limits. See
benchmarks/_rails_lab.py.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import HANG_S, wait_until

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from _rails_lab import RailsLab, missing

OPS = pytest.mark.parametrize("op", ["read", "write"])
FAULTS = pytest.mark.parametrize("fault", ["unplugged", "silent"])
REASON = missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
MIB = 1 << 20
RATE_MBIT = 400
BATCH_NBYTES = 16 * MIB
NEVER = {"silence_s": HANG_S}  # no rail fails because the host stalls: what each carries is exact
SOON = {"silence_s": 1.0}  # twice what a host may stall


@pytest.fixture(scope="module")
def equal() -> Iterator[RailsLab]:
    with RailsLab([RATE_MBIT, RATE_MBIT]) as lab:
        yield lab


@OPS
def test_two_equal_rails_share_a_transfer(equal: RailsLab, op: str) -> None:
    """With five eighths on one of them, both would be only 1.6 times as fast as one."""
    for rail in (0, 1):
        assert equal.transfer(op=op, nbytes=4 * MIB, only=rail, **NEVER).correct
    result = equal.transfer(op=op, nbytes=64 * MIB, **NEVER)
    assert result.correct
    assert sum(result.carried_nbytes) == 64 * MIB
    assert min(result.carried_nbytes) >= 24 * MIB


@pytest.fixture(scope="module")
def four_to_one() -> Iterator[RailsLab]:
    with RailsLab([RATE_MBIT, RATE_MBIT // 4]) as lab:
        yield lab


@OPS
def test_uneven_rails_share_by_what_they_can(four_to_one: RailsLab, op: str) -> None:
    """A slow rail is to carry a fifth. With four fifteenths, both would reach only three quarters of their sum."""
    result = four_to_one.transfer(op=op, nbytes=60 * MIB, **NEVER)
    assert result.correct
    assert sum(result.carried_nbytes) == 60 * MIB
    assert 0 < result.carried_nbytes[1] <= 16 * MIB


@OPS
@FAULTS
def test_a_rail_cut_in_the_middle_costs_no_byte_and_is_used_again(equal: RailsLab, op: str, fault: str) -> None:
    with equal.moving(op, batch_nbytes=BATCH_NBYTES, **SOON):
        grows(equal, 0)
        grows(equal, 1)
        with equal.fault(fault, 1):
            wait_until(lambda: equal.has_failed(1), f"the client notices that rail 1 is {fault}")
            grows(equal, 0)
            left = equal.carried()[1]
            grows(equal, 0, 16 * MIB)
            assert equal.carried()[1] == left
        grows(equal, 1)


@pytest.mark.soak
@OPS
@FAULTS
def test_rails_cut_again_and_again(equal: RailsLab, op: str, fault: str) -> None:
    """In seconds, on a quiet machine. A stall of the host counts as one of the transfer."""
    for turn in range(5):
        rail = turn % 2
        equal.start(op=op, seconds=8.0 + turn)
        time.sleep(0.4)  # in the middle
        with equal.fault(fault, rail):
            time.sleep(1.0 + turn)
        returned_s = time.monotonic()
        result = equal.finish()
        assert result.correct
        used_s = result.first_use_s(rail, returned_s)
        print(f"{op}, {fault}: longest stall {result.longest_stall_s:.2f} s, used again {used_s}, back {returned_s}")
        assert result.longest_stall_s < 1.0
        assert used_s is not None
        assert used_s - returned_s < 5.0


@OPS
def test_a_rail_silent_from_the_start(equal: RailsLab, op: str) -> None:
    with equal.silent(0):
        result = equal.transfer(op=op, nbytes=32 * MIB, **SOON)
    assert result.correct
    assert result.carried_nbytes == [0, 32 * MIB]


def grows(lab: RailsLab, rail: int, nbytes: int = 4 * MIB) -> None:
    """So many bytes come by this rail."""
    enough = lab.carried()[rail] + nbytes
    wait_until(lambda: lab.carried()[rail] >= enough, f"rail {rail} carries {nbytes} bytes")


@pytest.fixture(scope="module")
def uneven() -> Iterator[RailsLab]:
    """By the owner's topology rail 1 serves its memory; rail 0 stands in."""
    with RailsLab([RATE_MBIT, RATE_MBIT], preferred=1) as lab:
        yield lab


PREFERRED_PATH, SECONDARY_PATH = 0, 1  # in what the lab tells


@OPS
def test_the_rail_of_the_memory_carries_all(uneven: RailsLab, op: str) -> None:
    counter = uneven.sent_nbytes if op == "read" else uneven.received_nbytes
    before = [counter(rail) for rail in (0, 1)]
    result = uneven.transfer(op=op, nbytes=32 * MIB, **NEVER)
    grown = [counter(rail) - then for rail, then in zip((0, 1), before, strict=True)]
    assert result.correct
    assert result.carried_nbytes == [32 * MIB, 0]
    assert grown[0] < 1 * MIB, "connections, and nothing else"
    assert grown[1] > 32 * MIB


@OPS
@FAULTS
def test_the_other_rail_stands_in_while_it_is_cut(uneven: RailsLab, op: str, fault: str) -> None:
    with uneven.moving(op, batch_nbytes=BATCH_NBYTES, **SOON):
        wait_until(lambda: carries_alone(uneven), "the rail of the memory carries all")
        with uneven.fault(fault, 1):
            grows(uneven, SECONDARY_PATH, 16 * MIB)
        wait_until(lambda: carries_alone(uneven), "what returned carries all")


def carries_alone(lab: RailsLab) -> bool:
    """Whether the other rail carries nothing, while some come by the rail of the memory."""
    before = lab.carried()[SECONDARY_PATH]
    grows(lab, PREFERRED_PATH)
    return lab.carried()[SECONDARY_PATH] == before


@pytest.mark.parametrize("own_sysfs", [True, False], ids=["own-sysfs", "machine-sysfs"])
def test_rails_are_found_in_a_container(uneven: RailsLab, own_sysfs: bool) -> None:
    if not own_sysfs and shutil.which("nsenter") is None:
        pytest.skip("entering a namespace without its /sys needs nsenter: apt-get install -y util-linux")
    hosts = [address.rpartition(":")[0] for address in uneven.owner_addresses(own_sysfs=own_sysfs)]
    assert sorted(hosts) == ["10.77.0.1", "10.77.1.1"]
