"""The RPC service over unix and tcp, on the test's loop or on a thread of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from rpc_service import ServedService, Service


@pytest.fixture(params=["unix", "tcp"])
def listen_at(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"unix:{tmp_path}/s.sock" if request.param == "unix" else "tcp:127.0.0.1:0"


@pytest.fixture
def served(listen_at: str) -> Iterator[ServedService]:
    served = ServedService(listen_at)
    yield served
    served.close()


@pytest.fixture
async def service(listen_at: str) -> AsyncIterator[tuple[Service, str]]:
    service = Service()
    address = await service.server.listen(listen_at)
    yield service, address
    await service.server.close()
