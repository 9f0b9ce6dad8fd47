"""Time to first token of a 1,500-token prompt: computed, and pulled from the pool by a worker that never saw it.

    python benchmarks/pool_reuse.py [--json] [--repeat 3]

Starts `moonpool serve` with one prefill and one decode worker. Each round sends a new prompt (the baseline), kills the
prefill worker with -9, waits for its successor, and sends the prompt again. The claim: a fifth of the time or less.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise

import httpx
import psutil

from moonpool.bench.report import BenchReport, bench_parser

NUM_TOKENS = 1500


def start(state_dir: str) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "moonpool", "serve", "--port", "0", "--state-dir", state_dir]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        found = re.search(r"at (http\S+)/v1", line)
        if found:
            return process, found[1]
    raise SystemExit(f"moonpool serve ended with {process.wait()}")


def ask(url: str, prompt: list[int]) -> tuple[float, int]:
    """(seconds to the first token, cached tokens)."""
    body = {
        "model": "smollm2", "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    started_s, ttft_s, cached = time.perf_counter(), 0.0, 0
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as reply:
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if event["choices"] and not ttft_s:
                ttft_s = time.perf_counter() - started_s
            if event.get("usage"):
                cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
    return ttft_s, cached


def stored_nbytes(url: str) -> float:
    page = httpx.get(f"{url}/metrics").text
    return sum(float(value) for value in re.findall(r"^moonpool_pool_used_bytes\{.*\} (\S+)$", page, re.M))


def wait_stored(url: str) -> None:
    """Until putting has come to rest: nothing new for half a second."""
    last, since_s = stored_nbytes(url), time.monotonic()
    while time.monotonic() - since_s < 0.5:
        time.sleep(0.05)
        now = stored_nbytes(url)
        if now != last:
            last, since_s = now, time.monotonic()


def replace_prefill(launcher: psutil.Process, url: str) -> None:
    [worker] = [p for p in launcher.children() if ("--name", "prefill-0") in pairwise(p.cmdline())]
    worker.kill()
    seen_gone = False
    while True:
        healthy = httpx.get(f"{url}/health").status_code == 200
        seen_gone = seen_gone or not healthy
        if seen_gone and healthy:
            return
        time.sleep(0.05)


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    report = BenchReport.from_options("pool_reuse", options)
    cold, warm, cached = [], [], NUM_TOKENS
    with tempfile.TemporaryDirectory() as state_dir:
        process, url = start(state_dir)
        try:
            for turn in range(options.repeat):
                prompt = [(turn * 7919 + i * 104_729) % 40_000 + 500 for i in range(NUM_TOKENS)]
                cold.append(ask(url, prompt)[0])
                wait_stored(url)
                replace_prefill(psutil.Process(process.pid), url)
                ttft_s, tokens = ask(url, prompt)
                warm.append(ttft_s)
                cached = min(cached, tokens)
        finally:
            process.send_signal(2)
            process.wait(10)
    before, after = statistics.median(cold), statistics.median(warm)
    report.add("TTFT, prefix pulled from the pool", after, "s", before)
    report.add("cached tokens of the prompt", cached, "tokens", NUM_TOKENS)


if __name__ == "__main__":
    main()
