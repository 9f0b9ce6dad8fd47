"""Roles that follow a load that swings between long prompts and long answers, against every fixed split.

Four workers with a tiny model and a floor on the time of their steps (_paced_worker.py). Each phase asks for about what
three workers of one role can do, as many requests in the one as in the other. Requests arrive as a Poisson process, the
same for every split. A request is good if it was answered within both targets: the time to first token, and the mean
time between its tokens. Refused requests are not sent again. A request that fails otherwise, or ends with another
number of tokens, ends the benchmark; the tokens of every answer are compared with those of an engine alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx
import msgspec
from _live_load import VOCAB, Answer, RefusedAnswer, Service, ask, llama, save_model
from _paced_worker import Pace

from moonpool.engine.sequence import SamplingParams

PACE = Pace(base_s=0.02, prompt_token_s=0.0015, answer_s=0.005)
TTFT_S, TBT_S = 4.0, 0.08
RATE_PER_S = 2.6
LONG_PROMPTS = (700, 8)  # mean tokens of prompts and of answers
LONG_ANSWERS = (60, 160)
SPLITS = {"3P1D": (3, 1), "2P2D": (2, 2), "1P3D": (1, 3)}
ELASTIC = "elastic"
SHAPE = llama(64, 128, num_layers=2)
_MOVES = "moonpool_conductor_role_changes_total"


class SwingRequest(NamedTuple):
    arrival_s: float
    phase: int
    prompt: list[int]
    num_output: int


class SwingRun(NamedTuple):
    """What became of each request, in their order; None: refused."""

    answers: list[Answer | None]
    num_changes: int


def requests(num_phases: int, phase_s: float, seed: int, rate_per_s: float = RATE_PER_S) -> list[SwingRequest]:
    """Lengths are within 30 % of their mean."""
    chance, found = random.Random(seed), []
    for phase in range(num_phases):
        lengths = LONG_ANSWERS if phase % 2 else LONG_PROMPTS
        at_s = phase * phase_s + chance.expovariate(rate_per_s)
        while at_s < (phase + 1) * phase_s:
            num_input, num_output = [max(2, round(mean * chance.uniform(0.7, 1.3))) for mean in lengths]
            prompt = [chance.randrange(3, VOCAB) for _ in range(num_input)]
            found.append(SwingRequest(at_s, phase, prompt, num_output))
            at_s += chance.expovariate(rate_per_s)
    return found


def play(model: Path, name: str, load: Sequence[SwingRequest]) -> SwingRun:
    """Start the service, paced, with a fixed split or with elastic roles, and send it the load."""
    prefill, decode = SPLITS.get(name, (2, 2))
    with paced_service(model, prefill, decode, elastic=name == ELASTIC) as service:
        return send_load(service, load)


@contextlib.contextmanager
def paced_service(model: Path, prefill: int, decode: int, *, elastic: bool) -> Iterator[Service]:
    """Start the service with paced workers; it has its first roles."""
    worker = (str(Path(__file__).with_name("_paced_worker.py")), msgspec.json.encode(PACE).decode())
    with tempfile.TemporaryDirectory(prefix="moonpool-swing-") as folder:
        service = Service(
            Path(folder), str(model), worker=worker, prefill=prefill, decode=decode, elastic=elastic,
            ttft_slo_s=TTFT_S, tbt_slo_s=TBT_S,
        )  # fmt: skip
        try:
            service.start()
            service.wait_ready()
            yield service
        finally:
            service.close()


def send_load(service: Service, load: Sequence[SwingRequest]) -> SwingRun:
    answers = asyncio.run(_send_all(service.url, load))
    return SwingRun(answers, _num_changes(service.url))


def undisturbed(model: Path, load: Sequence[SwingRequest]) -> list[list[int]]:
    """Return the tokens that an engine alone answers with."""
    from moonpool.engine.config import EngineConfig
    from moonpool.engine.load import load_engine

    params = [SamplingParams(max_tokens=one.num_output, temperature=0.0, ignore_eos=True) for one in load]
    engine = load_engine(str(model), EngineConfig(num_pages=2000, threads=1))
    return [answer.tokens for answer in engine.generate([one.prompt for one in load], params)]


def num_good(run: SwingRun) -> int:
    return sum(one is not None and one.ttft_s <= TTFT_S and one.mean_gap_s <= TBT_S for one in run.answers)


def num_different(run: SwingRun, expected: Sequence[list[int]]) -> int:
    """Count the answers with other tokens, or more or fewer of them."""
    pairs = zip(run.answers, expected, strict=True)
    return sum(answer is not None and _tokens_of(answer) != tokens for answer, tokens in pairs)


def _tokens_of(answer: Answer) -> list[int]:
    return [int(number) for number in re.findall(r"t(\d+)", answer.text)]


async def _send_all(url: str, load: Sequence[SwingRequest]) -> list[Answer | None]:
    began_s = time.perf_counter()

    async def send(request: SwingRequest) -> Answer | None:
        await asyncio.sleep(began_s + request.arrival_s - time.perf_counter())
        try:
            return await ask(url, request.prompt, request.num_output)
        except RefusedAnswer:
            return None

    return await asyncio.gather(*map(send, load))


def _num_changes(url: str) -> int:
    page = httpx.get(f"{url}/metrics", timeout=10).text
    return next(int(float(line.split()[-1])) for line in page.splitlines() if line.startswith(_MOVES))


def measure_swing(names: Sequence[str], num_phases: int, phase_s: float, seed: int) -> Iterator[tuple[str, float, str]]:
    """Yield (case, value, unit) for every split as it is measured, and then what only all of them show."""
    load = requests(num_phases, phase_s, seed)
    case = f"swing, {num_phases} phases of {phase_s:g} s, {len(load)} requests"
    good = {}
    with tempfile.TemporaryDirectory(prefix="moonpool-swing-") as folder:
        model = Path(folder) / "model"
        save_model(model, SHAPE)
        expected = undisturbed(model, load)
        for name in names:
            run = play(model, name, load)
            good[name] = num_good(run)
            yield from _figures(f"{case}: {name}", run, load, expected)
    fixed = [count for name, count in good.items() if name != ELASTIC]
    if ELASTIC in good and fixed:
        yield f"{case}: elastic against the best fixed split", good[ELASTIC] / max(1, max(fixed)), "x"


def _figures(
    case: str, run: SwingRun, load: Sequence[SwingRequest], expected: Sequence[list[int]]
) -> Iterator[tuple[str, float, str]]:
    yield f"{case}, within both targets", num_good(run), "requests"
    for kind, start in (("long prompts", 0), ("long answers", 1)):
        part = SwingRun([one for one, of in zip(run.answers, load, strict=True) if of.phase % 2 == start], 0)
        yield f"{case}, of {len(part.answers)} with {kind}", num_good(part), "requests"
    yield f"{case}, refused", run.answers.count(None), "requests"
    yield f"{case}, answers with other tokens", num_different(run, expected), "requests"
    yield f"{case}, role changes", run.num_changes, ""
