"""Renders a model's own chat template (Jinja, as Hugging Face defines it) in a sandbox. No torch.

A template is somebody else's program: it runs in Jinja's immutable sandbox and sees messages, tools and the
special tokens, nothing else. Messages that it rejects are the caller's fault and raise InvalidInput.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moonpool.base.errors import InvalidInput, ModelError

Message = Mapping[str, Any]


class ChatTemplate:
    """A compiled template. Rendering the same messages twice gives the same text (bar templates with a date)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are the names a template knows them by: bos_token, eos_token, ..."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _reject
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ModelError(f"the model's chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt's text; InvalidInput when the template cannot make one of these messages."""
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                **self._special_tokens,
            )
        except (TemplateError, TypeError, ValueError, AttributeError, LookupError) as error:
            raise InvalidInput(
                f"the model's chat template rejects these messages: {error}", param="messages"
            ) from error


def _reject(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Not Jinja's own, which escapes for HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
