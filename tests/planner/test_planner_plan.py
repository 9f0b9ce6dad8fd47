"""The whole plan: parts fit together, the same twice, the simulator agrees, and `moonpool plan` as a user types it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from forked_cli import Command, forked_cli
from trace_cases import HOURS, hour, run_lru, run_share

from moonpool.base.errors import InvalidInput
from moonpool.planner.check import Checked, Run, busiest_part, cluster_run
from moonpool.planner.plan import ClusterPlan, make_plan
from moonpool.planner.price import Prices
from moonpool.planner.split import Estimate, Targets
from moonpool.sim.fleet import machine_for
from moonpool.sim.physics.hardware import node
from moonpool.sim.physics.model_shape import preset
from moonpool.traces.columns import Trace
from moonpool.traces.generate import generate
from moonpool.traces.mooncake_jsonl import write_jsonl

MACHINE = machine_for(preset("llama3-70b"), node("a800"))
TARGETS = Targets(ttft_s=30.0, tbt_s=0.1)


def plan(trace: Trace, *, run: Run | None = None, targets: Targets = TARGETS, num_nodes: int = 8) -> ClusterPlan:
    rng = np.random.default_rng(0)
    return make_plan(trace, MACHINE, targets, num_nodes=num_nodes, prices=Prices(), rng=rng, run=run)


@pytest.fixture(scope="module")
def chat() -> Trace:
    return generate("chat", num_requests=500, rate_per_s=5.0, seed=1)


def test_the_parts_fit_together(chat: Trace) -> None:
    asked: list[tuple[int, int]] = []

    def run(num_prefill: int, num_decode: int) -> Checked:
        asked.append((num_prefill, num_decode))
        estimate = Estimate(
            num_prefill=num_prefill,
            num_decode=num_decode,
            effective_share=1.0,
            ttft_s_mean=1.0,
            ttft_s_p90=1.0,
            tbt_s_mean=0.1,
            tbt_s_p90=0.1,
            prefill_busy=0.5,
        )
        return Checked(
            num_prefill=num_prefill,
            num_decode=num_decode,
            num_requests=1,
            effective_share=1.0,
            ttft_s_mean=1.0,
            tbt_s_mean=0.1,
            hit_share=0.5,
            by_models=estimate,
        )

    made = plan(chat, run=run)
    assert made.fewest is not None
    assert made.pool is not None
    best = (made.best.num_prefill, made.best.num_decode)
    assert sum(best) == 8
    assert best in asked
    assert (made.fewest.num_prefill, made.fewest.num_decode) in asked
    assert len(set(asked)) == len(asked) == len(made.checked) <= 4
    split = f"split 8 into {best[0]} prefill + {best[1]} decode"
    needed = made.fewest.num_prefill + made.fewest.num_decode
    assert made.headline().startswith(f"8 nodes are enough ({needed} would be, too): {split}, with ")
    assert msgspec.structs.replace(made, num_nodes=needed).headline().startswith(f"{needed} nodes are enough: split")
    assert msgspec.structs.replace(made, num_nodes=1).headline() == f"1 nodes are not enough: this load needs {needed}."
    assert msgspec.structs.replace(made, fewest=None).headline() == "No number of nodes meets the targets."
    hits = [point.hit_share for point in made.curve]
    saved = [point.saved_gpu_s_per_s for point in made.curve]
    assert hits == sorted(hits)
    assert saved == sorted(saved)
    assert made.tiers.dram_share <= made.tiers.most_that_can_hit
    low, high = made.equally_good
    assert low <= made.best.num_prefill <= high
    # Each node brings its memory: with one node less there is less of both.
    assert made.fewest.effective_share >= TARGETS.goal
    assert made.fewest.num_prefill + made.fewest.num_decode <= 8 or (made.best.margin or 0) < 1


def test_the_same_twice_to_the_byte(chat: Trace) -> None:
    first, second = (msgspec.json.encode(plan(chat)) for _ in "ab")
    assert first == second


def test_a_plan_that_cannot_be_says_why(chat: Trace) -> None:
    made = plan(chat, targets=Targets(ttft_s=0.1, tbt_s=0.1))
    assert (made.fewest, made.pool) == (None, None)
    assert made.impossible is not None
    assert "of the prompts can be prefilled within 0.1 s" in made.impossible
    assert made.best.margin == 0.0


def test_a_model_that_does_not_fit_is_refused(chat: Trace) -> None:
    machine = machine_for(preset("llama3-70b"), node("a800", num_gpus=1))
    with pytest.raises(InvalidInput, match="does not fit"):
        make_plan(chat, machine, TARGETS, num_nodes=4, prices=Prices(), rng=np.random.default_rng(0))


def test_the_part_that_is_run_is_the_busiest_with_what_came_before(chat: Trace) -> None:
    part, warm = busiest_part(chat, 100)
    counted_s = part.arrival_s[warm:]
    assert len(counted_s) == 100
    lasted_s = chat.arrival_s[99:] - chat.arrival_s[:-99]
    assert counted_s[-1] - counted_s[0] == pytest.approx(lasted_s.min())
    assert busiest_part(chat, 10_000) == (chat, 0)


def test_the_small_models_say_what_the_simulator_does(chat: Trace) -> None:
    """By how far they may be apart: they know no network, no chunks, and share loads perfectly. Four prefill nodes have
    twice the work that they can do: their queue grows past the target, and where it does so decides on the share."""
    run = cluster_run(chat, MACHINE, TARGETS, 100)
    for split in ((4, 4), (6, 2), (8, 4)):
        found = run(*split)
        assert found.num_requests == 100
        if split != (4, 4):
            assert found.effective_share == pytest.approx(found.by_models.effective_share, abs=0.03)
        assert found.ttft_s_mean == pytest.approx(found.by_models.ttft_s_mean, rel=0.15)
        assert found.tbt_s_mean == pytest.approx(found.by_models.tbt_s_mean, rel=0.15)


class Known(NamedTuple):
    dram_share: float  # 16 TB are 48.8 M tokens
    most_that_can_hit: float
    busy_nodes: float  # with prefills: requests a second times their seconds


def plain_plan(trace: Trace) -> Known:
    """By caches that are really run; a hit is only used where it saves time, which is always so here."""
    shares = [run_share(trace, tokens) for tokens in (48.8e6, math.inf)]
    leading = np.array(run_lru(trace, 48.8e6 // trace.block_tokens))
    hits = np.minimum(leading * trace.block_tokens, trace.num_input - 1)
    pairs = zip(trace.num_input.tolist(), hits.tolist(), strict=True)
    work_s = sum(MACHINE.cost.prefill_s(length, hit) for length, hit in pairs)
    return Known(shares[0], shares[1], work_s / float(trace.arrival_s[-1]))


@pytest.mark.parametrize("name", HOURS[-1:])  # one of them: a plan of an hour takes seconds
def test_an_hour(name: str) -> None:
    trace = hour(name)
    # 3.40 requests a second of 1.117 s each keep 3.8 nodes busy with prefills.
    known = Known(0.371, 0.374, 3.78) if name == "conversation" else plain_plan(trace)
    made = plan(trace, num_nodes=16)
    assert made.tiers.dram_share == pytest.approx(known.dram_share, abs=0.002)
    assert made.tiers.most_that_can_hit == pytest.approx(known.most_that_can_hit, abs=0.001)
    assert made.best.prefill_busy * made.best.num_prefill == pytest.approx(known.busy_nodes, abs=0.05)
    assert made.fewest is not None
    assert made.fewest.num_prefill > known.busy_nodes
    interval = made.certainty.hit_share
    assert interval.low < made.tiers.dram_share < interval.high
    assert made.certainty.num_slices == 12


@pytest.fixture(scope="module")
def moonpool_plan() -> Iterator[Command]:
    with forked_cli("plan", "moonpool.planner.plan", "moonpool.cli.trace") as moonpool:
        yield partial(moonpool, "plan")


@pytest.fixture(scope="module")
def chat_file(chat: Trace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "chat.jsonl"
    write_jsonl(chat, path)
    return path


def test_a_plan_for_people(moonpool_plan: Command, chat_file: Path, tmp_path: Path) -> None:
    price = tmp_path / "price.json"
    price.write_text('{"gpu_hour": 1.25, "source": "our contract"}')
    ran = moonpool_plan(chat_file, "--nodes", 8, "--ssd", "4TB", "--check", 40, "--price", price)
    assert ran.returncode == 0, ran.stderr
    for part in ("best split of 8", "fewest nodes", "our contract: GPU hour 1.25", "in the simulator", "how sure", "█"):
        assert part in ran.stdout


def test_a_plan_for_programs(moonpool_plan: Command, chat_file: Path) -> None:
    ran = moonpool_plan(chat_file, "--nodes", 8, "--check", 0, "--json")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert (found["trace"], found["num_requests"], found["num_nodes"]) == ("chat", 500, 8)
    assert found["prices"]["source"] == "assumed"
    assert found["checked"] == []


def test_sizes_of_any_config(moonpool_plan: Command, tmp_path: Path) -> None:
    config = tmp_path / "my-model" / "config.json"
    config.parent.mkdir()
    sizes = {"num_hidden_layers": 10, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4}
    config.write_text(json.dumps({"model_type": "llama", "intermediate_size": 4096, "vocab_size": 1000, **sizes}))
    found = json.loads(moonpool_plan("--model", config, "--gpu", "h100", "--json").stdout)
    assert (found["model"], found["gpu"]) == ("my-model", "h100")
    assert found["kv_nbytes_per_token"] == 10 * 2 * 4 * 64 * 2
    text = moonpool_plan("--model", "deepseek-v3")
    assert "70.272 kB of KV per token" in text.stdout, text.stderr


def test_wrong_input_is_one_line(moonpool_plan: Command, tmp_path: Path) -> None:
    for arguments, complaint in (
        (("--model", "no-such"), "no model 'no-such'"),
        ((tmp_path / "absent.jsonl",), "absent.jsonl"),
    ):
        ran = moonpool_plan(*arguments)
        assert ran.returncode == 1
        assert complaint in ran.stderr
        assert ran.stderr.count("\n") == 1
