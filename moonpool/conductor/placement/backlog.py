"""How long a newcomer waits: the predicted work sent to one prefill worker, in order. Pure."""

from __future__ import annotations


class Backlog:
    """Predicted seconds per request. The head is being worked on, so the time it has had counts as done."""

    def __init__(self) -> None:
        self._work_s: dict[str, float] = {}
        self._total_s = 0.0
        self._head_since_s = 0.0

    def __len__(self) -> int:
        return len(self._work_s)

    def add(self, request_id: str, work_s: float, now_s: float) -> None:
        assert request_id not in self._work_s, "a request is sent to a worker once"
        if not self._work_s:
            self._total_s, self._head_since_s = 0.0, now_s
        self._work_s[request_id] = work_s
        self._total_s += work_s

    def remove(self, request_id: str, now_s: float) -> None:
        """Unknown requests are ignored."""
        if request_id not in self._work_s:
            return
        if request_id == next(iter(self._work_s)):
            self._head_since_s = now_s
        self._total_s -= self._work_s.pop(request_id)

    @property
    def terms(self) -> tuple[float, float, float]:
        """(all predicted work, that of the head, since when the head is worked on): what `wait_s` is made of."""
        if not self._work_s:
            return 0.0, 0.0, 0.0
        return self._total_s, next(iter(self._work_s.values())), self._head_since_s

    def wait_s(self, now_s: float) -> float:
        """Zero when idle. A head that takes longer than predicted counts as about to end."""
        if not self._work_s:
            return 0.0
        head_s = next(iter(self._work_s.values()))
        return max(0.0, self._total_s - min(head_s, now_s - self._head_since_s))
