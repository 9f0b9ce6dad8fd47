"""Small objects that lie side by side are written by one copy; what cannot be is written one by one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_pool import LocalPool

from moonpool.base.errors import InvalidInput, StaleGeneration, Unavailable
from moonpool.store.client import Put
from moonpool.store.client.object_runs import neighbours
from moonpool.store.messages import GRANULE_NBYTES, Placement
from moonpool.transfer.transports.mapped import MappedWriter


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 2), st.integers(1, 3 * GRANULE_NBYTES)), max_size=40))
def test_runs_hold_every_object_once_in_order_and_without_gaps(objects: list[tuple[str, int, int]]) -> None:
    at, places, granules = 0, [], [-(-nbytes // GRANULE_NBYTES) for _, _, nbytes in objects]
    for (segment, gap, _), count in zip(objects, granules, strict=True):
        at += gap * GRANULE_NBYTES
        places.append(Placement(segment, at, 1, 1))
        at += count * GRANULE_NBYTES
    runs = list(neighbours(places, granules))
    assert [position for run in runs for position in range(run.start, run.stop)] == list(range(len(objects)))
    for run in runs:
        end = places[run.start].offset
        for place, count in zip(places[run], granules[run], strict=True):
            assert (place.segment, place.offset) == (places[run.start].segment, end)
            end += count * GRANULE_NBYTES
    for run, after in itertools.pairwise(runs):  # no two of them could be one
        last, first = places[run.stop - 1], places[after.start]
        is_gap = last.offset + granules[run.stop - 1] * GRANULE_NBYTES != first.offset
        assert is_gap or last.segment != first.segment


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[LocalPool]:
    made = LocalPool(tmp_path)
    yield made
    made.close()


def puts(count: int) -> list[Put]:
    """Of sizes that fill their granules and of such that do not, of one piece and of several."""
    return [
        Put(b"key-%d" % number, [bytes([number % 251]) * (1 + 997 * number % 9000)] * (1 + number % 3))
        for number in range(count)
    ]


def value_of(put: Put) -> bytes:
    pieces = [each for each in put.buffers if isinstance(each, bytes)]
    assert len(pieces) == len(put.buffers)
    return b"".join(pieces)


def test_a_batch_of_small_objects_arrives_whole(pool: LocalPool, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    plain = MappedWriter.write_run

    def counting(self: MappedWriter, offset: int, parts: Any, stamps: Any) -> bool:
        written.append(len(set(stamps.tolist())))  # a generation for each object
        return plain(self, offset, parts, stamps)

    monkeypatch.setattr(MappedWriter, "write_run", counting)
    client, batch = pool.client(), puts(60)
    assert client.put_objects(batch) == [None] * 60
    assert sum(written) == 60
    assert len(written) < 10
    for put in batch:
        assert client.get(put.key) == value_of(put)
    pool.master.state.check_integrity()


def test_a_run_that_is_refused_is_written_one_by_one(pool: LocalPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MappedWriter, "write_run", lambda *args: False)
    client, batch = pool.client(), puts(20)
    assert client.put_objects(batch) == [None] * 20
    assert client.get(b"key-7") == value_of(batch[7])


def test_of_a_run_only_those_fail_whose_space_was_taken_back(pool: LocalPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the grant and the write the owner stamps one object's space with a newer generation."""
    plain = MappedWriter.write_run

    def late(self: MappedWriter, offset: int, parts: Any, stamps: Any) -> bool:
        fence = self._fence
        assert fence is not None
        count = int((stamps == stamps[0]).sum())  # granules of the first object
        fence.stamp(offset + count * GRANULE_NBYTES, 1, int(stamps[0]) + 1_000_000)
        return plain(self, offset, parts, stamps)

    monkeypatch.setattr(MappedWriter, "write_run", late)
    client, batch = pool.client(), puts(10)
    outcomes = client.put_objects(batch)
    assert [position for position, error in enumerate(outcomes) if error is not None] == [1]
    assert isinstance(outcomes[1], StaleGeneration)
    assert client.get(batch[2].key) is not None
    assert not client.exist_many([batch[1].key])[0]


def test_nothing_to_put_is_nothing_to_do(pool: LocalPool) -> None:
    client = pool.client()
    assert client.put_objects([]) == []
    assert isinstance(client.put_objects([Put(b"", [b"1"])])[0], InvalidInput)


def test_a_master_that_is_gone_is_told_by_position(pool: LocalPool) -> None:
    client = pool.client(retry_s=0.0)
    pool.loop.run(pool.master.close())
    outcomes = client.put_objects(puts(3))
    assert all(isinstance(error, Unavailable) for error in outcomes)
    assert len(outcomes) == 3
