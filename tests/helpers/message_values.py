"""Random values of any message type, many of them outside of any range, from a seed."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
from msgspec import inspect

from moonpool.base.rpc import Call

INTEGERS = [-(2**63), -(2**31), -1, 0, 1, 2, 3, 63, 64, 4095, 65536, 2**31 - 1, 2**31, 2**32 + 7, 2**53, 2**62]
INTEGERS += [2**63 - 1, 2**63, 2**64 - 1]
FLOATS = [math.nan, math.inf, -math.inf, -1.0, -0.0, 0.0, 1e-300, 0.5, 3.0, 1e9, 1e300]
TEXTS = [
    "",
    "x",
    "a.dram",
    "w0",
    "w1",
    "prefill",
    "unix:/nowhere",
    "tcp:h:99999",
    "\0",
    "ü\U0001f600",
    "(a+)+$",
    "y" * 5000,
]
BYTES = [b"", b"k0", b"k1", b"k2", b"\xff" * 32, b"\0", b"z" * 1024, b"z" * 5000]
WRONG: list[Any] = [None, True, "text", b"bytes", -1, 1.5, [], {}, [[]], {"a": 1}]


class MessageValues:
    """Random values of msgspec's types, most of them of the right kind and many outside of any range."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.extreme = 0.4  # how often an integer is one of INTEGERS

    def of(self, kind: inspect.Type) -> Any:
        rng = self.rng
        if rng.random() < 0.01:
            return rng.choice(WRONG)
        match kind:
            case inspect.StructType():
                return self.struct(kind)
            case inspect.UnionType():
                return self.of(rng.choice(kind.types))
            case inspect.ListType() | inspect.VarTupleType():
                return [self.of(kind.item_type) for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 40]))]
            case inspect.TupleType():
                return [self.of(each) for each in kind.item_types]
            case inspect.DictType():
                pairs = [(self.of(kind.key_type), self.of(kind.value_type)) for _ in range(rng.choice([0, 1, 3]))]
                return {key: value for key, value in pairs if isinstance(key, (int, str, bytes))}
            case inspect.EnumType():
                return rng.choice([*(each.value for each in kind.cls), 0, 99, "x"])
        return self.plain(kind)

    def plain(self, kind: inspect.Type) -> Any:
        rng = self.rng
        match kind:
            case inspect.IntType():
                return rng.choice(INTEGERS) if rng.random() < self.extreme else rng.randint(0, 3)
            case inspect.FloatType():
                return rng.choice(FLOATS)
            case inspect.StrType():
                return rng.choice(TEXTS)
            case inspect.BytesType(min_length=int(nbytes)) if rng.random() < 0.7:
                return bytes([rng.randint(0, 3)]) * nbytes
            case inspect.BytesType():
                return rng.choice(BYTES)
            case inspect.BoolType():
                return rng.random() < 0.5
            case inspect.NoneType():
                return None
        raise AssertionError(f"no values for {kind}")

    def struct(self, kind: inspect.StructType) -> Any:
        fields = [(field.name, self.of(field.type)) for field in kind.fields]
        if not kind.array_like:
            return dict(fields)
        return [*([] if kind.tag is None else [kind.tag]), *(value for _, value in fields)]

    def body(self, call: type[Call[Any]]) -> bytes:
        return msgspec.msgpack.encode(self.of_call(call))

    def of_call(self, call: type[Call[Any]]) -> Any:
        kind = inspect.type_info(call)
        assert isinstance(kind, inspect.StructType)
        self.extreme = self.rng.choice([0.05, 0.4])
        return self.struct(kind)
