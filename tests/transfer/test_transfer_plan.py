from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moonpool.transfer.paths.plan import cut_batch, take_run

sizes = st.lists(st.integers(0, 300), max_size=20)
limits = st.integers(1, 100)


@given(sizes, limits)
def test_slices_cover_every_request_exactly_and_in_order(request_nbytes: list[int], limit: int) -> None:
    slices = cut_batch(request_nbytes, limit)
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
    slices = cut_batch(request_nbytes, limit)
    start, seen = 0, []
    while start < len(slices):
        end = take_run(slices, start, limit)
        run = slices[start:end]
        assert run
        assert sum(part.nbytes for part in run) <= limit
        seen += run
        start = end
    assert seen == slices
