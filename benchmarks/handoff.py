"""Many prompts handed over at once: how long a first token takes, and what lies between a prompt's end and its tokens.

    python benchmarks/handoff.py --json

A whole service with a random llama: one prefill and one decode worker, with a thread and a core each. The decode
worker answers 8 long requests all the while. In turns 32 prompts of 40 tokens arrive at once, for one token each
(prefill alone: nothing is handed over), which is the baseline, and for 24. The claim: the median time to first token
of the second is at most 1.3 times that of the first.

The workers note when a prompt ends, when its first token is on its way to the client, when its commit arrives and is
adopted, and which requests each step computes. From that come counts, over all prompts of all turns:

- commits adopted, and decode steps begun, between a prompt's end and its first token (each has its median as `value`
  and its largest number as `most`); a step that happens to begin meanwhile is counted, a commit must not be there
- the largest number of commits under way at the same time, of 32
- decode steps from the adoption of a hand-off to the first one that computes it; the claim is 1: the next one
- decode steps from a prompt's end to the first one that computes its next token
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from _live_load import VOCAB, Service, ask, llama

from moonpool.bench.report import BenchReport, bench_parser

SHAPE = llama(512, 1408)
NUM_PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 32, 40, 24
NUM_LONG, LONG_TOKENS = 8, 1000
LIMIT = 1.3
_SETTLE_S = 1.0  # between bursts, until the answers of the last one have left the workers

# -- in the workers ----------------------------------------------------------------------------------------------------


class Event(msgspec.Struct, frozen=True, array_like=True):
    """Something that happened to these requests, by the clock that all processes share."""

    at_s: float
    kind: str  # "ended", "answered", "commit", "adopted", "step"
    names: list[str]


def note_events(path: str) -> None:
    """Let this worker append its events to the file, a line each."""
    from moonpool.worker.decode import DecodeRole
    from moonpool.worker.messages import Prefill, PrefillItem
    from moonpool.worker.prefill import PrefillRole
    from moonpool.worker.roles import BothRoles

    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(kind: str, names: list[str]) -> None:
        os.write(file, msgspec.json.encode(Event(time.monotonic(), kind, names)) + b"\n")

    def before(role: type, method: str, kind: str, names: Callable[..., list[str]]) -> None:
        function = getattr(role, method)

        def noted(own: Any, *args: Any) -> Any:
            note(kind, names(*args))
            return function(own, *args)

        setattr(role, method, noted)

    prefill = PrefillRole.prefill

    async def answered(role: PrefillRole, call: Prefill) -> AsyncIterator[PrefillItem]:
        async for item in prefill(role, call):
            if item.reply is not None:
                note("answered", [_name(call.spec)])
            yield item

    PrefillRole.prefill = answered  # type: ignore[method-assign, assignment]
    before(PrefillRole, "_finish", "ended", lambda out, prompt: [out.request_id])
    before(DecodeRole, "commit_handoff", "commit", lambda call: [_name(call)])
    before(DecodeRole, "_adopt", "adopted", lambda incoming, call: [_name(call)])
    begin_step = BothRoles.begin_step

    def begun(roles: BothRoles, chunks: Any, admitted: Any) -> Any:
        if not any(roles._prefill.has(chunk.request_id) for chunk in chunks):
            note("step", [chunk.request_id for chunk in chunks])
        return begin_step(roles, chunks, admitted)

    BothRoles.begin_step = begun  # type: ignore[method-assign, assignment]


def _name(request: Any) -> str:
    return f"{request.request_id}/{request.epoch}"


# -- what came out -----------------------------------------------------------------------------------------------------


class Burst(NamedTuple):
    """The prompts of one turn, and what the workers noted meanwhile."""

    ttft_s: list[float]
    events: list[Event]

    def at(self, kind: str) -> dict[str, float]:
        """Return when that first happened to each request whose prompt has ended in this turn."""
        found: dict[str, float] = {}
        for event in self.events:
            for name in event.names if event.kind == kind else ():
                found.setdefault(name, event.at_s)
        return found if kind == "ended" else {name: found[name] for name in self.at("ended") if name in found}

    def steps_between(self, kind: str, until: str) -> list[int]:
        """Return for each request how many decode steps begin between the two events; the second one's counts."""
        steps = [event.at_s for event in self.events if event.kind == "step"]
        pairs = [(at_s, self.at(until)[name]) for name, at_s in self.at(kind).items()]
        return [sum(since_s < at_s <= until_s for at_s in steps) for since_s, until_s in pairs]

    def commits_before_answers(self) -> list[int]:
        adopted, answered = self.at("adopted"), self.at("answered")
        return [int(adopted[name] < answered[name]) for name in adopted]

    def most_commits(self) -> int:
        begun = [(at_s, 1) for at_s in self.at("commit").values()]
        under_way = most = 0
        for _, change in sorted([*begun, *((at_s, -1) for at_s in self.at("adopted").values())]):
            under_way += change
            most = max(most, under_way)
        return most


