"""Whatever JSON a client sends: an answer or a 4xx in OpenAI's shape, never a 5xx, never a lost connection."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from frontend_cluster import MODEL, ToyCluster
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import HANG_S

from moonpool.frontend import fields
from moonpool.frontend.schema import ChatBody, CompletionBody

PATHS: dict[str, type[ChatBody] | type[CompletionBody]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
}
BOUNDS = [0, 1, 16, 20, 31, 32, 2**16, 2**31, 2**32, 2**53, 2**63, 2**64, 2**70, 10**400]
TINY = [5e-324, 1e-300, 1e-46, 1e-40, 1e-38, 1e-9, 1e-5, 0.01, 0.5, 1.0, 2.0, 100.0, 1e38, 1e39, 1e308, float("inf")]

integers = st.builds(
    lambda bound, step: bound + step, st.sampled_from([*BOUNDS, *(-b for b in BOUNDS)]), st.integers(-1, 1)
)
floats = st.builds(lambda value, sign: sign * value, st.sampled_from(TINY), st.sampled_from([1, -1])) | st.floats()
# Halves of surrogate pairs too: JSON can write them.
texts = st.text(st.characters(codec=None, categories=None), max_size=8) | st.sampled_from(["", "\ud800", "x" * 3000])
scalars = st.none() | st.booleans() | integers | floats | texts
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool"]) | values, "content": texts | values},
        optional={"name": values, "tool_calls": values, "refusal": values},
    ),
    max_size=3,
)
prompts = texts | st.lists(integers, max_size=4) | st.lists(texts, max_size=4) | values


def bodies(body_type: type[ChatBody] | type[CompletionBody]) -> st.SearchStrategy[object]:
    """Complete bodies with any subset of all fields, good and bad; and JSON values that are no bodies at all."""
    names = sorted({*body_type.model_fields, *fields.IGNORED, *body_type.UNSUPPORTED} - {"model", "messages", "prompt"})
    prompt = messages if body_type is ChatBody else prompts
    required = {"model": st.just(MODEL), body_type.PROMPT_FIELD: prompt}
    valid = st.fixed_dictionaries(
        {"model": st.just(MODEL), body_type.PROMPT_FIELD: st.just([{"role": "user", "content": "hi"}])}
        if body_type is ChatBody
        else {"model": st.just(MODEL), "prompt": st.just("hi")},
        optional=dict.fromkeys(names, values),
    )
    return valid | st.fixed_dictionaries(required, optional=dict.fromkeys(names, values)) | values


def exercise(tmp_path: Path, max_examples: int) -> None:
    async def enter() -> tuple[ToyCluster, httpx.AsyncClient]:
        cluster = await ToyCluster(tmp_path, max_model_len=32).__aenter__()
        # The client itself would end a connection that was idle for 5 s, which hypothesis may need for an example.
        limits = httpx.Limits(max_connections=1, keepalive_expiry=None)
        return cluster, httpx.AsyncClient(base_url=cluster.url, limits=limits, timeout=HANG_S)

    with asyncio.Runner() as runner:
        cluster, http = runner.run(enter())
        addresses = set()

        async def check(path: str, body: object) -> None:
            reply = await http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
            addresses.add(reply.extensions["network_stream"].get_extra_info("client_addr"))
            assert reply.status_code == 200 or 400 <= reply.status_code < 500, reply.text
            if reply.status_code != 200:
                assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
            assert '"server_error"' not in reply.text, "a stream failed"

        @settings(max_examples=max_examples)
        @given(st.sampled_from(sorted(PATHS)).flatmap(lambda path: st.tuples(st.just(path), bodies(PATHS[path]))))
        def check_all(request: tuple[str, object]) -> None:
            runner.run(check(*request))

        check_all()
        runner.run(http.aclose())
        runner.run(cluster.__aexit__())
    assert len(addresses) == 1, "a connection was dropped"


def test_any_body(tmp_path: Path) -> None:
    exercise(tmp_path, max_examples=100)


@pytest.mark.soak
def test_many_bodies(tmp_path: Path) -> None:
    exercise(tmp_path, max_examples=20_000)
