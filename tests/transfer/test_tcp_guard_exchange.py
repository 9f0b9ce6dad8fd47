"""The exchange of proofs that opens a guarded connection, pure: golden bytes, impostors, nonsense."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from guarded_port import resealed
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.base.errors import ConfigError, DamagedFrame, NotFound, Overloaded, ProtocolError, Unauthorized
from moonpool.base.security import Secret
from moonpool.transfer.transports.tcp.frames import REQUEST_NBYTES
from moonpool.transfer.transports.tcp.guard import (
    FRAME_NBYTES,
    CallerSide,
    Guard,
    OwnerSide,
    read_refusal,
)

VALUE = b"correct horse battery staple"
GUARD = Guard(secret=Secret(VALUE))


def test_a_guard_guards_something(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a secret, for TLS or for both"):
        Guard()
    assert Guard.from_files(None, None) is None
    path = tmp_path / "secret"
    path.write_bytes(VALUE + b"\n")
    path.chmod(0o600)
    made = Guard.from_files(str(path), None)
    assert made is not None
    assert made.secret == GUARD.secret
    assert "correct" not in repr(made)


def test_golden_exchange() -> None:
    """The vector of docs/formats.md."""
    secret = Secret(b"moonpool test secret")
    caller, owner = CallerSide(secret, bytes(range(32))), OwnerSide(secret, bytes(range(32, 64)))
    hello = caller.hello()
    challenge = owner.challenge(hello)
    proof = caller.proof(challenge)
    welcome = owner.welcome(proof)
    caller.check_welcome(welcome)
    assert hello.hex() == "4d50544702010100" + bytes(range(32)).hex() + "00" * 12 + "0b4d7050"
    assert challenge.hex() == "4d50544702020100" + bytes(range(32, 64)).hex() + "00" * 12 + "0bbe1b4c"
    value = "33254fd6bb76f91e9e9b033493a3480e3b9e777e201c37df751ef7c6bdb621b8"
    assert proof.hex() == "4d50544702030100" + value + "00" * 12 + "880f9816"
    value = "86c3bb4baba015eb858cb97106805a630818fc7bf13f0ad39f2ac6f51a5eb95d"
    assert welcome.hex() == "4d50544702040100" + value + "00" * 12 + "e73e3a5f"


def test_a_hello_is_refused_at_once_by_an_owner_without_a_guard() -> None:
    assert len(CallerSide(GUARD.secret).hello()) == FRAME_NBYTES >= REQUEST_NBYTES


def test_nonces_are_new_each_time() -> None:
    assert CallerSide(GUARD.secret).hello() != CallerSide(GUARD.secret).hello()
    hello = CallerSide(GUARD.secret).hello()
    assert OwnerSide(GUARD.secret).challenge(hello) != OwnerSide(GUARD.secret).challenge(hello)


def test_nothing_heard_before_helps_an_impostor() -> None:
    caller, owner = CallerSide(GUARD.secret), OwnerSide(GUARD.secret)
    proof = caller.proof(owner.challenge(caller.hello()))
    welcome = owner.welcome(proof)
    again = OwnerSide(GUARD.secret)
    again.challenge(caller.hello())
    with pytest.raises(Unauthorized):  # an old proof
        again.welcome(proof)
    victim = CallerSide(GUARD.secret)
    victim.proof(OwnerSide(GUARD.secret).challenge(victim.hello()))
    with pytest.raises(Unauthorized):  # an old welcome
        victim.check_welcome(welcome)
    mirrored = CallerSide(GUARD.secret)
    own_proof = mirrored.proof(resealed(mirrored.hello(), 2))
    with pytest.raises(Unauthorized):  # its own words sent back
        mirrored.check_welcome(resealed(own_proof, 4))


@settings(max_examples=300)
@given(st.integers(0, FRAME_NBYTES * 8 - 1), st.sampled_from(["hello", "challenge", "proof", "welcome"]))
def test_no_bit_may_change(bit: int, step: str) -> None:
    """By mistake: the checksum shows it. On purpose: a changed nonce is found when the proofs are compared."""
    caller, owner = CallerSide(GUARD.secret), OwnerSide(GUARD.secret)

    def passed(name: str, frame: bytes) -> bytes:
        if name != step:
            return frame
        changed = bytearray(frame)
        changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)

    def meet() -> None:
        challenge = passed("challenge", owner.challenge(passed("hello", caller.hello())))
        caller.check_welcome(passed("welcome", owner.welcome(passed("proof", caller.proof(challenge)))))

    with pytest.raises((ProtocolError, DamagedFrame)):
        meet()


@settings(max_examples=100)
@given(st.integers(64, 40 * 8 - 1), st.sampled_from(["hello", "challenge", "proof", "welcome"]))
def test_no_value_may_be_changed_on_purpose(bit: int, step: str) -> None:
    caller, owner = CallerSide(GUARD.secret), OwnerSide(GUARD.secret)

    def passed(name: str, frame: bytes) -> bytes:
        changed = bytearray(frame)
        changed[bit // 8] ^= (1 << bit % 8) if name == step else 0
        return resealed(bytes(changed), changed[5])

    def meet() -> None:
        challenge = passed("challenge", owner.challenge(passed("hello", caller.hello())))
        caller.check_welcome(passed("welcome", owner.welcome(passed("proof", caller.proof(challenge)))))

    with pytest.raises(Unauthorized):
        meet()


@settings(max_examples=500)
@given(st.binary(max_size=60), st.booleans(), st.booleans())
def test_nonsense_is_refused_and_nothing_else_happens(data: bytes, whole: bool, with_secret: bool) -> None:
    secret = GUARD.secret if with_secret else None
    if whole:
        data = (b"MPTG\x02" + data)[:FRAME_NBYTES].ljust(FRAME_NBYTES, b"\0")
    caller, owner = CallerSide(secret), OwnerSide(secret)
    for feed in (owner.challenge, caller.proof):
        with contextlib.suppress(ProtocolError, DamagedFrame, Unauthorized):
            assert len(feed(data)) == FRAME_NBYTES
    for check in (owner.welcome, caller.check_welcome):
        if secret is not None or not whole:
            with pytest.raises((ProtocolError, DamagedFrame, Unauthorized)):
                check(data)


def test_an_unproven_owner_is_not_believed() -> None:
    """It must not be able to say that a segment is gone, or anything else that callers act on."""
    assert isinstance(read_refusal(NotFound("the segment is gone")), Unauthorized)
    assert isinstance(read_refusal(ProtocolError("what?")), Unauthorized)
    assert isinstance(read_refusal(Overloaded("later")), Overloaded)
