"""Store on a real pool: objects, batches, sessions, pins, tasks, lists, and finding the pool."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from facade_pool import FacadePool, facade_pool
from waiting import HANG_S, wait_until

from moonpool.base.errors import (
    AlreadyExists,
    ConfigError,
    IdentityMismatch,
    InvalidInput,
    MoonpoolError,
    NoSpace,
    NotFound,
    StaleGeneration,
)
from moonpool.store import Store
from moonpool.store.client.views import ObjectView
from moonpool.store.messages import Tier


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[FacadePool]:
    yield from facade_pool(tmp_path, num_nodes=2)


@pytest.fixture
def store(pool: FacadePool) -> Store:
    return pool.store()


def test_one_object(store: Store) -> None:
    assert store.put("poem", b"moon")
    assert not store.put("poem", b"other")
    assert store.get("poem") == store.get(b"poem") == b"moon"
    assert (store.size("poem"), store.exist("poem")) == (4, True)
    store.upsert("poem", b"a longer moon")
    assert store.get("poem") == b"a longer moon"
    assert "stored" in store.why("poem")
    assert not store.remove("poem")  # leased by the reads
    assert store.remove("poem", force=True)
    assert (store.get("poem"), store.size("poem"), store.exist("poem")) == (None, None, False)


def test_values_of_several_buffers(store: Store) -> None:
    assert store.put("parts", [b"ab", bytearray(b"cde"), memoryview(b"f")])
    left, right = bytearray(4), bytearray(2)
    assert store.get_into("parts", [left, right]) == 6
    assert left + right == b"abcdef"
    assert store.get_into("parts", bytearray(100)) == 6
    with pytest.raises(InvalidInput):
        store.get_into("parts", bytearray(5))
    assert store.get_into("none", bytearray(5)) is None


def test_ranges(store: Store) -> None:
    store.put("digits", b"0123456789")
    part, other = bytearray(3), bytearray(2)
    assert store.get_range("digits", 4, part) == 3
    assert part == b"456"
    assert store.get_ranges("digits", [(8, other), (0, part)]) == 5
    assert other + part == b"89012"
    assert store.get_range("none", 0, part) is None
    with pytest.raises(InvalidInput):
        store.get_range("digits", 8, part)


def test_many_answer_by_position(store: Store) -> None:
    results = store.put_many({"a": b"1", b"b": b"22", "huge": bytes(40 << 20)})
    assert results[:2] == [None, None]
    assert isinstance(results[2], NoSpace)
    assert isinstance(store.put_many([("a", b"x")])[0], AlreadyExists)
    assert store.get_many(["a", "none", "b"]) == [b"1", None, b"22"]
    assert store.exist_many(["none", "a"]) == [False, True]
    assert store.size_many(["b", "none", "a"]) == [2, None, 1]
    got = store.get_many_into(["b", "none"], [bytearray(2), bytearray(2)])
    assert got[0] == 2
    assert isinstance(got[1], NotFound)
    assert store.remove_many(["a", "none", "b"], force=True) == [True, True, True]


def test_views(store: Store) -> None:
    store.put("seen", b"in place")
    with store.view("seen") as view:
        assert bytes(view.pieces[0]) == b"in place"
        assert not view.is_copy
    with pytest.raises(NotFound):
        store.view("none")
    seen, missing = store.view_many(["seen", "none"])
    assert isinstance(seen, ObjectView)
    assert isinstance(missing, MoonpoolError)


def test_piece_by_piece(store: Store) -> None:
    layers = [b"first", b"", b"third layer"]
    with store.put_session("layers", [len(layer) for layer in layers]) as session:
        for index in (2, 0, 1):
            session.write(index, layers[index])
        assert not store.exist("layers")
    with store.get_session("layers") as reading:
        assert reading.piece_sizes == (5, 0, 11)
        pages = [bytearray(size) for size in reading.piece_sizes]
        for index, page in enumerate(pages):
            reading.read_into(index, page)
    assert pages == layers
    with pytest.raises(AlreadyExists):
        store.put_session("layers", [1])
    with pytest.raises(NotFound):
        store.get_session("none")


def test_a_session_left_by_an_error_leaves_nothing(store: Store) -> None:
    def write_half(then: type[Exception] | None) -> None:
        with store.put_session("half", [4, 4]) as session:
            session.write(0, b"half")
            if then is not None:
                raise then

    with pytest.raises(KeyError):
        write_half(KeyError)
    with pytest.raises(InvalidInput, match="piece 1"):
        write_half(None)
    assert not store.exist("half")
    assert store.put("half", b"free again")


def test_a_session_whose_object_is_gone_says_so(pool: FacadePool, store: Store) -> None:
    store.put("key", bytes(100))
    reading = store.get_session("key")
    store.remove("key", force=True)
    pool.advance(1000)  # past any lease: the space may be used again
    for number in range(100):
        store.put(f"other-{number}", bytes([number]) * 300_000)
    with pytest.raises(StaleGeneration), reading:
        reading.read_into(0, bytearray(100))


def test_identities(store: Store) -> None:
    with pytest.raises(InvalidInput, match="a digest of 32 bytes, not of 5"):
        store.put("block", b"kv", identity=b"short")
    store.put("block", b"kv", identity=b"m" * 32)
    with pytest.raises(IdentityMismatch):
        store.get_session("block", identity=b"x" * 32)
    with store.get_session("block", identity=b"m" * 32) as reading:
        assert reading.nbytes == 2
    assert "identity" in store.why("block", identity=b"x" * 32)


def test_pins_and_settings(pool: FacadePool, store: Store) -> None:
    store.put("pinned", b"1", pinned=True, num_replicas=2, group="g", preferred=("n1.dram",))
    (found,) = store.objects("^pinned")
    assert (found.is_pinned, found.num_replicas, found.tier) == (True, 2, Tier.DRAM)
    store.put("held", b"2")
    assert store.pin_many(["held", "none"]) == [True, False]
    pool.advance(60)  # past any lease
    assert not store.remove("held")
    store.unpin("held")
    assert store.remove("held")
    with pytest.raises(InvalidInput, match="colour"):
        store.put("x", b"", colour="red")  # type: ignore[call-arg]


def test_lists_and_removal_by_pattern(pool: FacadePool, store: Store) -> None:
    assert store.put_many([(f"{kind}/{number}", b"x") for kind in "ab" for number in range(1500)]) == [None] * 3000
    assert len(list(store.keys())) == 3000
    assert set(store.keys("^a/1.$")) == {f"a/1{digit}".encode() for digit in range(10)}
    assert store.remove_matching("^a/") == (1500, 0)
    store.pin("b/7")
    assert store.remove_all() == (1499, 1)
    assert list(store.keys()) == [b"b/7"]
    assert store.remove_all(force=True) == (1, 0)
    with pytest.raises(InvalidInput):
        list(store.keys("("))


def test_tasks(pool: FacadePool, store: Store) -> None:
    store.put("object", b"data" * 1000, preferred=("n0.dram",))
    task = store.tasks.wait(store.tasks.copy("object", ["n1.dram"]), timeout_s=HANG_S)
    assert (task.state, task.num_done) == ("done", 1)
    assert next(store.objects("^object")).num_replicas == 2
    drained = store.tasks.wait(store.tasks.drain("n0.dram"), timeout_s=HANG_S)
    assert drained.state == "done"
    assert {each.name: each.num_objects for each in store.stats().segments} == {"n0.dram": 0, "n1.dram": 1}
    assert store.get("object") == b"data" * 1000
    assert not store.tasks.cancel(drained.task_id)
    assert store.tasks.running() == []
    assert store.tasks.all() == [task, drained]
    assert store.tasks.query(12345678) is None
    with pytest.raises(NotFound):
        store.tasks.wait(12345678)
    with pytest.raises(NotFound):
        store.tasks.move("none", "n0.dram", "n1.dram")


def test_figures(store: Store) -> None:
    store.put("a", b"123")
    store.get("a")
    assert store.counters()["bytes_read"] == 3
    assert store.stats().num_objects == 1
    assert any(family.name == "moonpool_pool_objects" for family in store.metrics())


def test_keys_that_are_none(store: Store) -> None:
    for bad in ("", b"", "x" * 70_000, "\ud800", 7):
        with pytest.raises(InvalidInput):
            store.get(bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput):
        store.get_many("abc")


def test_the_master_is_found(pool: FacadePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("MOONPOOL_MASTER", raising=False)
    with pytest.raises(ConfigError, match="no service runs on this machine; give its master's address"):
        Store()
    monkeypatch.setenv("MOONPOOL_MASTER", pool.address)
    with Store() as store:
        assert store.put("found", b"it")


def test_files_that_let_it_in_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_SECRET_FILE", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="none"):
        Store(f"unix:{tmp_path}/m.sock")


def test_close_is_idempotent_and_leaves_no_folder(pool: FacadePool, tmp_path: Path) -> None:
    store = pool.store(run_dir=str(tmp_path / "mine"))
    store.put("a", b"1")
    feed = store.events()
    next(feed)
    store.close()
    store.close()
    assert next(feed, None) is None
    with pytest.raises(MoonpoolError):
        store.get("a")
    wait_until(lambda: len(pool.master.pool.feed) == 0, "the feed has ended")


def test_it_needs_no_torch_and_loads_little() -> None:
    program = """
import sys
for name in ("torch", "fastapi", "transformers", "safetensors"):
    sys.modules[name] = None  # importing it is an error from here on
import moonpool.store
assert not [name for name in sys.modules if name.startswith("numpy.")], "the package alone loads nothing"
from moonpool.store import Store
loaded = {name.split(".")[0] for name, module in sys.modules.items() if module is not None}
print(sorted(loaded & {"torch", "fastapi", "transformers", "safetensors", "rich", "typer"}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
