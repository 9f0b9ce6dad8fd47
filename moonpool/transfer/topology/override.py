"""A person's word against the discovered matrix: a JSON file that says which NICs a memory location uses. Pure.

    {"net": {"cuda:0": {"preferred": ["eth1"], "secondary": ["eth0"]}}, "rdma": {...}}

A location that is named uses the NICs named there and no others, down ones too; the rest stays as discovered.
Unknown keys, locations and NICs are a ConfigError.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from moonpool.base.errors import ConfigError
from moonpool.transfer.topology.devices import Matrix, NicChoice, NicKind, Topology


class _Override(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    net: Matrix = {}
    rdma: Matrix = {}


def apply_override(topology: Topology, text: str | bytes) -> Topology:
    """The topology with the choices that `text` names in place of its own."""
    try:
        override = msgspec.json.decode(text, type=_Override)
    except msgspec.DecodeError as error:  # what does not fit the types is one of these too
        raise ConfigError(f"the topology override is wrong: {error}") from error
    return msgspec.structs.replace(
        topology,
        net=_overridden(topology, "net", topology.net, override.net),
        rdma=_overridden(topology, "rdma", topology.rdma, override.rdma),
    )


def _overridden(topology: Topology, kind: NicKind, discovered: Matrix, wanted: Matrix) -> Matrix:
    nics = {nic.name for nic in topology.hardware.nics if nic.kind == kind}
    for location, choice in wanted.items():
        if location not in discovered:
            raise _wrong(f"there is no memory location {location!r}; known are: {', '.join(discovered)}")
        _check_choice(f"{kind}.{location}", choice, nics)
    return discovered | wanted


def _check_choice(where: str, choice: NicChoice, known: set[str]) -> None:
    if not choice.preferred:
        raise _wrong(f"{where} prefers no NIC; name at least one")
    for name, times in Counter((*choice.preferred, *choice.secondary)).items():
        if name not in known:
            raise _wrong(f"{where} names the NIC {name!r}; known are: {', '.join(sorted(known)) or 'none'}")
        if times > 1:
            raise _wrong(f"{where} names the NIC {name!r} more than once")


def _wrong(message: str) -> ConfigError:
    return ConfigError(f"the topology override is wrong: {message}")
