"""The key index says what a dict would, whatever was added and removed, in batches or one by one, while it grows."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.master.state import key_index
from moonpool.master.state.key_index import KeyIndex

KEYS = st.integers(0, 400).map(lambda number: b"%d" % number if number % 3 else b"%036d" % number)


class Model:
    """The index, its keys by slot, and a dict beside them."""

    def __init__(self) -> None:
        self.keys: list[bytes | None] = []
        self.index = KeyIndex(self.keys, 1 << 20)
        self.known: dict[bytes, int] = {}
        self._free: list[int] = []

    def add(self, keys: list[bytes]) -> None:
        new = [key for key in dict.fromkeys(keys) if key not in self.known]
        slots = [self._slot(key) for key in new]
        if len(new) == 1:
            self.index.add(new[0], slots[0])
        elif new:
            self.index.add_many(new, slots)
        self.known.update(zip(new, slots, strict=True))

    def _slot(self, key: bytes) -> int:
        if self._free:
            slot = self._free.pop()
            self.keys[slot] = key
            return slot
        self.keys.append(key)
        return len(self.keys) - 1

    def discard(self, key: bytes) -> None:
        if key in self.known:
            self.index.discard(key)
            slot = self.known.pop(key)
            self.keys[slot] = None
            self._free.append(slot)

    def check(self, asked: list[bytes]) -> None:
        assert self.index.find_many(asked).tolist() == [self.known.get(key, -1) for key in asked]
        assert [self.index.find(key) for key in asked] == [self.known.get(key) for key in asked]
        assert dict(self.index.items()) == self.known
        assert len(self.index) == len(self.known)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.booleans(), st.lists(KEYS, min_size=1, max_size=60)), max_size=30))
def test_it_is_as_a_dict(steps: list[tuple[bool, list[bytes]]]) -> None:
    model = Model()
    for is_added, keys in steps:
        if is_added:
            model.add(keys)
        else:
            for key in keys:
                model.discard(key)
        model.check(keys + [b"never"] * 20)


def test_it_grows_and_shrinks_through_many_tables() -> None:
    model, rng = Model(), random.Random(1)
    for turn in range(40):
        model.add([rng.randbytes(36) for _ in range(500)])
        some = rng.sample(list(model.known), min(len(model.known), 400 if turn > 20 else 50))
        for key in some:
            model.discard(key)
        model.check([*some[:50], *rng.sample(list(model.known), 200)])
    assert len(model.known) > 5_000


def test_no_event_moves_many_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    plain = KeyIndex._move

    def counting(self: KeyIndex, most: int) -> None:
        before = self._num_moved
        plain(self, most)
        moved.append(self._num_moved - before)

    monkeypatch.setattr(KeyIndex, "_move", counting)
    model = Model()
    for number in range(200):
        model.add([b"%036d" % (number * 1000 + each) for each in range(1000)])
    assert max(moved) == key_index._MOVED_PER_KEY * 1000
    old = model.index._old
    assert old is None or len(model.index._cells) > len(old)


def test_keys_with_half_a_hash_in_common_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    class Key(bytes):
        def __hash__(self) -> int:
            return 7 << 33 | 5  # all of them: the same cell, the same upper half

    monkeypatch.setattr(key_index, "_tails_of", lambda keys: np.zeros(len(keys), np.uint64))
    model = Model()
    keys: list[bytes] = [Key(b"%d" % number) for number in range(40)]
    for key in keys:
        model.add([key])
    assert [model.index.find(key) for key in keys] == list(range(40))
    assert model.index.find(Key(b"another")) is None
