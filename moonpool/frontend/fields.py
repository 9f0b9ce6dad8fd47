"""Checks request bodies: from bytes to a body of schema.py, or an InvalidInput that names the field and, for numbers,
the allowed range.

Fields beside those of schema.py are ignored, refused by name, or unknown. A field is ignored only if it cannot change
the answer. A field that would change it, and that this server does not implement, is refused unless its value asks for
nothing (null, false, empty, or the default of the API that defines it). Every other field is unknown and refused too,
so that a misspelt field is never ignored.

The content type does not matter: `curl -d` without a header claims to send a form, and sends JSON.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError

from moonpool.base.errors import InvalidInput

_B = TypeVar("_B", bound=BaseModel)
_RANGE_ERRORS = frozenset({"greater_than", "greater_than_equal", "less_than", "less_than_equal", "int_parsing_size"})
_OBJECT = "must be a JSON object"
_WORDS = {"extra_forbidden": "unknown field", "model_type": _OBJECT, "dict_type": _OBJECT}  # clearer than pydantic's
_HOW_TO_SEND = "send a JSON object, e.g. curl -H 'Content-Type: application/json' -d '{...}'"
_NOTHING: tuple[object, ...] = (None, False, "", [], {})
_ONLY_TRUE: tuple[object, ...] = (None, True)  # of features whose default is to be switched on
_MAX_NAME_CHARS = 80

# Accepted without effect: name -> why it cannot change the answer.
IGNORED: dict[str, str] = {
    "user": "names the end user to the provider",
    "safety_identifier": "names the end user to the provider",
    "metadata": "labels for a stored answer",
    "store": "answers are never stored",
    "service_tier": "there is one tier",
    "prompt_cache_key": "a routing hint; reuse of KV is found by content",
    "prompt_cache_retention": "a hint; how long KV is kept is the pool's policy",
    "prompt_cache_options": "a hint; reuse of KV is found by content",
    "prediction": "only speeds up an answer that would be the same",
    "parallel_tool_calls": "has a meaning only together with tools",
}


@dataclass(frozen=True)
class Feature:
    """A feature that is refused by name, unless the value is one of `neutral`."""

    reason: str
    neutral: tuple[object, ...] = _NOTHING

    def is_asked_for(self, value: object) -> bool:
        return not any(type(value) is type(neutral) and value == neutral for neutral in self.neutral)


def _all(reason: str, *names: str) -> dict[str, Feature]:
    return dict.fromkeys(names, Feature(reason))


def _each(*names: str) -> dict[str, Feature]:
    return {name: Feature(f"{name} is not supported") for name in names}


UNSUPPORTED: dict[str, Feature] = {
    **_all(
        "structured output (guided decoding) is not supported",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "guided_decoding_backend",
        "guided_whitespace_pattern",
        "structural_tag",
    ),
    **_each(
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
        "logits_processors",
        "use_beam_search",
        "include_stop_str_in_output",
        "truncate_prompt_tokens",
        "prompt_logprobs",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "cache_salt",
        "kv_transfer_params",
        "vllm_xargs",
        "request_id",
    ),
    "response_format": Feature('only response_format {"type": "text"} is supported', (None, {}, {"type": "text"})),
    "skip_special_tokens": Feature("only skip_special_tokens true is supported", _ONLY_TRUE),
    "spaces_between_special_tokens": Feature("only spaces_between_special_tokens true is supported", _ONLY_TRUE),
    "length_penalty": Feature("length_penalty is not supported", (None, 1, 1.0)),
}
UNSUPPORTED_CHAT: dict[str, Feature] = {
    **UNSUPPORTED,
    **_all("tools are not supported", "tools", "functions"),
    "tool_choice": Feature("tools are not supported", (None, "none", "auto")),
    "function_call": Feature("functions are not supported", (None, "none", "auto")),
    "audio": Feature("audio output is not supported"),
    "modalities": Feature('only modalities ["text"] is supported', (None, [], ["text"])),
    "web_search_options": Feature("web search is not supported", (None,)),
    "moderation": Feature("moderation is not supported"),
    "reasoning_effort": Feature("reasoning_effort is not supported", (None, "none")),
    "include_reasoning": Feature("only include_reasoning true is supported", _ONLY_TRUE),
    "verbosity": Feature("verbosity is not supported", (None, "medium")),
    "add_generation_prompt": Feature("only add_generation_prompt true is supported", _ONLY_TRUE),
    **_each(
        "add_special_tokens",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
        "documents",
        "echo",
        "mm_processor_kwargs",
    ),
}
UNSUPPORTED_COMPLETION: dict[str, Feature] = {
    **UNSUPPORTED,
    **_each("echo", "suffix", "prompt_embeds"),
    "add_special_tokens": Feature("only add_special_tokens true is supported", _ONLY_TRUE),
}
# Of one message in a conversation. Clients send an assistant's answer back with all of its fields, most of them null.
IGNORED_IN_MESSAGE: dict[str, str] = {"annotations": "links that an answer had; they are no part of its text"}
UNSUPPORTED_IN_MESSAGE: dict[str, Feature] = {
    **_all("tool calls are not supported", "tool_calls", "function_call", "tool_call_id"),
    **_each("audio", "refusal", "reasoning", "reasoning_content", "weight"),
}
IGNORED_IN_PART: dict[str, str] = {"prompt_cache_breakpoint": "a hint; reuse of KV is found by content"}


def keep_known(
    data: Mapping[str, Any],
    known: Collection[str],
    *,
    ignored: Collection[str] = (),
    unsupported: Mapping[str, Feature] | None = None,
) -> dict[str, Any]:
    """Return the fields of `data` that are in `known`. Raise a refusal that names the first one to be refused."""
    kept = {}
    features = unsupported or {}
    for name, value in data.items():
        if name in known:
            kept[name] = value
        elif name in features:
            if features[name].is_asked_for(value):
                raise refusal(features[name].reason, name)
        elif name not in ignored:
            raise _unknown(name, [*known, *features, *ignored])
    return kept


def refusal(message: str, field: str | None = None) -> PydanticCustomError:
    """A validation error about `field` of the object that is being validated, or about the whole object."""
    return PydanticCustomError("refused", "{reason}", {"reason": message, "field": field})


def shown_name(name: str) -> str:
    """A field name of a client in a form that is safe to print: bounded, printable ASCII."""
    return name[:_MAX_NAME_CHARS].encode("ascii", "backslashreplace").decode()[:_MAX_NAME_CHARS]


def _unknown(name: str, known: Collection[str]) -> PydanticCustomError:
    shown = shown_name(name)  # pydantic's errors cannot hold half a surrogate pair
    similar = difflib.get_close_matches(shown, known, n=1)
    hint = f"; did you mean {similar[0]!r}?" if similar else ""
    return refusal(f"unknown field {shown!r}{hint}", shown)


def decode_json(raw: bytes) -> Any:
    """Return the value that `raw` holds as JSON; InvalidInput if it holds none.

    msgspec takes a quarter of the time and gives equal values, but refuses what json accepts (half a surrogate pair,
    NaN), and says less about errors.
    """
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(raw)
    try:
        return json.loads(raw)
    except json.JSONDecodeError as error:
        raise InvalidInput(
            f"the body is not valid JSON: {error.msg} at character {error.pos}; {_HOW_TO_SEND}"
        ) from None
    except UnicodeDecodeError:
        raise InvalidInput(f"the body is not valid JSON: it is not UTF-8 text; {_HOW_TO_SEND}") from None
    except RecursionError:
        raise InvalidInput("the body is not valid JSON: its values are nested too deeply") from None
    except ValueError:  # Python refuses to convert integers of thousands of digits
        raise InvalidInput("the body is not valid JSON: a number has too many digits") from None


def validated(model: type[_B], data: Any) -> _B:
    """Return `data` as an instance of `model`; InvalidInput names the first thing that is wrong."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _invalid(error, model) from None


