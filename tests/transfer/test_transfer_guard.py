"""A whole engine behind a guard, on one rail and on two: who lacks the secret is told at once, and not tried again."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import pytest
from waiting import HANG_S

from moonpool.base.errors import Unauthorized
from moonpool.transfer import Segment, TransferConfig, TransferEngine


def engine(folder: Path, secret: bytes | None, **settings: object) -> TransferEngine:
    path = None
    if secret is not None:
        file = folder / secret.decode()
        file.write_bytes(secret)
        file.chmod(0o600)
        path = str(file)
    config = TransferConfig(run_dir=str(folder / "run"), shm=False, secret_file=path, **settings)  # type: ignore[arg-type]
    return TransferEngine(config)


@pytest.mark.parametrize("rails", [(), ("127.0.0.2",)])
@pytest.mark.parametrize("secret", [None, b"some-other-secret-of-length"])
def test_an_engine_without_the_secret_is_told_at_once(
    tmp_path: Path, secret: bytes | None, rails: tuple[str, ...]
) -> None:
    before = set(threading.enumerate())
    with Segment.over("seg", bytearray(1000), incarnation=1) as segment:
        with engine(tmp_path, b"the-right-secret-of-length", tcp_hosts=rails) as owner:
            descriptor = owner.serve(segment)
            with (
                engine(tmp_path, secret, timeout_s=5 * HANG_S) as stranger,
                engine(tmp_path, b"the-right-secret-of-length") as friend,
            ):
                started = time.monotonic()
                with pytest.raises(Unauthorized):
                    stranger.open(descriptor)
                assert time.monotonic() - started < HANG_S / 2
                gc.collect()  # the engine keeps nothing of a peer that it could not open
                friend.open(descriptor).write_from(0, [b"hello"], generation=1, timeout_s=HANG_S)
        assert bytes(segment.memory[:5]) == b"hello"
    for thread in set(threading.enumerate()) - before:
        thread.join(HANG_S)
        assert not thread.is_alive(), thread.name
