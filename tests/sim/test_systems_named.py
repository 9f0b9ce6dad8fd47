"""Systems by name on one fleet, features off, and where times come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from world_cases import chat

from moonpool.base.errors import InvalidInput, MoonpoolError, UnknownModel
from moonpool.sim.fleet import make_fleet
from moonpool.sim.physics.paper_fit import paper_cost
from moonpool.sim.systems import FEATURES, SYSTEMS, Goals, System, system, without
from moonpool.sim.world.results import Results

TRACE = chat(60, seed=2)
FLEET = make_fleet(num_nodes=4)


def run(chosen: System, goals: Goals = Goals(), **fleet: Any) -> Results:  # noqa: B008  # it never changes
    machines = make_fleet(num_nodes=4, **fleet) if fleet else FLEET
    return Results.of(chosen.make(TRACE, machines, goals).run())


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_serves_the_trace(name: str) -> None:
    results = run(system(name))
    assert len(results) == len(TRACE)
    assert results.is_done.sum() + sum(results.refusals.values()) == len(TRACE)
    assert results.summary()["num_done"] > 0


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_is_switched_off(feature: str) -> None:
    disks: dict[str, Any] = {"ssd_nbytes": 1e12, "dram_nbytes": 5e9} if feature == "ssd" else {}
    full, less = run(system("moonpool"), **disks), run(without(feature), **disks)
    if feature == "pool":
        assert less.hit_share("remote") == less.hit_share("dram") == 0 < full.hit_share("remote")
    if feature == "ssd":
        assert less.hit_share("ssd") == 0
    assert len(less) == len(full)


def test_admission_refuses_and_without_it_nothing_is() -> None:
    goals = Goals(ttft_s=1.0)
    assert run(system("moonpool"), goals).refusals
    assert not run(without("admission"), goals).refusals
    assert not run(system("vllm"), goals).refusals


def test_unknown_names_are_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidInput, match="no system 'sglang'; there are moonpool, paper"):
        system("sglang")
    with pytest.raises(InvalidInput, match="'speed' is not a feature"):
        without("speed")
    with pytest.raises(InvalidInput, match="no SSD to be without"):
        run(without("ssd"))


def test_times_come_from_the_paper_for_its_own_machine_only() -> None:
    assert make_fleet().cost == paper_cost()
    assert "Fig 14" in str(make_fleet().facts()["times"])
    other = make_fleet(gpu="h800")
    assert other.cost != paper_cost()
    assert "roofline" in str(other.facts()["times"])


def test_times_from_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    prefills = [[n, 0, 0.01 + n * 1e-4] for n in (100, 1000, 5000)]
    decodes = [[n, n * 100, 0.02 + n * 1e-3] for n in (1, 4, 16)]
    path.write_text(json.dumps({"prefills": prefills, "decodes": decodes}))
    fleet = make_fleet(profile=path)
    assert fleet.facts()["times"] == "fitted to the measured steps in measured.json"
    assert fleet.cost.prefill_s(2000) == pytest.approx(0.21, rel=0.01)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("nonsense", "malformed"),
        ('{"prefills": []}', "decodes"),
        ('{"prefills": [], "decodes": []}', "no prefill sample"),
        ('{"prefills": [[1, 0]], "decodes": []}', "length"),
        ('{"prefills": [], "decodes": [], "pulls": []}', "pulls"),
    ],
)
def test_a_wrong_profile_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=complaint):
        make_fleet(profile=path)


def test_a_model_from_its_config(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    (folder / "config.json").write_text(json.dumps({**sizes, "vocab_size": 100}))
    assert make_fleet(model=str(folder)).facts()["model"] == "mine"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"model": "gpt-9"}, UnknownModel),
        ({"model": "none.json"}, InvalidInput),
        ({"gpu": "abacus"}, InvalidInput),
        ({"num_nodes": 4, "num_prefill": 4}, InvalidInput),
        ({"num_prefill": 0}, InvalidInput),
        ({"num_gpus": 1}, InvalidInput),  # 70B do not fit
    ],
)
def test_fleets_that_cannot_be(arguments: dict[str, object], error: type[MoonpoolError]) -> None:
    with pytest.raises(error):
        make_fleet(**arguments)  # type: ignore[arg-type]
