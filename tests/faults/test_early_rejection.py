"""Requests are refused at once because of what is predicted, over HTTP, before real engines compute anything for them.

The engines compute every token; what their workers report is what steps would take on one and the same machine. So the
host's speed decides nothing: of two answers in a batch each token takes 30 ms, of three 40 ms, and the target is 39 ms.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from letter_codec import LetterCodec
from severe import check_tokens
from tiny_cluster import Oracle, TinyCluster, greedy, prompt_of, tiny_cluster
from tiny_gates import Hold
from tiny_worker import TinyWorker
from waiting import HANG_S

from moonpool.base.cluster import DecodeSample, PrefillSample, ReportWorker
from moonpool.conductor.admission.forms import AdmissionForm
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.frontend.prompts import ServedModel
from moonpool.frontend.service import Frontend, FrontendConfig
from moonpool.worker.reporter import ReportCollector

TBT_SLO_S = 0.039
PREFILL_S = 0.25
NUM_TOKENS, MAX_TOKENS = 40, 300  # long answers: none of them is expected to end soon
MODEL = "tiny"


@pytest.fixture(autouse=True)
def _same_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers measure the same times."""
    collect = ReportCollector._report

    def report(self: ReportCollector, sequence: int, *blocks: tuple[bytes, ...]) -> ReportWorker:
        collected = collect(self, sequence, *blocks)
        decodes = [(each.num_seqs, each.kv_tokens) for each in collected.decodes]
        if sequence == 1:
            decodes += [(number, number * NUM_TOKENS) for number in range(1, 9)]
        prefills = [(each.num_tokens, each.prefix_tokens) for each in collected.prefills] or [(NUM_TOKENS, 0)]
        return msgspec.structs.replace(
            collected,
            prefills=tuple(PrefillSample(tokens, prefix, PREFILL_S) for tokens, prefix in prefills),
            decodes=tuple(DecodeSample(number, tokens, 0.01 * (1 + number)) for number, tokens in decodes),
            pulls=(),
        )

    monkeypatch.setattr(ReportCollector, "_report", report)


class Client:
    """Asks the front end of the cluster for completions."""

    def __init__(self, cluster: TinyCluster, http: httpx.AsyncClient) -> None:
        self.cluster, self._http = cluster, http

    def ask(self, seed: int) -> asyncio.Task[httpx.Response]:
        body = {"model": MODEL, "prompt": prompt_of(NUM_TOKENS, seed), "max_tokens": MAX_TOKENS, "temperature": 0}
        return asyncio.create_task(self._http.post("/v1/completions", json={**body, "ignore_eos": True}))

    async def num_prefills(self) -> int:
        """How many prompts the engine has computed."""
        page = (await self._http.get("/metrics?roles=all")).text
        (found,) = re.findall(r'^moonpool_worker_prefill_seconds_count{.*"prefill0".*} (\S+)$', page, re.M)
        return int(float(found))

    @property
    def num_decoding(self) -> int:
        """As the conductor knows it."""
        return sum(each.num_joined for each in self.cluster.conductor.state.workers)

    @property
    def num_sent(self) -> int:
        return self.cluster.conductor.state.num_open


@asynccontextmanager
async def served(model: str, state_dir: Path, form: AdmissionForm) -> AsyncIterator[Client]:
    policy = PolicyConfig(name="paper", tbt_slo_s=TBT_SLO_S, admission=form)  # with no TTFT target, none waits
    async with tiny_cluster(model, policy=policy, decode_pages=128, calibrate_s=0.0) as cluster:
        config = FrontendConfig(
            conductor_address=cluster.conductor_address,
            state_dir=str(state_dir),
            model=MODEL,
            port=0,
            prompt_process=False,
        )
        frontend = Frontend(config, lambda _: ServedModel(MODEL, LetterCodec(), 1000))
        url = await frontend.start()
        try:
            async with httpx.AsyncClient(base_url=url, timeout=HANG_S) as http:
                yield Client(cluster, http)
        finally:
            await frontend.close()


def check_refused(reply: httpx.Response) -> None:
    assert reply.status_code == 429, reply.text
    assert int(reply.headers["retry-after"]) >= 1
    error = reply.json()["error"]
    assert error["code"] == "overloaded"
    why = r"in \d\.\d\d s, when its prompt would be done, tokens would come \d\d ms apart, the target is 39 ms.*: too "
    assert re.match(why, error["message"]), error["message"]


async def check_answer(reply: httpx.Response, oracle: Oracle, seed: int) -> None:
    assert reply.status_code == 200, reply.text
    expected = await oracle(prompt_of(NUM_TOKENS, seed), greedy(MAX_TOKENS))
    check_tokens(list(map(ord, reply.json()["choices"][0]["text"])), expected)


async def test_while_long_answers_are_written_and_not_afterwards(
    tiny_model: str, oracle: Oracle, tmp_path: Path
) -> None:
    async with served(tiny_model, tmp_path, AdmissionForm.PREDICTED) as client:
        hold = Hold([client.cluster.decode0], 2)
        answers = []
        for seed in (1, 2):
            answers.append(client.ask(seed))
            await client.cluster.until(lambda: client.num_decoding == len(answers), "it is decoded")
        check_refused(await client.ask(3))
        check_refused(await client.ask(3))
        assert await client.num_prefills() == 2, "none for what was refused"
        hold.release()
        for seed, answer in zip((1, 2), answers, strict=True):
            await check_answer(await answer, oracle, seed)
        await client.cluster.until(lambda: client.num_sent == 0, "the load is gone")
        await check_answer(await client.ask(3), oracle, 3)
        assert client.cluster.conductor.state.counters["wasted_prefills"] == 0


class HeldPrefills:
    """The worker computes no prompt until release()."""

    def __init__(self, worker: TinyWorker) -> None:
        self._released, compute = threading.Event(), worker.engine.step
        worker.engine.step = lambda: compute() if self._released.is_set() else []  # type: ignore[method-assign]

    def release(self) -> None:
        self._released.set()


@pytest.mark.parametrize("form", [AdmissionForm.PREDICTED, AdmissionForm.EARLY])
async def test_for_answers_that_have_not_begun(tiny_model: str, oracle: Oracle, tmp_path: Path, form: Any) -> None:
    """Nothing is decoded when the third request comes, and two prompts are to be decoded by the time its own is done.
    A rule that looks at the present sends it, and its prefill is wasted."""
    async with served(tiny_model, tmp_path, form) as client:
        prefills, answers_hold = HeldPrefills(client.cluster.prefill0), Hold([client.cluster.decode0], 2)
        answers = []
        for seed in (1, 2):
            answers.append(client.ask(seed))
            await client.cluster.until(lambda: client.num_sent == len(answers), "it is sent")
        assert client.num_decoding == 0
        third = client.ask(3)
        if form is AdmissionForm.PREDICTED:
            check_refused(await third)
        else:
            await client.cluster.until(lambda: client.num_sent == 3, "it is sent, too")
        prefills.release()
        reply = await third
        assert reply.status_code == 429, reply.text
        is_wasted = form is AdmissionForm.EARLY
        assert client.cluster.conductor.state.counters["wasted_prefills"] == is_wasted
        await client.cluster.until(lambda: client.num_decoding == 2, "the others are decoded")
        assert await client.num_prefills() == 2 + is_wasted
        answers_hold.release()
        for seed, answer in zip((1, 2), answers, strict=True):
            await check_answer(await answer, oracle, seed)
