"""What a fault test asks a living master: whether its state is in order, and what is still on its way."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from moonpool.base.rpc import Call
from moonpool.master.state import PoolState
from moonpool.master.state.segments import Place

CHECK_SERVICE = "check"
Span = tuple[str, int, int]  # segment, offset, nbytes


class CheckReport(msgspec.Struct, frozen=True):
    """`on_its_way` is space that belongs to no object, by who has it: puts, copies, pins on what was removed, or
    nobody for a while. `num_pins` counts pins of processes.
    """

    problem: str | None
    num_pins: int
    on_its_way: dict[str, list[Span]]

    @property
    def homeless(self) -> list[Span]:
        return [span for spans in self.on_its_way.values() for span in spans]


class CheckPool(Call[CheckReport]):
    pass


class PassTime(Call[None]):
    seconds: float


def check_address(master_address: str) -> str:
    """Where the master of a fault test answers; `master_address` is a Unix socket's."""
    return f"{master_address}.check"


def report_on(state: PoolState) -> CheckReport:
    problem: str | None = None
    try:
        state.check_integrity()
    except AssertionError as error:
        problem = str(error) or "the state is not in order"
    names = {number: segment.name for number, segment in state.table_of_segments.by_number.items()}

    def named(spans: Iterable[tuple[Place, int]]) -> list[Span]:
        return [(names[number], offset, nbytes) for (number, offset), nbytes in spans if number in names]

    on_its_way = {
        "put": named(state.puts.spans()),
        "rest": named(state.space.spans()),
        "pin": named(state.index.pins.spans()),
        "copy": named(state.copies.spans()),
    }
    num_pins = sum(len(holders) for _, holders in state.index.pins.all())
    return CheckReport(problem, num_pins, on_its_way)
