"""Request fields beside those of schema.py: which are accepted without effect, and which features are refused by name.

A field is accepted without effect only if it cannot change the answer. A field that would change it, and that this
server does not implement, is refused unless its value asks for nothing (null, false, empty, or the default of the
API that defines it). Every other field is unknown and refused too, so that a misspelt field is never ignored.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticCustomError

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
