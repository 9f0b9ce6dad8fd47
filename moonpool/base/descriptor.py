"""How one process tells others of memory it offers. A descriptor is plain data and may travel anywhere."""

from __future__ import annotations

import msgspec

from moonpool.base.ranges import Positive, Whole


class SegmentDescriptor(msgspec.Struct, frozen=True, kw_only=True):
    """A span of memory that its owner serves.

    `host` names the machine's running kernel: `shm:` and `file:` endpoints are of use only to processes with the same
    one. `endpoints` are tried in order of speed: `shm:/path/to.sock`, `tcp:host:port`, `file:/path`; `secondary` ones
    (tcp, by NICs far from the memory) are used only while none of their kind among the others works. `incarnation`
    changes with every start of the owner; handles opened for an earlier one are void. A fenced segment
    (`granule_nbytes`) keeps a generation per granule: a write that carries an older generation than a granule has is
    refused. `location` says where the memory lies (location.py), in the owner's own words.
    """

    name: str
    nbytes: int
    incarnation: Whole
    host: str
    endpoints: tuple[str, ...]
    granule_nbytes: Positive | None = None
    location: str = "cpu"
    secondary: tuple[str, ...] = ()
