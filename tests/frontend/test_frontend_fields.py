"""Fields beside the supported ones: accepted without effect, refused by name, or unknown; and any content type."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from frontend_cluster import MODEL, ToyCluster
from openai.types import completion_create_params as openai_text
from openai.types.chat import ChatCompletionMessage
from openai.types.chat import completion_create_params as openai_chat

from moonpool.frontend import fields
from moonpool.frontend.schema import ChatBody, ChatMessage, CompletionBody

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}


of_module = pytest.mark.asyncio(loop_scope="module")  # the loop that the cluster runs in


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    """One cluster for all: requests leave nothing in it."""
    async with ToyCluster(tmp_path_factory.mktemp("state")) as cluster, cluster.client() as http:
        yield http


@pytest.mark.parametrize(
    ("defined", "body"),
    [(openai_chat.CompletionCreateParamsBase, ChatBody), (openai_text.CompletionCreateParamsBase, CompletionBody)],
)
def test_every_field_of_openai_is_supported_ignored_or_refused_by_name(
    defined: type, body: type[ChatBody] | type[CompletionBody]
) -> None:
    known = {*body.model_fields, *fields.IGNORED, *body.UNSUPPORTED}
    assert set(defined.__annotations__) - known == set()
    assert not set(fields.IGNORED) & {*body.model_fields, *body.UNSUPPORTED}, "one meaning each"


def test_an_answer_can_be_sent_back_with_all_its_fields() -> None:
    answer = ChatCompletionMessage(role="assistant", content="hi").model_dump()
    assert ChatMessage.model_validate(answer).content == "hi"


@pytest.mark.parametrize("name", sorted(fields.UNSUPPORTED_CHAT))
@of_module
async def test_features_are_refused_only_when_they_are_asked_for(http: httpx.AsyncClient, name: str) -> None:
    feature = fields.UNSUPPORTED_CHAT[name]
    for neutral in feature.neutral:
        assert (await http.post(CHAT, json={**BODY, name: neutral})).status_code == 200, neutral
    reply = await http.post(CHAT, json={**BODY, name: {"any": "thing"}})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, name)
    assert "support" in error["message"]


@of_module
async def test_ignored_fields_change_nothing(http: httpx.AsyncClient) -> None:
    plain = (await http.post(CHAT, json={**BODY, "seed": 1})).json()["choices"]
    for name in fields.IGNORED:
        reply = await http.post(CHAT, json={**BODY, "seed": 1, name: {"any": ["thing"]}})
        assert reply.status_code == 200, name
        assert reply.json()["choices"] == plain


def test_the_tables_are_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    for name in {*fields.IGNORED, *fields.UNSUPPORTED_CHAT, *fields.UNSUPPORTED_COMPLETION}:
        assert f"`{name}`" in page, name


@pytest.mark.parametrize(
    "kind", [None, "application/x-www-form-urlencoded", "text/plain", "application/json; charset=x"]
)
@of_module
async def test_json_is_taken_whatever_the_content_type(http: httpx.AsyncClient, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    reply = await http.post(CHAT, content=json.dumps(BODY).encode(), headers=headers)
    assert reply.status_code == 200


@of_module
async def test_a_form_gets_told_what_to_send(http: httpx.AsyncClient) -> None:
    reply = await http.post(CHAT, data={"model": MODEL, "prompt": "hello"})
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert "not valid JSON" in error["message"]
    assert "Content-Type: application/json" in error["message"]
