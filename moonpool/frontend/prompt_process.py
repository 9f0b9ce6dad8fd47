"""A process that prepares long prompts, so that they never hold the interpreter lock of the front end.

JSON, validation and chat templates are Python: a body of 1 MB can hold the lock for more than 100 ms, in any thread.
The front end starts this program and talks to it through its standard input and output. Both carry frames, a
length (u32, little-endian) and as many bytes of msgpack: a LoadModel first, then PrepareBody -> PreparedBody or
PrepareFailure, one at a time. The process ends when its input ends.
"""

from __future__ import annotations

import importlib
import os
import signal
import struct
import sys
from collections.abc import Callable
from typing import BinaryIO, cast

import msgspec
import numpy as np

from moonpool.base.errors import Internal, InvalidInput, MoonpoolError
from moonpool.frontend.prompts import CHAT, COMPLETION, Endpoint, ModelSettings, Prepared, ServedModel, prepare
from moonpool.frontend.schema import SamplingBody

LENGTH = struct.Struct("<I")
MODULE = __name__
_ENDPOINTS = {one.name: cast(Endpoint[SamplingBody], one) for one in (CHAT, COMPLETION)}


class LoadModel(msgspec.Struct, frozen=True):
    """`loader` is "module:function"; the function takes the settings and returns a ServedModel."""

    loader: str
    model: str
    model_name: str | None
    max_model_len: int | None


class PrepareBody(msgspec.Struct, frozen=True):
    endpoint: str
    raw: bytes


class PreparedBody(msgspec.Struct, frozen=True, tag=True):
    """`body` is JSON, with a placeholder for the prompt; each of `prompts` are token ids as u32, little-endian."""

    body: bytes
    prompts: list[bytes]


class PrepareFailure(msgspec.Struct, frozen=True, tag=True):
    code: str
    message: str
    param: str | None


def pack(prepared: Prepared[SamplingBody], endpoint: Endpoint[SamplingBody]) -> PreparedBody:
    fields = prepared.body.model_dump(exclude_unset=True, exclude={endpoint.body_type.PROMPT_FIELD})
    fields[endpoint.body_type.PROMPT_FIELD] = endpoint.placeholder
    prompts = [np.asarray(prompt, dtype="<u4").tobytes() for prompt in prepared.prompts]
    return PreparedBody(msgspec.json.encode(fields), prompts)


def unpack(packed: PreparedBody, endpoint: Endpoint[SamplingBody]) -> Prepared[SamplingBody]:
    body = endpoint.body_type.model_validate_json(packed.body)
    return Prepared(body, [np.frombuffer(prompt, dtype="<u4").tolist() for prompt in packed.prompts])


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front end handles Ctrl-C, and then closes our input
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of print() must not get between frames
    load = _read(requests)
    if load is None:
        return
    call = msgspec.msgpack.decode(load, type=LoadModel)
    model = _loader(call.loader)(cast(ModelSettings, call))
    while (frame := _read(requests)) is not None:
        reply = msgspec.msgpack.encode(_answer(model, msgspec.msgpack.decode(frame, type=PrepareBody)))
        replies.write(LENGTH.pack(len(reply)))
        replies.write(reply)
        replies.flush()


def _answer(model: ServedModel, call: PrepareBody) -> PreparedBody | PrepareFailure:
    endpoint = _ENDPOINTS[call.endpoint]
    try:
        return pack(prepare(model, endpoint, call.raw), endpoint)
    except MoonpoolError as error:
        return PrepareFailure(error.code, str(error), error.param if isinstance(error, InvalidInput) else None)
    except Exception as error:  # noqa: BLE001 - a bug costs one request, not the process
        return PrepareFailure(Internal.code, f"a bug while preparing a prompt: {type(error).__name__}", None)


def _read(source: BinaryIO) -> bytes | None:
    """Return the next frame, or None at the end of the input."""
    head = source.read(LENGTH.size)
    return source.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None


def _loader(name: str) -> Callable[[ModelSettings], ServedModel]:
    module, _, function = name.partition(":")
    return cast(Callable[[ModelSettings], ServedModel], getattr(importlib.import_module(module), function))


if __name__ == "__main__":
    main()
    sys.exit(0)
