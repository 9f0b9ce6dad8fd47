"""Configuration from plain data: defaults, unknown keys at any depth, wrong types."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from moonpool.base.config import from_json, from_mapping
from moonpool.base.errors import ConfigError


@dataclass(frozen=True)
class Inner:
    depth: int = 3


@dataclass(frozen=True)
class Outer:
    name: str
    ratio: float = 0.5
    inner: Inner = field(default_factory=Inner)
    other: Inner | None = None


def test_defaults_and_nested_values() -> None:
    assert from_mapping(Outer, {"name": "a"}) == Outer("a")
    config = Outer("a", 1.0, Inner(9), Inner(4))
    assert from_json(Outer, '{"name": "a", "ratio": 1.0, "inner": {"depth": 9}, "other": {"depth": 4}}') == config


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"name": "a", "nmae": 1}, "nmae"),
        ({"name": "a", "inner": {"dpeth": 1}}, "inner.dpeth"),
        ({"name": "a", "other": {"dpeth": 1}}, "other.dpeth"),
    ],
)
def test_unknown_keys_are_named(values: dict[str, object], param: str) -> None:
    with pytest.raises(ConfigError, match=param) as caught:
        from_mapping(Outer, values)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "values", [{}, {"name": 1}, {"name": "a", "ratio": "x"}, {"name": "a", "inner": {"depth": 1.5}}]
)
def test_missing_and_wrong_types(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="bad setting"):
        from_mapping(Outer, values)


@pytest.mark.parametrize("text", ["{", "[]", "3", "null"])
def test_not_a_json_object(text: str) -> None:
    with pytest.raises(ConfigError):
        from_json(Outer, text)


@dataclass(frozen=True)
class LogPlace:
    log_dir: str | None = None


@dataclass(frozen=True)
class Places:
    run_dir: str
    secret_file: str | None = None
    title: str = "a/b"
    inner: LogPlace = field(default_factory=LogPlace)


def test_paths_become_absolute_where_they_enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = from_mapping(Places, {"run_dir": "run", "secret_file": "/etc/s", "inner": {"log_dir": "../logs"}})
    assert made == Places(f"{tmp_path}/run", "/etc/s", "a/b", LogPlace(f"{tmp_path.parent}/logs"))
    assert from_mapping(Places, {"run_dir": "x"}).secret_file is None
