"""`moonpool chat`: a conversation with a running server, streamed, one turn per line.

Answers go to standard output; prompts and figures (time to first token, cached tokens) to standard error, so it can
be piped. A line that begins with `/` is a command (`/help` lists them) and never reaches the model. The end of input
ends the conversation; Ctrl-C stops the answer that is being given.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from moonpool.base.errors import ConfigError, MoonpoolError, ProtocolError, Unavailable
from moonpool.base.run_dirs import live_urls
from moonpool.cli.options import command_from

_PROMPT = "you> "
_CONNECT_TIMEOUT_S = 5.0
_READ_TIMEOUT_S = 300.0
_DEFAULT_URL = "http://127.0.0.1:8000"
_HELP = """\
/help     show this
/new      begin a new conversation
/exit     end it (or Ctrl-D)
//TEXT    send TEXT with one / in front
Ctrl-C    stop the answer that is being given"""


@dataclass(frozen=True)
class ChatConfig:
    # URL of the server, without /v1; default: the service running on this machine, or http://127.0.0.1:8000
    url: str | None = None
    model: str | None = None  # default: the first model the server lists
    system: str | None = None  # system prompt
    max_tokens: int = 512  # most tokens per answer
    temperature: float | None = None  # default: the server's
    api_key: str | None = None  # default: $MOONPOOL_API_KEY or $OPENAI_API_KEY


@dataclass
class ChatTurn:
    """One answer, its times and its token usage, which is empty if the server sent none."""

    text: str = ""
    ttft_s: float | None = None
    total_s: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)

    def figures(self) -> str:
        parts = [f"first token {self.ttft_s:.2f} s" if self.ttft_s is not None else "no token"]
        answered = self.usage.get("completion_tokens")
        if answered is not None and self.ttft_s is not None and self.total_s > self.ttft_s:
            parts.append(f"{answered} tokens, {max(0, answered - 1) / (self.total_s - self.ttft_s):.1f}/s")
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if cached is not None:
            parts.append(f"{cached} of {self.usage.get('prompt_tokens')} prompt tokens cached")
        return " | ".join(parts)


class Conversation:
    """Keeps the messages so far. Errors of the server and of the network are raised as MoonpoolErrors."""

    def __init__(self, config: ChatConfig) -> None:
        key = config.api_key or os.environ.get("MOONPOOL_API_KEY") or os.environ.get("OPENAI_API_KEY")
        self._config = config
        self.url = config.url or find_url()
        self._client = httpx.Client(
            base_url=self.url.rstrip("/").removesuffix("/v1"),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(_READ_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S),
            trust_env=False,  # a proxy for the internet must not be used for this machine
        )
        self.reset()
        self.model = config.model

    def reset(self) -> None:
        """Start a new conversation."""
        system = self._config.system
        self._messages = [{"role": "system", "content": system}] if system else []

    def connect(self) -> str:
        """Return the model's name, from the server if none was given. Raise Unavailable if there is no server."""
        if self.model is None:
            try:
                response = self._client.get("/v1/models")
                _raise_for_status(response)
                self.model = str(response.json()["data"][0]["id"])
            except httpx.HTTPError as error:
                raise self._network_error(error) from error
            except (ValueError, LookupError, TypeError) as error:
                raise ProtocolError(f"{self.url} does not answer like an OpenAI server") from error
        return self.model

    def ask(self, text: str) -> Generator[ChatTurn, None, None]:
        """Yield the growing turn after every piece of text, and at the end. A turn without text is not kept."""
        question = {"role": "user", "content": text}
        turn, begin_s = ChatTurn(), time.monotonic()
        try:
            for event in self._events([*self._messages, question]):
                turn.usage = event.get("usage") or turn.usage
                piece = _content(event)
                if piece:
                    turn.text += piece
                    if turn.ttft_s is None:
                        turn.ttft_s = time.monotonic() - begin_s
                    yield turn
        finally:
            turn.total_s = time.monotonic() - begin_s
            if turn.text:
                self._messages += [question, {"role": "assistant", "content": turn.text}]
        yield turn

    def _events(self, messages: list[dict[str, str]]) -> Iterator[dict[str, Any]]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self._config.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._config.temperature is not None:
            body["temperature"] = self._config.temperature
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                _raise_for_status(response)
                yield from _server_sent(response)
        except httpx.HTTPError as error:
            raise self._network_error(error) from error

    def _network_error(self, error: httpx.HTTPError) -> MoonpoolError:
        if isinstance(error, httpx.ConnectError):
            return Unavailable(f"nothing answers at {self.url}; start a server with: moonpool serve")
        return Unavailable(f"the connection to {self.url} failed: {error or type(error).__name__}")

    def close(self) -> None:
        self._client.close()


def find_url() -> str:
    """Return the URL of the service that runs on this machine; the default URL if none runs.

    Raise ConfigError, which lists them, if several run.
    """
    running = live_urls()
    if len(running) > 1:
        raise ConfigError(f"{len(running)} services run on this machine; choose one with --url: {', '.join(running)}")
    return running[0] if running else _DEFAULT_URL


def _server_sent(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise Unavailable(str(event["error"].get("message", "the server failed")))
        yield event


def _content(event: dict[str, Any]) -> str:
    choices = event.get("choices") or [{}]
    return (choices[0].get("delta") or {}).get("content") or ""


def _raise_for_status(response: httpx.Response) -> None:
    if not response.is_error:
        return
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = response.text[:200] or response.reason_phrase
    raise Unavailable(f"the server refused ({response.status_code}): {message}")


def _lines() -> Iterator[str]:
    """Yield the lines that the user types, until the end of input."""
    terminal = sys.stdin.isatty()
    if terminal:
        import readline  # noqa: F401 - importing it gives input() line editing and a history
    while True:
        try:
            line = input(_PROMPT if terminal else "").strip()
        except EOFError:
            return
        if line:
            yield line


def _run_command(conversation: Conversation, command: str) -> bool:
    """Run a command that begins with /. Return False if it ends the conversation."""
    match command.split()[0]:
        case "/exit" | "/quit":
            return False
        case "/new":
            conversation.reset()
            _say("a new conversation")
        case "/help":
            _say(_HELP)
        case unknown:
            _say(f"there is no command {unknown}; /help lists them, //TEXT sends /TEXT to the model")
    return True


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _answer(conversation: Conversation, line: str) -> None:
    shown, turn = 0, ChatTurn()
    try:
        with contextlib.closing(conversation.ask(line)) as turns:
            for turn in turns:
                print(turn.text[shown:], end="", flush=True)
                shown = len(turn.text)
    except KeyboardInterrupt:
        print(" ...", end="")
    print(flush=True)
    _say(f"[{turn.figures()}]")


def _talk(conversation: Conversation) -> None:
    for line in _lines():
        if line.startswith("/") and not line.startswith("//"):
            if not _run_command(conversation, line):
                return
            continue
        try:
            _answer(conversation, line.removeprefix("/") if line.startswith("//") else line)
        except MoonpoolError as error:
            if not sys.stdin.isatty():
                raise
            _say(f"moonpool chat: {error}")


def _run(config: ChatConfig) -> None:
    conversation = Conversation(config)
    try:
        model = conversation.connect()
        if sys.stdin.isatty():
            _say(f"talking to {model} at {conversation.url}; /help lists the commands, /exit ends it")
        _talk(conversation)
    except KeyboardInterrupt:
        _say("")
    finally:
        conversation.close()


command = command_from(_run, ChatConfig)
