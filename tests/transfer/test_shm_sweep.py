"""Sockets that killed owners left in a run directory: the next one that starts there removes them."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import HANG_S

from moonpool.transfer import Segment, TransferConfig, TransferEngine


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """tmp_path leaves too little room for the names of sockets."""
    with tempfile.TemporaryDirectory(prefix="mp-") as path:
        yield Path(path)


def leave_socket(path: Path) -> None:
    """As an owner does that is killed."""
    with socket.socket(socket.AF_UNIX) as owner:
        owner.bind(str(path))
        owner.listen()


def test_sockets_of_dead_owners_are_removed_and_those_of_living_ones_stay(run_dir: Path) -> None:
    dead = [run_dir / f"shm-{number}-0a1b2c3d.sock" for number in (1, 2_000_000_000)]
    for path in dead:
        leave_socket(path)
    leave_socket(run_dir / "conductor.sock")  # its next owner takes the same name
    config = TransferConfig(run_dir=str(run_dir), tcp_host=None)
    with Segment.allocate("s", 65_536, incarnation=1) as segment, TransferEngine(config) as first:
        assert not any(path.exists() for path in dead)
        descriptor = first.serve(segment)
        segment.memory[:3] = b"abc"
        with TransferEngine(config) as second:
            names = {path.name for path in run_dir.iterdir()}
            assert len(names) == 3
            assert "conductor.sock" in names
            found = bytearray(3)
            second.open(descriptor).read_into(0, [found], timeout_s=HANG_S)
            assert found == b"abc", "the living owner serves on"
    assert [path.name for path in run_dir.iterdir()] == ["conductor.sock"]
