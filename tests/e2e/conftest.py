"""Services that several tests share; each file says which shape it needs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2e_service import Service, running


@pytest.fixture(scope="session")
def one_each(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One prefill, one decode worker."""
    with running(tmp_path_factory.mktemp("one_each")) as service:
        yield service


@pytest.fixture(scope="session")
def two_each(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Two prefill, two decode workers, and the tour of the live page."""
    with running(tmp_path_factory.mktemp("two_each"), "--prefill", "2", "--decode", "2", "--tour") as service:
        yield service
