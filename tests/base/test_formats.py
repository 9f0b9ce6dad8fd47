"""docs/formats.md is true: its vectors come out of the code, byte for byte."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moonpool.base.errors import Overloaded, StaleGeneration
from moonpool.base.frames import FrameDecoder, FrameKind, encode_frame
from moonpool.base.keys import CacheIdentity, chain_keys, object_key, tenant_root
from moonpool.base.object_header import ObjectHeader, ObjectKind, Piece, unpack
from moonpool.base.rpc.protocol import Hello, encode_call, encode_error, encode_value
from moonpool.engine.kv_memory import PIECE_LAYOUT, KvLayout
from moonpool.transfer.transports.tcp import frames as tcp_frames
from moonpool.worker.messages import CommitHandoff, OpenHandoff, TokenOut

DOC = Path(__file__).parents[2] / "docs" / "formats.md"


@pytest.fixture(scope="module")
def vectors() -> dict[str, Any]:
    match = re.search(r"```json\n(.*?)```", DOC.read_text(), re.DOTALL)
    assert match is not None
    found: dict[str, Any] = json.loads(match[1])
    return found


@pytest.fixture
def identity(vectors: dict[str, Any]) -> CacheIdentity:
    return CacheIdentity(**vectors["identity"]["fields"])


def test_identity(vectors: dict[str, Any], identity: CacheIdentity) -> None:
    assert identity.digest().hex() == vectors["identity"]["digest"]
    assert identity.piece_layout == PIECE_LAYOUT


def test_keys(vectors: dict[str, Any], identity: CacheIdentity) -> None:
    want = vectors["keys"]
    root = tenant_root(bytes.fromhex(want["tenant_secret"]), identity.digest())
    chain = chain_keys(root, list(range(40)), identity.block_tokens)
    assert root.hex() == want["root"]
    assert [key.hex() for key in chain] == want["chain"]
    assert object_key(chain[0], 1, 2).hex() == want["object_key_group_1_shard_2"]


def test_header(vectors: dict[str, Any], identity: CacheIdentity) -> None:
    want = vectors["header"]
    header = ObjectHeader(
        key=object_key(bytes.fromhex(vectors["keys"]["chain"][0])),
        generation=want["generation"],
        pieces=tuple(Piece(*piece) for piece in want["pieces"]),
        kind=ObjectKind.BLOCK,
        identity=identity.digest(),
        valid_tokens=want["valid_tokens"],
    )
    packed = header.pack()
    prefix = bytes.fromhex(want["packed_prefix"])
    assert len(packed) == want["nbytes"]
    assert packed[: len(prefix)] == prefix
    assert not any(packed[len(prefix) :])
    assert unpack(prefix + bytes(want["nbytes"] - len(prefix))) == header


def test_page_layout(vectors: dict[str, Any], identity: CacheIdentity) -> None:
    want = vectors["layout"]
    layout = KvLayout(
        num_pages=want["num_pages"],
        num_layers=identity.num_layers,
        num_kv_heads=identity.num_kv_heads,
        block_tokens=identity.block_tokens,
        head_dim=identity.head_dim,
        dtype="float32",
    )
    assert (layout.piece_nbytes, layout.page_nbytes) == (want["piece_nbytes"], want["page_nbytes"])
    assert list(layout.piece(2, 1)) == want["piece_2_1"]


def made_frames() -> dict[str, dict[str, bytes]]:
    opened = OpenHandoff(request_id="r1", epoch=2, generation=9)
    checksums = np.array([[1, 2], [3, 4]], dtype="<u4").tobytes()
    commit = CommitHandoff(
        request_id="r1", epoch=2, generation=9, first=TokenOut(42), num_tokens=20, checksums=checksums
    )
    write = tcp_frames.Request(tcp_frames.FrameOp.WRITE, 7, "node-0/dram", 5, 4096, 3, 12)
    read = tcp_frames.Request(tcp_frames.FrameOp.READ, 8, "node-0/dram", 5, 4096, 3, 12)
    same = tcp_frames.pack_verdict(8, tcp_frames.ReadVerdict.SAME)
    return {
        "frames": {
            "hello": encode_value(FrameKind.HELLO, 0, Hello("store", "client", 5)),
            "call": encode_call(opened, 1, 1500),
            "error": encode_error(1, Overloaded("busy", retry_after_s=2.5)),
            "cancel": encode_frame(FrameKind.CANCEL, 1),
            "ping": encode_frame(FrameKind.PING, 0),
            "pong": encode_frame(FrameKind.PONG, 0),
        },
        "handoff": {"open": encode_call(opened, 1, 1500), "commit": encode_call(commit, 2, 1500)},
        "transfer": {
            "write_request": tcp_frames.pack_request(write) + b"abc",
            "read_request": tcp_frames.pack_request(read),
            "read_response": tcp_frames.pack_response(8, 3) + b"xyz" + same,
            "refusal": tcp_frames.pack_refusal(7, StaleGeneration("too late")),
        },
    }


def test_frames_handoff_and_transfer(vectors: dict[str, Any]) -> None:
    for section, frames in made_frames().items():
        assert {name: frame.hex() for name, frame in frames.items()} == vectors[section]


def test_the_frames_decode_again(vectors: dict[str, Any]) -> None:
    stream = b"".join(bytes.fromhex(text) for text in vectors["frames"].values())
    kinds = [frame.kind for frame in FrameDecoder().feed(stream)]
    assert [kind.name.lower() for kind in kinds] == list(vectors["frames"])
