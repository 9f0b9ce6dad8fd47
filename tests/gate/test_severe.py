"""What a severe failure says."""

from __future__ import annotations

import pytest
from severe import LeftoverProcess, SevereError, WrongBytes, WrongToken, check_bytes, check_no_process, check_tokens


def test_what_is_right_passes() -> None:
    check_bytes(memoryview(b"abc"), bytearray(b"abc"))
    check_tokens((1, 2), [1, 2])
    check_no_process([])
    with pytest.raises(SevereError):
        check_bytes(b"abc", b"abd")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (b"abXd", "page 3: 4 bytes; from byte 2: 5864, not 6364"),
        (b"ab", "page 3: 2 bytes instead of 4; from byte 2: nothing, not 6364"),
        (b"abcde", "page 3: 5 bytes instead of 4; from byte 4: 65, not nothing"),
    ],
)
def test_wrong_bytes_name_the_first_place(found: bytes, said: str) -> None:
    with pytest.raises(WrongBytes) as error:
        check_bytes(found, b"abcd", "page 3")
    assert str(error.value) == said


def test_a_wrong_token_names_its_place() -> None:
    with pytest.raises(WrongToken) as error:
        check_tokens([5, 6, 7], [5, 8], "prompt 4")
    assert str(error.value) == "prompt 4: 3 instead of 2; at 1: [6], not [8]"


def test_a_leftover_process_is_named() -> None:
    with pytest.raises(LeftoverProcess, match=r"^left behind: 17, worker$"):
        check_no_process([17, "worker"])
