"""Make a segment of any kind of memory: a buffer, a tensor, a pointer, GPU memory, or new memory.

make_segment("kv", tensor, incarnation=1)                              # torch, on the CPU or on a GPU
make_segment("kv", nbytes=1 << 30, location="cpu:1", incarnation=1)    # shared memory of NUMA node 1
make_segment("kv", nbytes=1 << 30, location="ssd:/mnt/kv", incarnation=1)
"""

from __future__ import annotations

import os

from moonpool.base.errors import InvalidInput
from moonpool.transfer.disk.sidecar import sidecar_path
from moonpool.transfer.memory.buffers import Buffer, RawMemory, device_span
from moonpool.transfer.memory.location import Location, parse_location
from moonpool.transfer.memory.segment import Segment
from moonpool.transfer.transports.cuda.segment import DeviceSegment
from moonpool.transfer.transports.file.segment import FileSegment


def make_segment(
    name: str,
    memory: Buffer | None = None,
    *,
    nbytes: int | None = None,
    location: str | None = None,
    granule_nbytes: int | None = None,
    incarnation: int,
) -> Segment:
    """Make a segment over `memory`, which is borrowed and kept alive until close(); or of `nbytes` of new memory at
    `location` (None: main memory, any node). An existing file is opened, and `nbytes` may be omitted.

    InvalidInput when memory, size and location contradict each other, or the memory is read-only or not contiguous;
    NoSpace when there is not enough; Unavailable when there is no usable GPU.
    """
    place = None if location is None else parse_location(location)
    if memory is None:
        return _allocate(name, place or Location("cpu"), nbytes, granule_nbytes, incarnation)
    if device_span(memory) is None:
        made = _over_host(name, memory, place, granule_nbytes, incarnation)
    else:
        made = _over_device(name, memory, place, granule_nbytes, incarnation)
    if nbytes not in (None, made.nbytes):
        made.close()
        raise InvalidInput(f"segment {name!r}: the memory has {made.nbytes} bytes, not {nbytes}")
    return made


def _over_host(
    name: str, memory: Buffer, place: Location | None, granule_nbytes: int | None, incarnation: int
) -> Segment:
    """The caller says on which node the memory lies; it cannot be found out here."""
    place = place or Location("cpu")
    if place.kind != "cpu":
        raise _contradiction(name, "main memory", place)
    if isinstance(memory, RawMemory) and place.index is None:
        place = parse_location(memory.location)
    return Segment.over(name, memory, granule_nbytes=granule_nbytes, incarnation=incarnation, location=str(place))


def _over_device(
    name: str, memory: Buffer, place: Location | None, granule_nbytes: int | None, incarnation: int
) -> Segment:
    made = DeviceSegment.adopt(name, memory, granule_nbytes=granule_nbytes, incarnation=incarnation)
    claims = [place] if place is not None else []
    claims += [parse_location(memory.location)] if isinstance(memory, RawMemory) else []
    for claim in claims:
        if str(claim) != made.location:
            made.close()
            raise _contradiction(name, made.location, claim)
    return made


def _allocate(name: str, place: Location, nbytes: int | None, granule_nbytes: int | None, incarnation: int) -> Segment:
    if place.path is not None:
        return _file(name, place.path, nbytes, granule_nbytes, incarnation)
    if nbytes is None:
        raise InvalidInput(f"segment {name!r} needs memory, or nbytes of new memory")
    if place.kind == "cuda":
        assert place.index is not None, "parse_location() requires it"
        return DeviceSegment.create(
            name, nbytes, device=place.index, granule_nbytes=granule_nbytes, incarnation=incarnation
        )
    return Segment.allocate(name, nbytes, granule_nbytes=granule_nbytes, incarnation=incarnation, numa_node=place.index)


def _file(name: str, path: str, nbytes: int | None, granule_nbytes: int | None, incarnation: int) -> FileSegment:
    if not os.path.exists(sidecar_path(os.path.realpath(path))):
        if nbytes is None:
            raise InvalidInput(f"{path} is no segment yet; give nbytes to make it")
        return FileSegment.create(path, nbytes, name=name, granule_nbytes=granule_nbytes, incarnation=incarnation)
    made = FileSegment.open(path, name=name, incarnation=incarnation)
    found = made.fence.granule_nbytes if made.fence is not None else None
    if nbytes not in (None, made.nbytes) or granule_nbytes not in (None, found):
        made.close()
        raise InvalidInput(f"{path} has {made.nbytes} bytes in granules of {found}, not {nbytes} in {granule_nbytes}")
    return made


def _contradiction(name: str, found: str, claimed: Location) -> InvalidInput:
    return InvalidInput(f"segment {name!r}: the memory given is {found}, not {claimed}")
