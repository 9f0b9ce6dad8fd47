"""What a user would run instead on one GPU: transformers, the same 8B shape and the same random weights, bfloat16.

    python benchmarks/_gpu_transformers.py < conversations.json     prints {"tokens_s": ..., ...}

generate() with a static cache for single decode steps, and generate_batch(), its continuous batching with paged
attention and prefix sharing, for conversations.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import cache
from typing import Any

import torch
from _gpu_lab import MODEL, prompt
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from moonpool.engine.weights import random_weights


@cache
def model() -> Any:
    """Return the model with the weights that Moonpool generates."""
    config = LlamaConfig(
        hidden_size=MODEL.hidden_size,
        intermediate_size=MODEL.intermediate_size,
        num_hidden_layers=MODEL.num_layers,
        num_attention_heads=MODEL.num_heads,
        num_key_value_heads=MODEL.num_kv_heads,
        vocab_size=MODEL.vocab_size,
        max_position_embeddings=MODEL.max_position,
        rope_theta=MODEL.rope_theta,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        made = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    _copy_weights(made)
    return made


@torch.no_grad()
def _copy_weights(made: Any) -> None:
    ours, query, kv = random_weights(MODEL, dtype="bfloat16", device="cuda"), MODEL.query_size, MODEL.kv_size
    made.model.embed_tokens.weight.copy_(ours.embedding)
    made.lm_head.weight.copy_(ours.head)
    for theirs, layer in zip(made.model.layers, ours.layers, strict=True):
        for part, values in zip(
            (theirs.self_attn.q_proj, theirs.self_attn.k_proj, theirs.self_attn.v_proj),
            layer.qkv.split([query, kv, kv]),  # type: ignore[no-untyped-call]
            strict=True,
        ):
            part.weight.copy_(values)
        theirs.self_attn.o_proj.weight.copy_(layer.output)
        for part, values in zip((theirs.mlp.gate_proj, theirs.mlp.up_proj), layer.gate_up.chunk(2), strict=True):
            part.weight.copy_(values)
        theirs.mlp.down_proj.weight.copy_(layer.down)


def decode_ms(num_seqs: int, context: int, num_steps: int = 64) -> float:
    """Return the time of a decode step of generate() with a static cache."""
    ids = torch.tensor([prompt(context, number) for number in range(num_seqs)], device="cuda")

    def run_s(count: int) -> float:
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        model().generate(
            ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0,
            cache_implementation="static",
        )  # fmt: skip
        torch.cuda.synchronize()
        return time.perf_counter() - started_s

    run_s(8)
    return (run_s(8 + num_steps) - run_s(8)) / num_steps * 1e3


def converse(workload: dict[str, Any]) -> dict[str, float]:
    """Run all conversations turn by turn, all of them at once, with the longest possible batches; return its speed."""
    systems, messages, answer_tokens = workload["systems"], workload["messages"], workload["answer_tokens"]
    histories = [list(systems[number % len(systems)]) for number in range(len(messages))]
    settings = GenerationConfig(max_new_tokens=answer_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    longest = len(systems[0]) + sum(len(message) + answer_tokens for message in messages[0])
    warm_up = [prompt(longest - answer_tokens, 5000 + number) for number in range(len(messages))]
    short = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
    _answers(warm_up, short)
    torch.cuda.synchronize()
    started_s, count = time.perf_counter(), 0
    for turn in range(len(messages[0])):
        for history, own in zip(histories, messages, strict=True):
            history += own[turn]
        for history, answer in zip(histories, _answers(histories, settings), strict=True):
            history += answer
            count += len(answer)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started_s
    return {"tokens_s": count / seconds, "seconds": seconds, "tokens": count}


def _answers(prompts: list[list[int]], settings: Any) -> list[list[int]]:
    """Return the answers in order of the prompts. The manager, with its cache of prefixes, is kept between turns."""
    found = model().generate_batch(
        inputs=[list(one) for one in prompts],
        generation_config=settings,
        progress_bar=False,
        persistent_manager=True,
        warmup=False,  # the first answers are the warm-up; its own did not end within 5 minutes
    )
    in_order = sorted(found.values(), key=lambda one: int(str(one.request_id).rsplit("_", 1)[-1]))
    answers = [list(one.generated_tokens) for one in in_order]
    if [len(answer) for answer in answers] != [settings.max_new_tokens] * len(prompts):
        raise RuntimeError(f"generate_batch answered {len(answers)} of {len(prompts)} prompts, or too shortly")
    return answers


if __name__ == "__main__":
    print(json.dumps(converse(json.load(sys.stdin))), flush=True)
    os._exit(0)  # the manager's thread does not end by itself
