"""Records become a trace: numbers by first appearance, regrouped blocks, nothing but numbers; the store is bounded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.base.errors import ConfigError, InvalidInput
from moonpool.base.keys import chain_keys
from moonpool.conductor.messages import DecisionRecord
from moonpool.conductor.records.export import MOONCAKE_BLOCK_TOKENS, ExportConfig, TraceExport
from moonpool.conductor.records.store import RecordFilter, RecordStore
from moonpool.sim.fleet import make_fleet
from moonpool.sim.systems import Goals
from moonpool.sim.systems import system as system_by_name
from moonpool.traces.mooncake_jsonl import read_jsonl, write_jsonl

ROOT = b"r" * 32
BLOCK = 16


def store_of(prompts: list[list[int]], **fields: Any) -> RecordStore:
    store = RecordStore(10_000)
    for number, tokens in enumerate(prompts):
        record = DecisionRecord(
            request_id=f"secret-name-{number}",
            routed_at_s=1.7e9 + number * 0.25,
            num_tokens=len(tokens),
            max_tokens=100,
            output_tokens=7,
            outcome="done",
            **fields,
        )
        store.add(record, tenant="secret-tenant", keys=chain_keys(ROOT, tokens, BLOCK))
    return store


def record_of(store: RecordStore, number: int) -> DecisionRecord:
    record = store.get(f"secret-name-{number}")
    assert record is not None
    return record


def exported(store: RecordStore, config: ExportConfig) -> tuple[bytes, list[dict[str, Any]]]:
    export = TraceExport(config)
    lines = [export.line(kept) for kept in store.select(RecordFilter())]
    data = b"".join(msgspec.json.encode(line) + b"\n" for line in lines if line is not None)
    return data, [json.loads(line) for line in data.splitlines()]


PROMPTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 200), st.integers(0, 2), st.integers(0, 80)).map(
        lambda one: [one[0] + 1] * one[1] + [one[2] + 10] * one[3] + [99]
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60)
@given(PROMPTS, st.sampled_from([16, 32, 64]))
def test_blocks_have_one_number_exactly_when_their_whole_prefix_is_the_same(
    prompts: list[list[int]], group: int
) -> None:
    _, lines = exported(store_of(prompts), ExportConfig(BLOCK, group))
    seen: dict[tuple[int, ...], int] = {}
    highest = -1
    for tokens, line in zip(prompts, lines, strict=True):
        assert line["input_length"] == len(tokens)
        assert len(line["hash_ids"]) == -(-len(tokens) // group)
        for place, number in enumerate(line["hash_ids"]):
            prefix = tuple(tokens[: (place + 1) * group])
            if len(prefix) % BLOCK == 0 and prefix in seen:
                assert number == seen[prefix]
            else:
                assert number == highest + 1  # numbered by first appearance, without gaps
                highest = number
            seen[prefix] = number
    assert {number for line in lines for number in line["hash_ids"]} == set(range(highest + 1))


def test_the_trace_reads_back_with_the_simulators_reader(tmp_path: Path) -> None:
    shared = list(range(600))
    prompts = [shared, [*shared, *range(1000, 1700)], [*shared[:512], *range(2000, 2100)], [5]]
    data, lines = exported(store_of(prompts), ExportConfig(BLOCK, MOONCAKE_BLOCK_TOKENS))
    path = tmp_path / "live.jsonl"
    path.write_bytes(data)
    trace = read_jsonl(path)
    assert len(trace) == 4
    assert [list(request.block_ids) for request in trace] == [[0, 1], [0, 2, 3], [0, 4], [5]]
    assert [line["timestamp"] for line in lines] == [0, 250, 500, 750]
    assert [request.arrival_s for request in trace] == pytest.approx([0.0, 0.25, 0.5, 0.75])
    assert [request.num_input for request in trace] == [600, 1300, 612, 1]


def recorded_store(prompts: list[list[int]]) -> RecordStore:
    """Records of requests one after the other, each of which reused what those before it had computed."""
    store, known = store_of(prompts), set()
    for number, tokens in enumerate(prompts):
        keys = chain_keys(ROOT, tokens, BLOCK)
        reusable = keys[: (len(tokens) - 1) // BLOCK]
        run = next((at for at, key in enumerate(reusable) if key not in known), len(reusable))
        record = record_of(store, number)
        record.cached_tokens, record.routed_at_s = run * BLOCK, 1.7e9 + 60.0 * number
        known |= set(keys)
    return store


def test_a_replay_of_the_exported_trace_reuses_what_was_recorded(tmp_path: Path) -> None:
    """By default, without a word about block sizes to either side."""
    system, talk = list(range(200)), [7_000 + token for token in range(150)]
    prompts = [[*system, *talk[:end], 5] for end in (10, 60, 150)] + [[*system[:70], 9], [1] * 40, [*system, *talk, 6]]
    store = recorded_store(prompts)
    data, lines = exported(store, ExportConfig(BLOCK))
    assert {line["block_tokens"] for line in lines} == {BLOCK}
    path = tmp_path / "live.jsonl"
    path.write_bytes(data)
    trace = read_jsonl(path)
    fleet = make_fleet(num_nodes=2)
    jobs = system_by_name("moonpool").make(trace, fleet, Goals()).run()
    recorded = [record_of(store, number).cached_tokens for number in range(len(prompts))]
    assert [job.reused_tokens for job in jobs] == recorded
    assert sum(recorded) > 500


def test_a_trace_with_other_blocks_is_written_with_their_size(tmp_path: Path) -> None:
    data, _ = exported(store_of([[1] * 40, [1] * 90]), ExportConfig(BLOCK))
    path, again = tmp_path / "live.jsonl", tmp_path / "again.jsonl"
    path.write_bytes(data)
    write_jsonl(read_jsonl(path), again)
    assert read_jsonl(again).block_tokens == BLOCK
    with pytest.raises(InvalidInput, match="which block size"):
        read_jsonl(path, block_tokens=512)


def test_only_numbers_leave() -> None:
    tokens = list(range(1000))
    data, lines = exported(store_of([tokens]), ExportConfig(BLOCK, MOONCAKE_BLOCK_TOKENS))
    assert b"secret" not in data
    for key in chain_keys(ROOT, tokens, BLOCK):
        assert key[:8] not in data
        assert key[:8].hex().encode() not in data
    assert list(lines[0]) == ["timestamp", "input_length", "output_length", "hash_ids"]
    assert all(isinstance(number, int) for number in lines[0]["hash_ids"])


def test_requests_without_an_answer_are_left_out() -> None:
    store = store_of([[1] * 20, [2] * 20])
    record_of(store, 0).output_tokens = 0
    _, lines = exported(store, ExportConfig(BLOCK, 16))
    assert [line["hash_ids"] for line in lines] == [[0, 1]]


def test_a_clock_set_back_stands_still() -> None:
    store = store_of([[1], [2], [3]])
    record_of(store, 1).routed_at_s -= 1000
    _, lines = exported(store, ExportConfig(BLOCK))
    assert [line["timestamp"] for line in lines] == [0, 0, 500]


def test_prompts_without_fingerprints_share_nothing() -> None:
    store = RecordStore(10, max_prints_nbytes=16)
    for name in "ab":
        record = DecisionRecord(request_id=name, routed_at_s=1.0, num_tokens=32, max_tokens=1, output_tokens=1)
        store.add(record, keys=chain_keys(ROOT, [1] * 32, BLOCK))
    assert store.prints_nbytes == 16  # the older one gave up its own
    _, lines = exported(store, ExportConfig(BLOCK, 16))
    assert [line["hash_ids"] for line in lines] == [[0, 1], [2, 3]]


def test_blocks_that_cannot_be_regrouped_are_refused() -> None:
    for wrong in ((48, 512), (0, 512), (1024, 512)):
        with pytest.raises(ConfigError):
            ExportConfig(*wrong)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9)), max_size=80), st.integers(1, 6), st.integers(0, 200))
def test_the_store_keeps_its_bounds_and_the_newest(
    additions: list[tuple[int, int]], capacity: int, max_nbytes: int
) -> None:
    store = RecordStore(capacity, max_nbytes)
    order: list[str] = []
    attempts: dict[str, int] = {}
    for number, (name, num_keys) in enumerate(additions):
        request_id = f"r{name}"
        attempts[request_id] = attempts.get(request_id, 0) + 1 if request_id in order else 1
        order = [one for one in order if one != request_id][-capacity + 1 :] if capacity > 1 else []
        order.append(request_id)
        record = DecisionRecord(request_id=request_id, routed_at_s=float(number), num_tokens=1, max_tokens=1)
        store.add(record, keys=[bytes([number % 256]) * 32] * num_keys)
        assert record.attempt == attempts[request_id]
        assert [one.request_id for one in store.find(RecordFilter(), 100)] == order
        assert store.prints_nbytes <= max_nbytes
        kept = list(store.select(RecordFilter()))
        assert store.prints_nbytes == sum(len(one.prints) for one in kept)
        assert len(kept) == len(store) <= capacity


def test_find_filters_by_outcome_tenant_and_worker() -> None:
    store = RecordStore(100)
    for number in range(20):
        record = DecisionRecord(request_id=f"r{number}", routed_at_s=float(number), num_tokens=1, max_tokens=1)
        record.prefill, record.decode = f"p{number % 2}", f"d{number % 3}"
        record.outcome = "overloaded" if number % 5 == 0 else "done"
        store.add(record, tenant=f"t{number % 4}")

    def names(limit: int = 100, **wanted: Any) -> list[str]:
        return [one.request_id for one in store.find(RecordFilter(**wanted), limit)]

    assert names(outcome="overloaded") == ["r0", "r5", "r10", "r15"]
    assert names(outcome="overloaded", limit=2) == ["r10", "r15"]
    assert names(tenant="t3") == ["r3", "r7", "r11", "r15", "r19"]
    assert names(worker="d2", limit=4) == ["r8", "r11", "r14", "r17"]
    assert names(worker="p0", tenant="t2") == ["r2", "r6", "r10", "r14", "r18"]
    assert names(limit=0) == []
    found = store.get("r7")
    assert found is not None
    assert found.decode == "d1"
    assert store.get("gone") is None


def test_memory_of_fingerprints_is_what_is_stated() -> None:
    store = RecordStore(2_000, max_prints_nbytes=1 << 20)
    keys = [bytes([place % 256]) * 32 for place in range(188)]  # a prompt of 12,035 tokens
    for number in range(3_000):
        store.add(DecisionRecord(request_id=str(number), routed_at_s=0.0, num_tokens=1, max_tokens=1), keys=keys)
    assert len(store) == 2_000
    assert (1 << 20) - 188 * 8 < store.prints_nbytes <= 1 << 20
    with pytest.raises(ConfigError):
        RecordStore(-1)
    none = RecordStore(0)
    none.add(DecisionRecord(request_id="a", routed_at_s=0.0, num_tokens=1, max_tokens=1), keys=keys)
    assert (len(none), none.prints_nbytes, none.get("a")) == (0, 0, None)
