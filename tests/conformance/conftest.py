"""What the guarded way of the transport suite needs: certificates and a secret."""

from __future__ import annotations

import pytest

from moonpool.base.security import Secret
from moonpool.transfer.transports.tcp.guard import Guard


@pytest.fixture(scope="session")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Guard:
    """A secret and TLS, both."""
    from tls_authority import Authority

    tls = Authority(tmp_path_factory.mktemp("tls")).issue("member")
    return Guard(secret=Secret(b"correct horse battery staple"), tls=tls.load())
