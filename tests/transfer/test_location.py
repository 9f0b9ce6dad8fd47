from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.errors import ConfigError, InvalidInput
from moonpool.transfer.memory.location import Location, parse_location
from moonpool.transfer.topology.devices import DevicePlace, Gpu, Hardware, NumaNode
from moonpool.transfer.topology.matrix import locations


@pytest.mark.parametrize(
    ("text", "location"),
    [
        ("cpu", Location("cpu")),
        ("cpu:0", Location("cpu", 0)),
        ("cuda:7", Location("cuda", 7)),
        ("ssd:/mnt/kv:1", Location("ssd", path="/mnt/kv:1")),
    ],
)
def test_text_and_value(text: str, location: Location) -> None:
    assert parse_location(text) == location
    assert str(location) == text


@pytest.mark.parametrize(
    "text",
    ["", "cpu:", "cpu:-1", "cpu:x", "cpu:01", "cpu:1 ", "cuda", "cuda:", "cuda:1:2", "ssd", "ssd:", "ssd:x", "gpu:0"],
)
def test_nonsense_is_refused_with_what_was_expected(text: str) -> None:
    with pytest.raises(ConfigError, match="no memory location; say"):
        parse_location(text)


@given(st.text(max_size=20))
def test_whatever_is_taken_comes_back_as_it_was(text: str) -> None:
    try:
        location = parse_location(text)
    except InvalidInput:
        return
    assert str(location) == text


def test_the_topologys_words_are_locations() -> None:
    hardware = Hardware(nodes=(NumaNode(node=3, cpus=()),), gpus=(Gpu(index=2, place=DevicePlace()),))
    assert [str(parse_location(text)) for text in locations(hardware)] == ["cpu:3", "cuda:2"]
