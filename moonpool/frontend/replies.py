"""OpenAI's answer objects. Fields that were never set are omitted; fields set to None are null.

Answers to prompts are types of msgspec; what FastAPI's routes return are types of pydantic.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BaseModel
from starlette.responses import Response

FinishReason = Literal["stop", "length"]


class Reply(msgspec.Struct, frozen=True):
    """msgspec writes these in a tenth of pydantic's time; a stream has one per token."""


class PromptTokensDetails(Reply, frozen=True):
    cached_tokens: int


class Usage(Reply, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(Reply, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Reply, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply, frozen=True):
    content: list[TokenLogprob]


class AssistantMessage(Reply, frozen=True):
    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(Reply, frozen=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatCompletion(Reply, frozen=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(Reply, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Reply, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatChunk(Reply, frozen=True):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class CompletionLogprobs(Reply, frozen=True):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Reply, frozen=True):
    """A choice of a whole answer or of a chunk; finish_reason is null in chunks only."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class Completion(Reply, frozen=True):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "moonpool"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    error: ErrorDetail


def reply_schemas(ref: str) -> dict[str, object]:
    """Return the schemas of the answers to prompts, and of the types that these refer to by `ref`, for OpenAPI."""
    template = ref.replace("{model}", "{name}")
    return dict(msgspec.json.schema_components([ChatCompletion, Completion], ref_template=template)[1])


def json_response(body: object) -> Response:
    """Return an answer that msgspec encodes."""
    return Response(msgspec.json.encode(body), media_type="application/json")
