"""An answer with several choices, and answers that end at a stop string, move to another decode worker: the text, the
tokens and the place where each stops are those of an undisturbed answer."""

from __future__ import annotations

import asyncio

import msgspec
from moving_answers import PAGES, SAMPLED, hold_answers
from role_changes import change
from severe import check_tokens
from tiny_cluster import RETRY, ROOT, Oracle, TinyCluster, greedy, prompt_of, tiny_cluster
from tiny_models import BLOCK_TOKENS

from moonpool.base.cluster import WorkerRole
from moonpool.engine.sequence import SamplingParams
from moonpool.frontend.answer import ChoiceResult
from moonpool.frontend.choice import Choice, ChoiceEvent, ChoiceRequest, ChoiceRunner
from moonpool.frontend.metrics import FrontendMetrics
from moonpool.frontend.request_handler import ClientRequest, derive_seed
from moonpool.frontend.text import TextAssembler

PROMPT = prompt_of(45, 3)
MOVE_AFTER = 20  # tokens of each choice
LONGEST = 100  # tokens


class NumberDecoder:
    """The text of a token is its number, so that a stop string can begin and end within a token."""

    def push(self, *tokens: int) -> str:
        return "".join(f"{token};" for token in tokens)

    def flush(self) -> str:
        return ""


class MovingRequest:
    """A client's request of as many choices as there are `params`, run as the front end runs it."""

    def __init__(self, cluster: TinyCluster, params: list[SamplingParams], stops: list[str]) -> None:
        self._cluster, self.metrics = cluster, FrontendMetrics()
        self.results = [ChoiceResult(index) for index in range(len(params))]
        self.runners: list[ChoiceRunner] = []
        choices: list[Choice] = []
        for index, each in enumerate(params):
            request = ChoiceRequest(f"moving-{id(self)}-{index}", PROMPT, ROOT, BLOCK_TOKENS, each, timeout_s=40.0)
            self.runners.append(ChoiceRunner(request, cluster.connections, RETRY))
            text = TextAssembler(NumberDecoder(), stops)
            choices.append(Choice(index, self.runners[-1], text, self.metrics, after=choices[0] if choices else None))
        self.client = ClientRequest("moving", "tiny", [PROMPT], choices)

    async def run(self) -> None:
        await self.client.run(self._take)

    async def _take(self, event: ChoiceEvent) -> None:
        result = self.results[event.index]
        result.text += event.text
        result.tokens += event.tokens
        result.finish_reason = event.finish_reason or result.finish_reason

    async def drain_in_the_middle(self) -> None:
        """Every choice decodes at decode0, and goes on at decode1, which decodes from then on only."""
        cluster = self._cluster
        await change(cluster, "decode1", WorkerRole.PREFILL)
        hold = hold_answers(cluster, MOVE_AFTER)
        running = asyncio.create_task(self.run())
        await cluster.until(lambda: all(len(each.tokens) >= MOVE_AFTER for each in self.results), "all are under way")
        await change(cluster, "decode1", WorkerRole.DECODE)
        await cluster.decode0.drain()
        hold.release()
        await running
        assert [runner.num_moves for runner in self.runners] == [1] * len(self.runners)
        assert [runner.num_attempts for runner in self.runners] == [1] * len(self.runners)
        stats = cluster.stats("decode1")
        assert stats.resumed_answers == len(self.runners)
        assert stats.recomputed_tokens <= len(self.runners) * BLOCK_TOKENS


def undisturbed(tokens: list[int], stop: str) -> ChoiceResult:
    """What a client gets of these tokens."""
    assembler, result = TextAssembler(NumberDecoder(), [stop] if stop else []), ChoiceResult(0)
    for number, token in enumerate(tokens, start=1):
        piece = assembler.push(token, "length" if number == len(tokens) else None)
        result.text += piece.text
        if piece.finish_reason is not None:
            result.finish_reason = piece.finish_reason
            break
    return result


def check(got: ChoiceResult, tokens: list[int], stop: str = "") -> None:
    expected = undisturbed(tokens, stop)
    assert got.text == expected.text
    assert got.finish_reason == expected.finish_reason
    check_tokens([out.token for out in got.tokens], tokens[: len(got.tokens)])


async def test_two_choices_of_one_prompt(tiny_model: str, oracle: Oracle) -> None:
    params = [msgspec.structs.replace(SAMPLED, max_tokens=LONGEST, seed=derive_seed(7, number)) for number in range(2)]
    async with tiny_cluster(tiny_model, num_decode=2, decode_pages=PAGES) as cluster:
        request = MovingRequest(cluster, params, [])
        await request.drain_in_the_middle()
        for result, each in zip(request.results, params, strict=True):
            check(result, await oracle(PROMPT, each))
        assert request.results[0].text != request.results[1].text, "each has a seed of its own"
        assert request.client.usage.completion_tokens == 2 * LONGEST


async def test_a_stop_string_that_the_move_divides(tiny_model: str, oracle: Oracle) -> None:
    """It begins within a token before the move and ends within one after it: a part of it is withheld meanwhile."""
    params = greedy(LONGEST)
    tokens = await oracle(PROMPT, params)
    text = "".join(f"{token};" for token in tokens[5:85])
    stop = text[1:-2]
    async with tiny_cluster(tiny_model, num_decode=2, decode_pages=PAGES) as cluster:
        request = MovingRequest(cluster, [params], [stop])
        await request.drain_in_the_middle()
        [result] = request.results
        check(result, tokens, stop)
        assert result.finish_reason == "stop"
        assert len(result.tokens) == 85


async def test_a_stop_string_after_the_move_ends_one_of_two_choices(tiny_model: str, oracle: Oracle) -> None:
    params = [msgspec.structs.replace(SAMPLED, max_tokens=LONGEST, seed=derive_seed(11, number)) for number in range(2)]
    answers = [await oracle(PROMPT, each) for each in params]
    stop = "".join(f"{token};" for token in answers[1][80:84])[1:]
    async with tiny_cluster(tiny_model, num_decode=2, decode_pages=PAGES) as cluster:
        request = MovingRequest(cluster, params, [stop])
        await request.drain_in_the_middle()
        for result, tokens in zip(request.results, answers, strict=True):
            check(result, tokens, stop)
        assert [result.finish_reason for result in request.results] == ["length", "stop"]
        assert len(request.results[1].tokens) == 84
