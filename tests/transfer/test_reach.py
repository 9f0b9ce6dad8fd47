"""What roles say at their start about how they are reached."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import ConfigError
from moonpool.transfer.config import WireConfig, check_numa_node, describe_segment, warn_if_open
from moonpool.transfer.topology import Sysfs
from moonpool.transfer.topology.discover import numa_nodes

LOG = logging.getLogger("test")


def test_every_way_is_named() -> None:
    descriptor = SegmentDescriptor(
        name="n.dram",
        nbytes=64_000_000_000,
        incarnation=1,
        host="h",
        endpoints=("shm:/run/x.sock", "tcp:10.0.0.1:4711"),
        secondary=("tcp:[fd00::1]:4712",),
        location="cpu:1",
    )
    assert describe_segment(descriptor).endswith(
        " at cpu:1, reached by shm, tcp 10.0.0.1:4711, tcp [fd00::1]:4712 (secondary)"
    )
    assert describe_segment(descriptor).startswith("n.dram, ")


@pytest.mark.parametrize(
    ("config", "addresses", "warns"),
    [
        (WireConfig(), ("127.0.0.1:1",), False),
        (WireConfig(tcp_host="::1"), ("[::1]:1",), False),
        (WireConfig(tcp_host="localhost"), ("localhost:1",), False),
        (WireConfig(tcp_host=None), (), False),
        (WireConfig(tcp_host="10.0.0.1"), ("10.0.0.1:1",), True),
        (WireConfig(tcp_host="127.0.0.1", tcp_hosts=("10.0.0.1",)), ("127.0.0.1:1", "10.0.0.1:1"), True),
        (WireConfig(tcp_host="0.0.0.0", tcp_advertise_host="127.0.0.1"), ("127.0.0.1:1",), True),
        (WireConfig(tcp_host="auto"), ("10.0.0.1:1",), True),
        (WireConfig(tcp_host="some.host"), ("some.host:1",), True),
    ],
)
def test_a_port_open_to_other_machines_is_worth_one_warning(
    config: WireConfig, addresses: tuple[str, ...], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_if_open(LOG, config, addresses)
    assert len(caplog.records) == warns
    assert not warns or "--secret-file" in caplog.text


def test_a_guarded_port_needs_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef")
    path.chmod(0o600)
    warn_if_open(LOG, WireConfig(tcp_host="10.0.0.1", secret_file=str(path)), ("10.0.0.1:1",))
    assert not caplog.records


def test_a_numa_node_that_is_not_there_is_refused() -> None:
    check_numa_node(None)
    check_numa_node(numa_nodes(Sysfs())[0].node)
    with pytest.raises(ConfigError, match="no NUMA node 4095"):
        check_numa_node(4095)
