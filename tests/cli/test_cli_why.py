"""`moonpool why REQUEST_ID`, asked of a real conductor by a real process."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from moonpool.base.cluster import CONDUCTOR_SERVICE
from moonpool.base.errors import Unavailable
from moonpool.base.rpc import AsyncClient
from moonpool.conductor.messages import Route
from moonpool.conductor.service import Conductor, ConductorConfig


async def why(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "moonpool", "why", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_a_request_is_explained_by_any_of_its_ids(tmp_path: Path) -> None:
    conductor = Conductor(ConductorConfig(address=f"unix:{tmp_path}/c.sock"))
    address = await conductor.start()
    front_end = await AsyncClient.connect(address, CONDUCTOR_SERVICE)
    with pytest.raises(Unavailable):  # there are no workers; it is recorded all the same
        await front_end.call(Route(request_id="abc-0", keys=[], num_tokens=7, max_tokens=1))
    for request_id in ("abc-0", "cmpl-abc"):
        code, out, _ = await why(request_id, "--conductor", address)
        assert code == 0
        assert out.splitlines() == [
            "Request abc-0: 7 prompt tokens, at most 1 to answer with.",
            "It was sent nowhere: unavailable (no prefill worker is ready).",
        ]
    code, out, err = await why("other", "--conductor", address, "--master", f"unix:{tmp_path}/none.sock")
    assert (code, out) == (1, "")
    assert "none.sock" in err
    front_end.close()
    await conductor.close()
    code, _, err = await why("abc", "--conductor", address)
    assert (code, len(err.splitlines())) == (1, 1)
