"""How long other streams wait while the front end prepares the longest bodies it takes. Needs the default model.

    python benchmarks/long_prompts.py [--json] [--repeat 7]

Each case is a body of the largest allowed size or shape: JSON, validation, chat template and tokenizer. `value` is the
longest time for which the event loop did not run meanwhile, with the front end's own Preparer; `baseline` is the same
with one thread that does everything and a tokenizer call that keeps the interpreter lock. `ratio` is value / baseline.
The promise is 50 ms. Both are medians of the repetitions; `best` and `worst` are the extremes of `value`. What other
programs take from this one shows in `idle`, the longest gap of a loop that has nothing to do: `worst` follows it.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from moonpool.base.errors import MoonpoolError
from moonpool.bench.report import BenchReport, bench_parser
from moonpool.engine.tokenizer import Tokenizer
from moonpool.frontend.preparing import Preparer, load_call
from moonpool.frontend.prompts import CHAT, COMPLETION, Endpoint, ServedModel, load_model, prepare

MODEL = "smollm2"
PROMISE_MS = 50.0
_TICK_S = 0.0005
_IDLE_S = 0.5


@dataclass(frozen=True)
class Settings:
    model: str = MODEL
    model_name: str | None = None
    max_model_len: int | None = None


class LockingTokenizer(Tokenizer):
    """Tokenizes with the library's call for single texts, which keeps the interpreter lock."""

    def __init__(self, plain: Tokenizer) -> None:
        self.__dict__.update(plain.__dict__)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)


def cases(model: ServedModel) -> dict[str, tuple[Endpoint[Any], bytes]]:
    """Bodies of the largest allowed size. Some are refused late, which takes as long."""
    chars, room = model.max_prompt_chars, model.max_body_nbytes - 1000

    def chat(content: str) -> bytes:
        return json.dumps({"model": model.name, "messages": [{"role": "user", "content": content}]}).encode()

    def text(prompt: object) -> bytes:
        return json.dumps({"model": model.name, "prompt": prompt, "max_tokens": 1}, separators=(",", ":")).encode()

    words = "the quick brown fox jumps over the lazy dog. "
    empty = {"role": "user", "content": ""}
    found: dict[str, tuple[Endpoint[Any], bytes]] = {
        "a prompt that fills the context": (CHAT, chat((words * 2000)[: 4 * model.max_model_len])),
        "words, as many as are let in": (CHAT, chat((words * (chars // 40))[:chars])),
        "one word without end": (CHAT, chat("a" * chars)),
        "spaces without end": (CHAT, chat(" " * chars)),
        "emoji without end": (CHAT, chat("\N{GRINNING FACE}" * (room // 12))),
        "empty messages": (CHAT, json.dumps({"model": model.name, "messages": [empty] * model.max_messages}).encode()),
        "wrong messages": (CHAT, b'{"model":"%s","messages":[%s{}]}' % (model.name.encode(), b"{}," * (room // 3))),
        "64 prompts of token ids": (COMPLETION, text([[10_000] * (room // 6 // 64)] * 64)),
        "lists of lists": (COMPLETION, b'{"prompt":[%s1]}' % (b"[]," * (room // 3))),
    }
    return {case: (endpoint, raw) for case, (endpoint, raw) in found.items() if len(raw) <= model.max_body_nbytes}


async def stall_ms(work: Callable[[], Awaitable[object]]) -> float:
    """The longest gap between two turns of the event loop while `work` runs."""
    longest, last = 0.0, time.perf_counter()
    working = asyncio.ensure_future(work())
    while not working.done():
        await asyncio.sleep(_TICK_S)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    if not isinstance(working.exception(), MoonpoolError | None):
        working.result()
    return 1e3 * longest


async def measure(repeat: int, report: BenchReport) -> None:
    model = load_model(Settings())
    assert isinstance(model.codec, Tokenizer)
    locking = replace(model, codec=LockingTokenizer(model.codec))
    preparer = Preparer(model, load_call(load_model, MODEL, None, None))
    preparer.start()
    try:
        for case, (endpoint, raw) in cases(model).items():
            ours = [await stall_ms(partial(preparer.prepare, endpoint, raw)) for _ in range(repeat)]
            plain = [await stall_ms(partial(asyncio.to_thread, prepare, locking, endpoint, raw)) for _ in range(repeat)]
            idle = await stall_ms(lambda: asyncio.sleep(repeat * _IDLE_S))
            add(report, f"{case}, {len(raw) / 1e6:.2f} MB", ours, plain, idle)
    finally:
        await preparer.close()


def add(report: BenchReport, case: str, ours: list[float], plain: list[float], idle: float) -> None:
    more: dict[str, Any] = {
        "promise": PROMISE_MS,
        "best": round(min(ours), 2),
        "worst": round(max(ours), 2),
        "idle": round(idle, 2),
    }
    report.add(case, statistics.median(ours), "ms", statistics.median(plain), **more, baseline_is="one thread")


if __name__ == "__main__":
    parser = bench_parser("stalls of the front end while it prepares long prompts")
    parser.add_argument("--repeat", type=int, default=7)
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.repeat, BenchReport.from_options("long_prompts", arguments)))
