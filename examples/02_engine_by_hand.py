"""The engine alone, in one process: batch three prompts, then reuse a prefix.

Needs the default model (`moonpool model fetch smollm2`); takes a few seconds on a CPU.
"""

from __future__ import annotations

import time

from moonpool.engine.config import EngineConfig
from moonpool.engine.load import load_engine
from moonpool.engine.model_files import resolve
from moonpool.engine.sequence import SamplingParams
from moonpool.engine.tokenizer import load_tokenizer

engine = load_engine("smollm2", EngineConfig(num_pages=32))
tokenizer = load_tokenizer(resolve("smollm2"))
greedy = SamplingParams(max_tokens=12, temperature=0.0)

questions = ["What is the capital of France?", "What is 2 + 2?", "Name a colour."]
prompts = [tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": text}])) for text in questions]
for question, answer in zip(questions, engine.generate(prompts, greedy), strict=True):
    print(f"{question}  ->  {tokenizer.decode(answer.tokens)}")

story = tokenizer.encode("The lighthouse keeper wrote down every ship that passed that night. " * 20)
for attempt in ("cold", "warm"):
    started_s = time.perf_counter()
    [answer] = engine.generate([story], SamplingParams(max_tokens=1, temperature=0.0))
    seconds = time.perf_counter() - started_s
    print(f"{attempt}: {len(story)} tokens, {answer.num_cached_tokens} of them reused, {seconds:.2f} s")
