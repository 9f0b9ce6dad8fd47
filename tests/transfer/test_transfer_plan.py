from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moonpool.transfer.paths.peer_queue import Slice, WaitingSlices

sizes = st.lists(st.integers(0, 300), max_size=20)
limits = st.integers(1, 100)


def runs_of(request_nbytes: list[int], limit: int) -> list[list[Slice]]:
    """The runs into which a batch of such requests is cut."""
    piece = WaitingSlices([Slice(request, 0, nbytes) for request, nbytes in enumerate(request_nbytes)], 0.0)
    runs: list[list[Slice]] = []
    while not piece.is_empty:
        expected = piece.nbytes_up_to(limit)
        runs.append(piece.take_run(limit))
        assert sum(part.nbytes for part in runs[-1]) <= expected
    return runs


@given(sizes, limits)
def test_slices_cover_every_request_exactly_and_in_order(request_nbytes: list[int], limit: int) -> None:
    slices = [part for run in runs_of(request_nbytes, limit) for part in run]
    assert [part.request for part in slices] == sorted(part.request for part in slices)
    for request, nbytes in enumerate(request_nbytes):
        own = [part for part in slices if part.request == request]
        assert own, "a request of no bytes has a slice too"
        at = 0
        for part in own:
            assert part.start == at
            assert part.nbytes <= limit
            assert part.nbytes > 0 or nbytes == 0
            at += part.nbytes
        assert at == nbytes


@given(sizes, limits)
def test_runs_hand_out_every_slice_once(request_nbytes: list[int], limit: int) -> None:
    runs = runs_of([min(nbytes, limit) for nbytes in request_nbytes], limit)
    assert all(runs)
    assert all(sum(part.nbytes for part in run) <= limit for run in runs)
    assert [part.request for run in runs for part in run] == list(range(len(request_nbytes)))
