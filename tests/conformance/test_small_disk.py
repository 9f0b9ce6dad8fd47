"""What a test mounts is seen by the processes of this test run alone, so it ends with them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from small_disk import small_disk


def test_a_mount_ends_with_the_test_run(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        assert str(disk) in Path("/proc/self/mounts").read_text()
        try:
            init = Path("/proc/1/mounts").read_text()
        except PermissionError:
            pytest.skip("NOT TESTED, the mounts of process 1 may not be read here")
        assert os.getpid() != 1
        assert str(disk) not in init
    assert str(disk) not in Path("/proc/self/mounts").read_text()
