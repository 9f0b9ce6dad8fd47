"""The engine and the pool on one GPU, with random weights of an 8B Llama shape in bfloat16. Needs a CUDA device.

    python benchmarks/gpu.py --json [--only decode-1,prefill,service] [--transformers]

One JSON line per claim, each beside a baseline of the same run: memory bandwidth turned into the ideal time of a decode
step, a large matrix product for prefills, the same work without the pool for the pool. Without a CUDA device it does
nothing. `--only` chooses cases; the service cases start `moonpool serve` and always stop it.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from _gpu_lab import (
    BLOCK_TOKENS,
    CHUNK,
    checked,
    decode_nbytes,
    end_decoding,
    greedy,
    hbm_nbytes_s,
    make_engine,
    matmul_flops,
    prefill_flop,
    prompt,
    release,
    start_decoding,
    step_ms,
)

from moonpool.bench.report import BenchReport, bench_parser
from moonpool.engine.engine import Engine
from moonpool.engine.kv_tensor import KvMemory

if TYPE_CHECKING:
    from _gpu_service import Answer, Service

NUM_STEPS = 64
NUM_BLOCKS = 512
LONG_TOKENS = 512 * BLOCK_TOKENS - 8  # 511 whole blocks and a part of one


def decode(report: BenchReport, num_seqs: int, context: int, at_most_ms: float) -> None:
    pages = num_seqs * ((context + 3 * NUM_STEPS) // BLOCK_TOKENS + 2)
    engine = make_engine(pages, max_num_seqs=num_seqs)
    start_decoding(engine, num_seqs, context, 3 * NUM_STEPS)
    step_ms(engine, 8)
    found = min(step_ms(engine, NUM_STEPS) for _ in range(2))
    ideal = decode_nbytes(num_seqs, context + NUM_STEPS) / hbm_nbytes_s() * 1e3
    end_decoding(engine, num_seqs)
    case = f"decode, {num_seqs} sequences of {context} tokens"
    report.add(case, found, "ms", ideal, at_most=at_most_ms, baseline_is="HBM copy bandwidth")


def prefill(report: BenchReport) -> None:
    engine = make_engine(3 * 520, max_num_seqs=8)
    matmul = matmul_flops() / 1e12
    for seed, (num_tokens, at_least) in enumerate(((2048, None), (8192, 650.0), (32_768, 600.0))):
        times = [prefill_s(engine, num_tokens, 10 * seed + repeat) for repeat in range(3)]
        found = prefill_flop(num_tokens) / min(times) / 1e12
        case = f"prefill of {num_tokens} tokens" + (" in chunks of 8k" if num_tokens > CHUNK else "")
        more: dict[str, Any] = {} if at_least is None else {"at_least": at_least}
        report.add(case, found, "TFLOP/s", matmul, seconds=round(min(times), 4), baseline_is="matmul 8192^3", **more)


def prefill_s(engine: Engine, num_tokens: int, seed: int) -> float:
    """Return the time from the first step of a new prompt to its first token."""
    torch.cuda.synchronize()
    engine.add_request("p", prompt(num_tokens, seed + 1), greedy(1))
    started_s = time.perf_counter()
    while engine.has_work():
        checked(engine.step())
    torch.cuda.synchronize()
    return time.perf_counter() - started_s


def pool_rates(report: BenchReport) -> None:
    """Pull and put of 512 blocks, and decode steps of 32 sequences beside both."""
    from gpu_kv import KvSide, PoolProcess, fill_pages, keys_of, layout_of, measure

    from moonpool.worker.build import switch_threads_often

    switch_threads_often()  # as a worker does
    release()
    layout, engine = layout_of(2 * NUM_BLOCKS), make_engine(32 * 50, max_num_seqs=32)
    targets = {"put from the GPU": 35.0, "pull, whole blocks": 45.0}
    dram_nbytes = int(2.3 * NUM_BLOCKS * layout.page_nbytes)
    with tempfile.TemporaryDirectory(prefix="mp-") as run_dir, PoolProcess(run_dir, dram_nbytes) as pool:
        side = KvSide(run_dir, pool.address, KvMemory(layout, device="cuda"))
        try:
            for case, value, unit, baseline in measure(side, NUM_BLOCKS, 3):
                more: dict[str, Any] = {"at_least": targets[case]} if case in targets else {}
                report.add(f"{NUM_BLOCKS} blocks: {case}", value, unit, baseline, **more)
            ours, theirs = range(NUM_BLOCKS), range(NUM_BLOCKS, 2 * NUM_BLOCKS)
            fill_pages(side.kv, list(ours))
            pulled, put = keys_of(1, NUM_BLOCKS), keys_of(2, NUM_BLOCKS)

            def put_again() -> None:
                side.put(put, list(ours))
                side.remove(put)

            start_decoding(engine, 32, 2048, 2000)
            step_ms(engine, 16)
            for case, work in (("pulls", lambda: side.pull(pulled, list(theirs))), ("puts", put_again)):
                alone = step_ms(engine, 200)
                with repeating(work) as count:
                    beside = step_ms(engine, 200)
                name = f"decode of 32 sequences beside {case} of {NUM_BLOCKS} blocks"
                report.add(name, beside, "ms", alone, at_most=1.15 * alone, baseline_is="alone", transfers=count[0])
            end_decoding(engine, 32)
        finally:
            side.close()


@contextmanager
def repeating(work: Callable[[], object]) -> Iterator[list[int]]:
    """Do the work again and again on another thread; the list holds how often it was done."""
    ended, count = threading.Event(), [0]

    def repeat() -> None:
        while not ended.is_set():
            work()
            count[0] += 1

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(repeat)
        try:
            yield count
        finally:
            ended.set()
        running.result()


def service(report: BenchReport) -> None:
    """Through front end, conductor and two workers: prompts from the pool, and prefills that hand off and store."""
    from _gpu_service import serving

    release()
    with serving("--kv", "12GB", "--dram", "24GB", "--max-num-seqs", "8") as running:
        with_transfers = exposed_s(running)
        pulled, missed = from_pool(running)
    with serving("--kv", "12GB", "--dram", "1GB", "--max-num-seqs", "8", "--policy", "local") as running:
        running.ask(prompt(LONG_TOKENS, 300))
        off = [running.ask(prompt(LONG_TOKENS, 301 + seed)) for seed in range(3)]
    value, baseline = (statistics.median(one.ttft_s for one in each) * 1e3 for each in (pulled, off))
    report.add(
        "TTFT of 32k tokens from the pool", value, "ms", baseline, at_most=round(baseline / 6, 1),
        baseline_is="pool off", cached_tokens=[one.cached_tokens for one in pulled],
        each_ms=[round(one.ttft_s * 1e3, 1) for one in pulled],
        miss_ms=[round(one.ttft_s * 1e3, 1) for one in missed],
    )  # fmt: skip
    engine = make_engine(8 * 130, max_num_seqs=8)
    alone = statistics.median([prefill_s(engine, CHUNK, 500 + seed) for seed in range(6)][1:]) * 1e3
    case = "prefill of 8192 tokens with hand-off and store"
    report.add(case, with_transfers * 1e3, "ms", alone, at_most=round(1.05 * alone, 2), baseline_is="engine alone")


def exposed_s(running: Service) -> float:
    """Return the time of an 8k prefill in a worker that hands its KV off and stores it."""
    for seed in range(2):
        running.ask(prompt(CHUNK, 900 + seed))
    return statistics.median(running.compute_s(prompt(CHUNK, 950 + seed)) for seed in range(5))


def from_pool(running: Service) -> tuple[list[Answer], list[Answer]]:
    """Return answers to prompts of 32k tokens whose blocks are in the pool, in workers that never saw them, and to
    prompts that are new."""
    prompts = [prompt(LONG_TOKENS, 100 + seed) for seed in range(3)]
    for one in prompts:
        running.ask(one)
    running.settle()
    running.restart("prefill-0", "decode-0")
    pulled = [running.ask(one) for one in prompts]
    return pulled, [running.ask(prompt(LONG_TOKENS, 200 + seed)) for seed in range(2)]


def transformers_static(report: BenchReport) -> None:
    """Decode steps of transformers with a static cache, on random weights of the same shape."""
    from _gpu_transformers import decode_ms

    release()
    for num_seqs, context in ((1, 1024), (64, 2048)):
        report.add(
            f"transformers, decode, {num_seqs} sequences of {context} tokens", decode_ms(num_seqs, context), "ms"
        )


CASES: dict[str, Callable[[BenchReport], None]] = {
    "decode-1": lambda report: decode(report, 1, 1024, 5.0),
    "decode-64": lambda report: decode(report, 64, 2048, 9.5),
    "prefill": prefill,
    "pool": pool_rates,
    "service": service,
}


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--only", default=",".join(CASES), help=f"cases by name: {', '.join(CASES)}")
    parser.add_argument("--transformers", action="store_true", help="measure transformers with a static cache too")
    parser.add_argument("--limit-s", type=float, default=600.0, help="seconds after which the benchmark is ended")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu: no CUDA device here, nothing to do", file=sys.stderr)
        return 0
    report = BenchReport.from_options("gpu", arguments)
    chosen = [name for name in arguments.only.split(",") if name]
    unknown = [name for name in chosen if name not in CASES]
    if unknown:
        parser.error(f"no such case: {', '.join(unknown)}; choose of {', '.join(CASES)}")
    cases = {name: CASES[name] for name in chosen} | (
        {"transformers": transformers_static} if arguments.transformers else {}
    )
    return run(cases, report, arguments.limit_s)


def run(cases: dict[str, Callable[[BenchReport], None]], report: BenchReport, limit_s: float) -> int:
    """Run the cases; return 1 if one of them raised. A case that hangs ends the process."""
    watch = threading.Timer(limit_s, end_process)
    watch.daemon = True
    watch.start()
    failed = 0
    for name, case in cases.items():
        started_s = time.perf_counter()
        try:
            case(report)
        except Exception:  # noqa: BLE001 - the other cases are still worth their time
            traceback.print_exc()
            failed = 1
        torch.cuda.empty_cache()
        print(f"gpu: {name} took {time.perf_counter() - started_s:.1f} s", file=sys.stderr, flush=True)
    watch.cancel()
    return failed


def end_process() -> None:
    """End this process and the services that it started."""
    import _thread

    print("gpu: out of time", file=sys.stderr, flush=True)
    _thread.interrupt_main()


if __name__ == "__main__":
    sys.exit(main())
