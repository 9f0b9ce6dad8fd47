"""The engine with a real (tiny, random) model: batching, reuse, preemption, pulls and cancels never change a token.

Greedy tokens of random weights hang on small differences of logits, so wrong KV shows at once.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
import torch
from scheduler_model import pulled

from moonpool.base.errors import NoSpace
from moonpool.engine.blocks import PageManager
from moonpool.engine.config import ModelConfig
from moonpool.engine.engine import LOCAL_ROOT, Engine, GenerationResult, StepOutput
from moonpool.engine.kv_memory import KvLayout
from moonpool.engine.kv_tensor import KvMemory
from moonpool.engine.llama import LayerWeights, LlamaModel, LlamaWeights
from moonpool.engine.runner import Runner
from moonpool.engine.scheduler import Scheduler, SchedulerConfig
from moonpool.engine.sequence import AdmittedSequence, Chunk, FullBlock, SamplingParams
from moonpool.engine.sequence import Sequence as RequestSequence
from moonpool.engine.step_times import StepTime

BLOCK_TOKENS = 16
VOCAB = 97
CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=512,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
)
GREEDY = SamplingParams(max_tokens=24, temperature=0)
PROMPTS = [[(7 * i + 3 * n) % VOCAB for i in range(n)] for n in (1, 15, 16, 17, 40, 64, 90)]


def random_model() -> LlamaModel:
    generator = torch.Generator().manual_seed(5)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    hidden, ones = CONFIG.hidden_size, torch.ones(CONFIG.hidden_size)
    layers = tuple(
        LayerWeights(
            attention_norm=ones,
            qkv=matrix(CONFIG.query_size + 2 * CONFIG.kv_size, hidden),
            output=matrix(hidden, CONFIG.query_size),
            mlp_norm=ones,
            gate_up=matrix(2 * CONFIG.intermediate_size, hidden),
            down=matrix(hidden, CONFIG.intermediate_size),
        )
        for _ in range(CONFIG.num_layers)
    )
    embedding, head = matrix(VOCAB, hidden), matrix(VOCAB, hidden)
    return LlamaModel(CONFIG, LlamaWeights(embedding=embedding, layers=layers, norm=ones, head=head))


MODEL = random_model()


def build(num_pages: int = 64, link: "PoolLink | None" = None, **changes: int) -> tuple[Engine, KvMemory]:
    layout = KvLayout.of(CONFIG, num_pages=num_pages, block_tokens=BLOCK_TOKENS, dtype="float32")
    kv = KvMemory(layout)
    limits: dict[str, Any] = {"max_batch_tokens": 64, "max_num_seqs": 8, "max_seq_tokens": 256} | changes
    scheduler = Scheduler(SchedulerConfig(**limits), PageManager(num_pages, BLOCK_TOKENS))
    return Engine(scheduler, Runner(MODEL, kv), link), kv


def computed(engine: Engine) -> list[StepOutput]:
    outputs = engine.step()
    assert all(isinstance(each, StepOutput) for each in outputs)
    return cast(list[StepOutput], outputs)


def alone(prompt: list[int], params: SamplingParams = GREEDY) -> GenerationResult:
    return build()[0].generate([prompt], params)[0]


@pytest.fixture(scope="module")
def right() -> list[list[int]]:
    return [alone(prompt).tokens for prompt in PROMPTS]


def pages_in_use(engine: Engine) -> int:
    engine.scheduler.check_integrity()
    return engine.scheduler.pages.num_used


def test_the_model_says_different_things(right: list[list[int]]) -> None:
    assert len({tuple(tokens) for tokens in right}) == len(PROMPTS)
    assert all(len(set(tokens)) > 3 for tokens in right)


def test_in_a_mixed_batch(right: list[list[int]]) -> None:
    engine, _ = build()
    answers = engine.generate(PROMPTS, GREEDY)
    assert [a.tokens for a in answers] == right
    assert {a.finish_reason for a in answers} == {"length"}
    assert pages_in_use(engine) == 0


@pytest.mark.parametrize("budget", [8, 23, 200])
def test_prefill_cut_into_any_chunks(right: list[list[int]], budget: int) -> None:
    engine, _ = build(max_batch_tokens=budget)
    assert [a.tokens for a in engine.generate(PROMPTS, GREEDY)] == right


def test_with_reuse_of_prompt_and_of_decoded_blocks(right: list[list[int]]) -> None:
    engine, _ = build()
    engine.generate(PROMPTS, GREEDY)
    again = engine.generate(PROMPTS, GREEDY)
    assert [a.tokens for a in again] == right
    assert [a.num_cached_tokens for a in again] == [(len(p) - 1) // 16 * 16 for p in PROMPTS]
    next_turn = PROMPTS[4] + right[4] + [1, 2, 3]
    answer = engine.generate([next_turn], GREEDY)[0]
    assert answer.num_cached_tokens == 48  # 40 + 23 computed tokens: three full blocks
    assert answer.tokens == alone(next_turn).tokens


def test_with_preemption_when_pages_are_few(right: list[list[int]]) -> None:
    engine, _ = build(num_pages=10)
    assert [a.tokens for a in engine.generate(PROMPTS, GREEDY)] == right
    assert engine.scheduler.num_preemptions > 0
    assert pages_in_use(engine) == 0


def test_sampling_does_not_depend_on_company_or_preemption() -> None:
    each = [SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, seed=n) for n in range(len(PROMPTS))]
    expected = [alone(prompt, params).tokens for prompt, params in zip(PROMPTS, each, strict=True)]
    for num_pages in (64, 10):
        engine, _ = build(num_pages=num_pages)
        assert [a.tokens for a in engine.generate(PROMPTS, each)] == expected


def test_cancel_gives_back_all_pages(right: list[list[int]]) -> None:
    engine, _ = build()
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(f"r{i}", prompt, GREEDY)
    for _ in range(5):
        engine.step()
    for i in range(len(PROMPTS)):
        if i != 4:
            assert engine.cancel(f"r{i}")
    tokens = list(engine.scheduler.get("r4").output)  # type: ignore[union-attr]
    while engine.has_work():
        tokens += [out.token for out in computed(engine)]
    assert tokens == right[4]
    assert pages_in_use(engine) == 0


def test_logprobs_and_min_tokens_reach_the_sampler(right: list[list[int]]) -> None:
    first = right[4][0]
    params = SamplingParams(max_tokens=4, min_tokens=2, temperature=0, stop_token_ids=(first,), logprobs=2)
    answer = alone(PROMPTS[4], params)
    assert first not in answer.tokens[:2]
    assert answer.sampled[0].top_logprobs[0][0] == first  # the model's own choice, though it was barred
    assert alone(PROMPTS[4], SamplingParams(max_tokens=4, temperature=0, stop_token_ids=(first,))).tokens == [first]


def test_generate_says_when_pages_are_in_other_hands() -> None:
    engine, _ = build(num_pages=8)
    engine.scheduler.pages.reserve("other", 6)
    with pytest.raises(NoSpace):
        engine.generate([PROMPTS[5]], GREEDY)
    assert not engine.has_work()
    engine.scheduler.pages.release("other")
    assert engine.generate([PROMPTS[5]], GREEDY)[0].finish_reason == "length"


class PoolLink:
    """A pool in a dict: takes full blocks, gives them back layer by layer, and can be told to give rubbish."""

    def __init__(self) -> None:
        self.pool: dict[bytes, torch.Tensor] = {}
        self.broken_block: int | None = None
        self.kv: KvMemory | None = None
        self.scheduler: Scheduler | None = None
        self.pulls: list[AdmittedSequence] = []
        self.num_pulled = 0

    def begin_step(self, chunks: Sequence[Chunk], admitted: Sequence[AdmittedSequence]) -> "PoolLink":
        self.pulls = [a for a in admitted if a.blocks]
        return self

    def before_layer(self, layer: int) -> None:
        assert self.kv is not None
        for pull in self.pulls:
            for block, page, key in zip(pull.blocks, pull.pages, pull.keys, strict=True):
                self.kv.tensor[page, layer] = self.pool[key][layer] * (-1.0 if block == self.broken_block else 1.0)
                self.num_pulled += layer == 0

    def after_layer(self, layer: int) -> None:
        pass

    def end_step(self) -> Mapping[str, int]:
        assert self.scheduler is not None
        verified = {}
        for pull in self.pulls:
            pulled = zip(pull.blocks, pull.keys, strict=True)
            bad = next((block for block, key in pulled if block == self.broken_block or key not in self.pool), None)
            num_good = pull.blocks[-1] + 1 if bad is None else bad
            verified[pull.request_id] = BLOCK_TOKENS * num_good
            ended = self.scheduler.ahead.get(pull.request_id)
            assert ended is not None
            self.scheduler.ahead.end(ended, num_good)
        return verified

    def completed(self, full_blocks: Sequence[FullBlock]) -> None:
        assert self.kv is not None
        for block in full_blocks:
            self.pool[block.key] = self.kv.tensor[block.page].clone()

    def computed(self, time: StepTime) -> None:
        pass


def another(link: PoolLink) -> Engine:
    """A worker with empty pages."""
    engine, link.kv = build(link=link)
    link.scheduler = engine.scheduler
    return engine


def filled_pool() -> PoolLink:
    link = PoolLink()
    engine = another(link)
    engine.generate(PROMPTS, GREEDY)
    return link


def pulled_request(engine: Engine, request_id: str, prompt: list[int], num_blocks: int) -> None:
    sequence = RequestSequence(request_id, prompt, GREEDY, root=LOCAL_ROOT, block_tokens=BLOCK_TOKENS)
    engine.scheduler.add(sequence)
    pulled(engine.scheduler, sequence, num_blocks)


def drain(engine: Engine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while engine.has_work():
        for out in computed(engine):
            tokens.setdefault(out.request_id, []).append(out.token)
        engine.scheduler.check_integrity()
    return tokens


@pytest.mark.parametrize("broken_block", [None, 0, 2])
def test_kv_from_a_pool_good_or_bad(right: list[list[int]], broken_block: int | None) -> None:
    link = filled_pool()
    engine = another(link)
    link.broken_block = broken_block
    engine.add_request("other", PROMPTS[4], GREEDY)
    pulled_request(engine, "pulled", PROMPTS[6], 5)
    assert drain(engine) == {"other": right[4], "pulled": right[6]}
    assert link.num_pulled == 5
    link.broken_block = None
    assert engine.generate([PROMPTS[6]], GREEDY)[0].tokens == right[6]


def test_pages_pulled_equal_those_computed() -> None:
    link = filled_pool()
    engine = another(link)
    pulled_request(engine, "pulled", PROMPTS[6], 5)
    drain(engine)
    assert link.kv is not None
    for key, content in link.pool.items():
        page = engine.scheduler.pages.page_of(key)
        if page is not None:
            assert torch.equal(link.kv.tensor[page], content)


def test_a_step_that_raises_leaves_no_trace(right: list[list[int]]) -> None:
    link = filled_pool()
    engine = another(link)
    pulled_request(engine, "pulled", PROMPTS[6], 5)
    engine.add_request("other", PROMPTS[4], GREEDY)
    hidden, link.pool = link.pool, {}
    assert engine.step() == []
    engine.scheduler.check_integrity()
    link.pool = hidden
    assert drain(engine) == {"pulled": right[6], "other": right[4]}


def test_an_engine_without_a_link_trusts_no_promise(right: list[list[int]]) -> None:
    engine, _ = build()
    pulled_request(engine, "promised", PROMPTS[6], 5)
    pull = engine.scheduler.ahead.get("promised")
    assert pull is not None
    assert engine.step() == [], "what it computed from these pages is dropped"
    engine.scheduler.ahead.end(pull, 0)
    assert drain(engine) == {"promised": right[6]}
