"""What clients may send: the bodies of OpenAI's chat and text completions, checked before anything else happens.

A field that we know has exactly its documented type and range. Every other field is refused by name unless it cannot
change the answer (fields.py), so that a client never gets an answer to another question than the one it asked.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    SkipValidation,
    field_validator,
    model_validator,
)

from moonpool.engine.sequence import SamplingDefaults, SamplingParams
from moonpool.frontend.fields import (
    IGNORED,
    IGNORED_IN_MESSAGE,
    IGNORED_IN_PART,
    UNSUPPORTED,
    UNSUPPORTED_CHAT,
    UNSUPPORTED_COMPLETION,
    UNSUPPORTED_IN_MESSAGE,
    Feature,
    keep_known,
    refusal,
)

_T = TypeVar("_T")

MAX_CHOICES = 16
MAX_CHOICES_IN_ALL = 128  # of all prompts of a request
MAX_PROMPTS = 64
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_TOP_LOGPROBS = 20
MAX_PRIORITY = 10  # either way
MAX_INT = 2**31 - 1  # of numbers that are bounded by nothing else
# Below these, values vanish in float32 or their quotients overflow; nothing useful lies there.
MIN_TEMPERATURE = 1e-5
MIN_TOP_P = 1e-6
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for text completions; a chat may fill the context


def _well_formed(text: str) -> str:
    """Refuse half a surrogate pair ("\\ud800"), which JSON can express and no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise refusal("the text holds half a surrogate pair, which is no character") from None
    return text


def _usable_temperature(temperature: float) -> float:
    if 0 < temperature < MIN_TEMPERATURE:
        raise refusal(f"must be 0 (greedy) or from {MIN_TEMPERATURE:g} to 2")
    return temperature


Temperature = Annotated[float, Field(ge=0, le=2), AfterValidator(_usable_temperature)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(None, description="Accepted without effect.")


class SamplingBody(Body):
    """The fields of both endpoints. `null` means the default, because OpenAI's clients send it so."""

    PROMPT_FIELD: ClassVar[str] = "prompt"
    DEFAULT_TOKENS: ClassVar[int | None] = None  # None: as many as fit the context
    UNSUPPORTED: ClassVar[dict[str, Feature]] = UNSUPPORTED

    model: str = Field(description="A name listed by /v1/models.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Choices per prompt.")
    max_tokens: int | None = Field(None, ge=1, le=MAX_INT)
    min_tokens: int | None = Field(None, ge=0, le=MAX_INT)
    temperature: Temperature | None = Field(
        None, description=f"0 is greedy; other values are at least {MIN_TEMPERATURE:g}."
    )
    top_p: float | None = Field(None, ge=MIN_TOP_P, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_INT, description="0 and -1 mean: no limit.")
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MAX_STOPS)
    ignore_eos: bool | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)
    priority: int | None = Field(
        None,
        ge=-MAX_PRIORITY,
        le=MAX_PRIORITY,
        description="Of your own requests that wait, the lowest is served first, as in vLLM; 0 if unset.",
    )

    @model_validator(mode="before")
    @classmethod
    def _keep_known(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            raise refusal("the body must be a JSON object")
        # Not `model_fields`, which takes longer to find than the fields take to check.
        return keep_known(data, cls.__pydantic_fields__, ignored=IGNORED, unsupported=cls.UNSUPPORTED)

    @field_validator("stop", mode="before")
    @classmethod
    def _check_stops(cls, stop: Any) -> Any:
        stops = [] if stop is None else stop if isinstance(stop, list) else [stop]
        if not all(isinstance(text, str) for text in stops):
            raise refusal("stop must be a string or a list of strings")
        if len(stops) > MAX_STOPS:
            raise refusal(f"at most {MAX_STOPS} stop strings are allowed")
        if any(not 1 <= len(_well_formed(text)) <= MAX_STOP_CHARS for text in stops):
            raise refusal(f"a stop string has 1 to {MAX_STOP_CHARS} characters")
        return stop

    @model_validator(mode="after")
    def _check_stream_options(self) -> SamplingBody:
        if self.stream_options is not None and not self.stream:
            raise refusal("stream_options is only allowed when stream is true", "stream_options")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wanted_tokens(self) -> int | None:
        """The requested limit of output tokens; None: the endpoint's default."""
        return self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """The number of alternatives per token; None: no logprobs."""
        return None

    def sampling(self, *, max_tokens: int, seed: int, defaults: SamplingDefaults) -> SamplingParams:
        """Return the sampling parameters. Raise InvalidInput for values that contradict each other."""
        top_k = _or(self.top_k, defaults.top_k)
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=_or(self.min_tokens, 0),
            temperature=_or(self.temperature, defaults.temperature),
            top_p=_or(self.top_p, defaults.top_p),
            top_k=top_k if top_k is not None and top_k > 0 else None,
            min_p=_or(self.min_p, defaults.min_p),
            seed=seed,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=_or(self.ignore_eos, False),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            repetition_penalty=_or(self.repetition_penalty, defaults.repetition_penalty),
            logprobs=self.wanted_logprobs,
        )


