"""The catalog of samples: fields from several stored batches, replaced and removed ones, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moonpool.integrations.mooncake.batch_catalog import DataProtoCatalog
from moonpool.integrations.mooncake.batch_refs import export_dataproto_ref
from moonpool.integrations.mooncake.structured_store import MooncakeBundleTransfer


class FakeStore:
    def put(self, key: str, value: Any, config: Any = None) -> int:
        return 0

    def get(self, key: str) -> bytes:
        return b""

    def remove(self, key: str, force: bool = False) -> int:
        return 0


def stored(num_rows: int, *fields: str) -> dict[str, Any]:
    """A handle of a batch with these fields."""
    transfer = MooncakeBundleTransfer(FakeStore())
    return export_dataproto_ref(transfer.put({name: np.arange(num_rows) for name in fields}))


def manifest(handle: dict[str, Any]) -> str:
    return str(handle["stage_refs"]["default"]["manifest_key"])


def test_fields_of_several_batches_are_found_in_the_order_of_the_keys() -> None:
    catalog = DataProtoCatalog()
    first, second = stored(2, "ids", "mask"), stored(2, "score")
    catalog.update("p", ["a", "b"], tags=[{"x": 1}, {}], handle=first)
    assert catalog.update("p", ["b", "a"], tags=[{}, {"y": 2}], handle=second)["fields"] == ["ids", "mask", "score"]
    assert catalog.list() == {"p": {"a": {"x": 1, "y": 2}, "b": {}}}
    plan = catalog.resolve("p", ["a", "b"])
    assert plan["field_groups"] == [
        {"fields": ["ids", "mask"], "locations": [(manifest(first), 0), (manifest(first), 1)]},
        {"fields": ["score"], "locations": [(manifest(second), 1), (manifest(second), 0)]},
    ]
    assert set(plan["handles"]) == {manifest(first), manifest(second)}


def test_replaced_and_removed_places_are_forgotten() -> None:
    catalog = DataProtoCatalog()
    first, second = stored(1, "x"), stored(1, "x")
    catalog.update("p", ["a"], handle=first)
    catalog.update("p", ["a"], handle=second)
    assert list(catalog.resolve("p", ["a"])["handles"]) == [manifest(second)]
    catalog.remove("p", ["a", "other"])
    assert catalog.list() == {}


def test_wrong_calls_change_nothing() -> None:
    catalog = DataProtoCatalog()
    catalog.update("p", ["a", "b"], tags=[{}, {}])
    catalog.update("p", ["a"], handle=stored(1, "x"))
    two_stages = stored(1, "x")
    two_stages["stage_refs"]["more"] = {"manifest_key": "k"}
    calls: list[Callable[[], object]] = [
        lambda: catalog.update("p", ["a", "b"], tags=[{}]),
        lambda: catalog.update("p", ["a"]),
        lambda: catalog.update("p", ["a", "a"], tags=[{}, {}]),
        lambda: catalog.update("new", ["a", "b"], handle=stored(1, "x")),
        lambda: catalog.update("new", ["a"], handle=two_stages),
        lambda: catalog.update("new", ["a"], handle={**stored(1, "x"), "version": 9}),
        lambda: catalog.resolve("p", "a"),
        lambda: catalog.resolve("p", ["a"], "x"),
        lambda: catalog.resolve("p", ["c"]),
        lambda: catalog.resolve("p", ["b"]),
        lambda: catalog.resolve("p", ["a", "b"], ["x"]),
    ]
    for call in calls:
        with pytest.raises(ValueError):
            call()
    assert catalog.list() == {"p": {"a": {}, "b": {}}}