def _invalid(error: ValidationError, model: type[BaseModel]) -> InvalidInput:
    try:
        first = error.errors(include_url=False, include_input=False)[0]
    except UnicodeEncodeError:  # pydantic cannot show such a name
        return InvalidInput("a field's name holds half a surrogate pair, which is no character")
    message, param = complaint(first, first["loc"], model)
    return InvalidInput(message, param=param)


def complaint(
    error: Mapping[str, Any], path: Sequence[int | str], model: type[BaseModel] | None = None
) -> tuple[str, str | None]:
    """Return (message, param) of one of pydantic's errors at `path`. The input itself is not repeated."""
    field = error.get("ctx", {}).get("field")  # such a message names it already
    steps = [*path, field] if field is not None else list(path)
    where, param = _joined(path), _joined(steps)
    text = _WORDS.get(error["type"], str(error["msg"]))
    if model is not None and steps and error["type"] in _RANGE_ERRORS:
        text += _allowed(model, str(steps[0]))
    return (f"{where}: {text}" if where else text), param


def _joined(steps: Sequence[int | str]) -> str | None:
    return ".".join(shown_name(str(step)) for step in steps) or None


def _allowed(model: type[BaseModel], name: str) -> str:
    low, high = _ranges(model).get(name, (None, None))
    return "" if low is None or high is None else f" (allowed: {low} to {high})"


@functools.cache
def _ranges(model: type[BaseModel]) -> dict[str, tuple[Any, Any]]:
    """The smallest and the largest number that each field, or an element of it, may be."""
    return {name: _limits(schema) for name, schema in model.model_json_schema()["properties"].items()}


def _limits(schema: Mapping[str, Any]) -> tuple[Any, Any]:
    for option in (schema, *schema.get("anyOf", ()), *(part.get("items", {}) for part in schema.get("anyOf", ()))):
        if "minimum" in option:
            return option["minimum"], option.get("maximum")
    return None, None