class ChatMessage(Body):
    """One message. Content may be a list of text parts; other kinds of parts are refused. Templates may use `name`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, AfterValidator(_well_formed)] = Field(
        description="Text, or a list of parts {type: text, text: ...}."
    )
    name: Annotated[str, AfterValidator(_well_formed)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _keep_known(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.get("role") in ("tool", "function"):
            raise refusal("tool calls are not supported")
        return keep_known(data, cls.__pydantic_fields__, ignored=IGNORED_IN_MESSAGE, unsupported=UNSUPPORTED_IN_MESSAGE)

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        if not content:
            raise refusal("content is an empty list")
        return "\n".join(_part_text(part) for part in content)

    def as_template_input(self) -> dict[str, str]:
        """Return the message for the chat template, which has no developer role."""
        message = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        return message if self.name is None else {**message, "name": self.name}


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    PROMPT_FIELD: ClassVar[str] = "messages"
    UNSUPPORTED: ClassVar[dict[str, Feature]] = UNSUPPORTED_CHAT

    messages: Annotated[list[ChatMessage], FailFast()] = Field(min_length=1)
    max_completion_tokens: int | None = Field(
        None, ge=1, le=MAX_INT, description="Newer name of max_tokens; wins over it."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise refusal("top_logprobs needs logprobs to be true", "top_logprobs")
        return self

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    DEFAULT_TOKENS: ClassVar[int | None] = DEFAULT_COMPLETION_TOKENS
    UNSUPPORTED: ClassVar[dict[str, Feature]] = UNSUPPORTED_COMPLETION

    # _check_prompt() checks all of it; pydantic would try 32,768 token ids as other types first, for 20 ms.
    prompt: SkipValidation[str | list[str] | list[int] | list[list[int]]] = Field(
        description="Text or token ids, one or several."
    )
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)

    @field_validator("prompt", mode="before")
    @classmethod
    def _check_prompt(cls, prompt: Any) -> Any:
        if not _is_prompt(prompt):
            raise refusal("prompt must be a string, a list of strings, a list of token ids or a list of such lists")
        if isinstance(prompt, list) and not isinstance(prompt[0], int) and len(prompt) > MAX_PROMPTS:
            raise refusal(f"at most {MAX_PROMPTS} prompts are allowed")
        if isinstance(prompt, str):
            _well_formed(prompt)
        elif isinstance(prompt[0], str):
            for text in prompt:
                _well_formed(text)
        return prompt

    @model_validator(mode="after")
    def _check_best_of(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != self.num_choices:
            raise refusal("best_of is not supported", "best_of")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list, whichever form the client used."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(cast(list[str | list[int]], self.prompt))

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def _part_text(part: Any) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise refusal("a content part must be an object with a type")
    if part["type"] != "text":
        raise refusal(f"content parts of type {part['type'][:40]!r} are not supported; only text is")
    kept = keep_known(part, ("type", "text"), ignored=IGNORED_IN_PART)
    if not isinstance(kept.get("text"), str):
        raise refusal("a text part needs a string in text")
    return str(kept["text"])


def _is_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return True
    if not isinstance(prompt, list) or not prompt:
        return False
    return (
        set(map(type, prompt)) == {str}
        or _are_tokens(prompt)
        or all(isinstance(entry, list) and entry and _are_tokens(entry) for entry in prompt)
    )


def _are_tokens(entries: list[Any]) -> bool:
    return set(map(type, entries)) == {int} and min(entries) >= 0
