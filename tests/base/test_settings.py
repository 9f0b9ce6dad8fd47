"""The settings' core: one name in three places, values that mean the same in all of them, and which layer wins."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.cluster import WorkerRole
from moonpool.base.errors import ConfigError
from moonpool.base.settings import (
    NOT_SHOWN,
    Layer,
    Source,
    build,
    from_environment,
    from_table,
    merge,
    settings_of,
    unknown_variables,
)


@dataclass(frozen=True)
class InnerRule:
    rate_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Example:
    name: str  # who it is
    role: WorkerRole = WorkerRole.PREFILL
    dtype: Literal["float32", "bfloat16"] | None = None
    dram_nbytes: int = 2**28
    kv: str | None = None
    max_num_seqs: int = 8
    ratio: float = 0.5
    verify: bool = True
    tags: tuple[str, ...] = ()
    api_key: str | None = None
    state_dir: str = "/state"
    rule: InnerRule = field(default_factory=InnerRule)
    old_port: int | None = field(default=None, metadata={"hidden": True})


SETTINGS = settings_of(Example)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda text: text != "none")
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "name": TEXTS,
    "role": st.sampled_from(["prefill", "decode"]),
    "dtype": st.sampled_from([None, "float32", "bfloat16"]),
    "dram_nbytes": st.integers(0, 2**50),
    "kv": st.sampled_from([None, "64GB", "2GiB", "7"]),
    "max_num_seqs": st.integers(-(2**40), 2**40),
    "ratio": st.floats(allow_nan=False),
    "verify": st.booleans(),
    "tags": st.lists(TEXTS, max_size=3),
    "api_key": st.none() | TEXTS,
    "state_dir": TEXTS,
    "rule_rate_s": st.none() | st.floats(allow_nan=False),
}
LAYERS = st.fixed_dictionaries({}, optional=VALUES)


def test_one_name_in_three_places() -> None:
    names = {each.field: (each.option, each.key, each.variable) for each in SETTINGS.values()}
    assert names["dram_nbytes"] == ("--dram", "dram", "MOONPOOL_DRAM")
    assert names["max_num_seqs"] == ("--max-num-seqs", "max_num_seqs", "MOONPOOL_MAX_NUM_SEQS")
    assert names["rule_rate_s"] == ("--rule-rate-s", "rule_rate_s", "MOONPOOL_RULE_RATE_S")


@given(LAYERS, LAYERS, LAYERS)
def test_the_command_line_goes_over_the_environment_over_the_file_over_the_default(
    typed: dict[str, Any], environment: dict[str, Any], file: dict[str, Any]
) -> None:
    layers = [Layer(Source.COMMAND_LINE, typed), Layer(Source.ENVIRONMENT, environment), Layer(Source.FILE, file)]
    merged = merge(SETTINGS, layers)
    for name, setting in SETTINGS.items():
        holders = [layer for layer in layers if name in layer.values]
        if holders:
            assert (merged[name].value, merged[name].source) == (holders[0].values[name], holders[0].source)
        elif setting.is_required:
            assert name not in merged
        else:
            assert (merged[name].value, merged[name].source) == (setting.default, Source.DEFAULT)


@given(LAYERS)
def test_a_file_that_states_values_gives_them_back(values: dict[str, Any]) -> None:
    text = "\n".join(f"{SETTINGS[name].key} = {SETTINGS[name].to_toml(value)}" for name, value in values.items())
    assert from_table(SETTINGS, tomllib.loads(text)) == (values, [])


@given(LAYERS)
def test_the_environment_and_a_file_make_the_same_configuration(values: dict[str, Any]) -> None:
    values = {name: value for name, value in values.items() if not (name == "tags" and "," in "".join(value))}
    values = {**values, "name": "me", "tags": [tag.strip() for tag in values.get("tags", ()) if tag.strip()]}
    table = {SETTINGS[name].key: "none" if value is None else value for name, value in values.items()}
    texts = {
        SETTINGS[name].variable: "none" if value is None else ",".join(value) if name == "tags" else str(value)
        for name, value in values.items()
    }
    stated = {name: value for name, value in texts.items() if value}  # an empty variable states nothing
    by_file, faults = from_table(SETTINGS, {key: value for key, value in table.items() if value not in ("", [])})
    assert not faults
    assert from_environment(SETTINGS, stated) == by_file
    assert build(Example, merge(SETTINGS, [Layer(Source.FILE, by_file)])).name == "me"


@pytest.mark.parametrize(
    ("variable", "text", "says"),
    [
        ("MOONPOOL_DRAM", "lots", "MOONPOOL_DRAM 'lots' is not a size"),
        ("MOONPOOL_MAX_NUM_SEQS", "many", "MOONPOOL_MAX_NUM_SEQS must be a whole number, not 'many'"),
        ("MOONPOOL_VERIFY", "maybe", "MOONPOOL_VERIFY must be true or false, not 'maybe'"),
        ("MOONPOOL_ROLE", "cook", "MOONPOOL_ROLE cannot be 'cook'; choose one of: prefill, decode"),
        ("MOONPOOL_MAX_NUM_SEQS", "tcp://10.0.0.1:80", "enableServiceLinks: false"),
    ],
)
def test_a_wrong_variable_is_named(variable: str, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        from_environment(SETTINGS, {variable: text})
    assert says in str(raised.value)


@pytest.mark.parametrize("text", ["1", "true", "YES", "on"])
def test_words_for_true(text: str) -> None:
    assert from_environment(SETTINGS, {"MOONPOOL_VERIFY": text}) == {"verify": True}


def test_what_the_environment_does_not_state() -> None:
    assert from_environment(SETTINGS, {"MOONPOOL_NAME": "", "MOONPOOL_OLD_PORT": "3", "PATH": "/bin"}) == {}
    assert from_environment(SETTINGS, {"MOONPOOL_STATE": "/a"}) == {"state_dir": "/a"}, "its former name"
    assert from_environment(SETTINGS, {"MOONPOOL_STATE": "/a", "MOONPOOL_STATE_DIR": "/b"}) == {"state_dir": "/b"}


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("drma", "1GB", "'drma' is unknown; did you mean 'dram'?"),
        ("dram_nbytes", "1GB", "'dram_nbytes' is unknown; did you mean 'dram'?"),
        ("max-num-seqs", 3, "'max-num-seqs' is unknown; did you mean 'max_num_seqs'?"),
        ("zzz", 3, "'zzz' is unknown"),
        ("old_port", 3, "'old_port' is unknown"),
        ("rule", {"rate_s": 1}, "'rule' is unknown"),
        ("max_num_seqs", "3", "max_num_seqs must be a whole number, not '3'"),
        ("max_num_seqs", True, "max_num_seqs must be a whole number, not True"),
        ("ratio", "1", "ratio must be a number, not '1'"),
        ("verify", 1, "verify must be true or false, not 1"),
        ("dram", 1.5, 'dram must be a size in quotes, such as "64GB", not 1.5'),
        ("kv", "much", "kv 'much' is not a size"),
        ("kv", 64, 'kv must be a size in quotes, such as "64GB", not 64'),
        ("tags", "a", 'tags must be a list of texts, such as ["a", "b"]'),
        ("role", "cook", "role cannot be 'cook'; choose one of: prefill, decode"),
        ("name", "none", None),
        ("dram", 1000, None),
        ("ratio", 1, None),
    ],
)
def test_each_fault_of_a_file_names_its_key(key: str, value: Any, says: str | None) -> None:
    values, faults = from_table(SETTINGS, {key: value, "max_num_seqs" if key != "max_num_seqs" else "name": "x"})
    if says is None:
        assert len(values) == 1
    else:
        assert faults[0].startswith(says)
    assert len(faults) == (1 if says is None or key == "max_num_seqs" else 2), "every fault is reported"


def test_a_secret_is_never_shown() -> None:
    assert SETTINGS["api_key"].shown("sk-123") == NOT_SHOWN
    _, faults = from_table(SETTINGS, {"api_key": 123})
    assert faults == [f"api_key must be a text in quotes, not {NOT_SHOWN}"]
    assert SETTINGS["state_dir"].shown("/a") == '"/a"'


def test_a_misspelt_variable_is_reported_and_others_are_left_alone() -> None:
    known = [each.variable for each in SETTINGS.values()]
    assert unknown_variables(["MOONPOOL_DRMA", "MOONPOOL_DRAM", "MOONPOOL_QQQQ", "HOME"], known) == [
        "MOONPOOL_DRMA is not a setting; did you mean MOONPOOL_DRAM?"
    ]