def report_on(report: BenchReport, alone: Sequence[Burst], handed: Sequence[Burst]) -> None:
    for name, percent in (("p50", 50), ("p90", 90)):
        ours, base = (
            statistics.median(statistics.quantiles(burst.ttft_s, n=100)[percent - 1] for burst in bursts)
            for bursts in (handed, alone)
        )
        at_most = 1e3 * LIMIT * base if percent == 50 else None
        report.add(f"TTFT {name} of {NUM_PROMPTS} prompts at once", 1e3 * ours, "ms", 1e3 * base, at_most=at_most)
    for case, unit, counts, claimed in (
        ("prompt's end to first token", "commits", [burst.commits_before_answers() for burst in handed], 0),
        ("prompt's end to first token", "steps", [burst.steps_between("ended", "answered") for burst in handed], 0),
        ("adoption to first step", "steps", [burst.steps_between("adopted", "step") for burst in handed], 1),
        ("prompt's end to first step", "steps", [burst.steps_between("ended", "step") for burst in handed], None),
    ):
        every = [count for each in counts for count in each]
        report.add(case, statistics.median(every), unit, claimed, most=max(every))
    most = statistics.median(burst.most_commits() for burst in handed)
    report.add("commits under way at once, at most", most, "commits", float(NUM_PROMPTS))


# -- the service -------------------------------------------------------------------------------------------------------


async def bursts(url: str, log: Path, num_turns: int, seed: int) -> tuple[list[Burst], list[Burst]]:
    """Return the bursts of one token each, and those that were handed over."""
    rng = random.Random(seed)

    def prompt(num_tokens: int) -> list[int]:
        return [rng.randrange(3, VOCAB) for _ in range(num_tokens)]

    async def burst(answer_tokens: int) -> Burst:
        await asyncio.sleep(_SETTLE_S)
        began_s = time.monotonic()
        prompts = [prompt(PROMPT_TOKENS) for _ in range(NUM_PROMPTS)]
        answers = await asyncio.gather(*(ask(url, each, answer_tokens) for each in prompts))
        lines = (await asyncio.to_thread(log.read_bytes)).splitlines()
        found = [msgspec.json.decode(line, type=Event) for line in lines]
        return Burst([each.ttft_s for each in answers], [event for event in found if event.at_s >= began_s])

    async def answer_on() -> None:
        while True:
            await ask(url, prompt(PROMPT_TOKENS), LONG_TOKENS)

    long = [asyncio.create_task(answer_on()) for _ in range(NUM_LONG)]
    try:
        found: dict[int, list[Burst]] = {1: [], ANSWER_TOKENS: []}
        for turn in range(num_turns + 1):
            for answer_tokens in sorted(found, reverse=turn % 2 == 1):
                found[answer_tokens].append(await burst(answer_tokens))
        return found[1][1:], found[ANSWER_TOKENS][1:]  # the first turn makes connections
    finally:
        for task in long:
            task.cancel()
        await asyncio.gather(*long, return_exceptions=True)


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--turns", type=int, default=5, help="bursts of each kind")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts' tokens")
    options = parser.parse_args()
    report = BenchReport.from_options("handoff", options)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("this needs two cores")
    with tempfile.TemporaryDirectory(prefix="mp-") as name:
        folder, log = Path(name), Path(name) / "events"
        log.touch()
        service = Service(
            folder,
            SHAPE,
            pins={"prefill-0": cores[0], "decode-0": cores[1]},
            worker=(__file__, "--as-worker", str(log)),
            prefill=1,
            decode=1,
            max_num_seqs=2 * (NUM_PROMPTS + NUM_LONG),
        )
        try:
            service.start()
            service.wait_ready()
            alone, handed = asyncio.run(bursts(service.url, log, options.turns, options.seed))
        finally:
            service.close()
    report_on(report, alone, handed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-worker"]:
        from moonpool.cli.main import main as run_cli

        note_events(sys.argv[2])
        sys.argv[1:] = ["worker", *sys.argv[3:]]
        run_cli()
    else:
        main()
