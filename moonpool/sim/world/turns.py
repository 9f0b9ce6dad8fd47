"""One engine for both roles of a simulated node: steps with prompts and steps with answers take turns.

A real worker that has changed its role puts prompts and answers into the same steps until the work of its old role has
ended. A simulated one alternates: the next step of each kind begins when one step of the other kind has ended, which
takes the same time.
"""

from __future__ import annotations

from typing import Protocol


class EngineUser(Protocol):
    """One role of a node."""

    def resume_steps(self) -> None:
        """Begin the step that had to wait, if it is still wanted."""
        ...

    def yield_soon(self) -> None:
        """End the steps under way as soon as possible: the other role waits."""
        ...


class EngineTurns:
    """Has at most two users. With one user nothing ever waits."""

    def __init__(self) -> None:
        self._holder: EngineUser | None = None
        self._waiting: EngineUser | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether the other role waits for its turn."""
        return self._waiting is not None

    def begin(self, user: EngineUser) -> bool:
        """Return whether the user may begin a step now. If not, its `resume_steps` is called when it may."""
        if self._holder is None or self._holder is user:
            self._holder = user
            return True
        self._waiting = user
        self._holder.yield_soon()
        return False

    def is_free(self, user: EngineUser) -> bool:
        """Whether no step of the other role is under way."""
        return self._holder is None or self._holder is user

    def end(self, user: EngineUser) -> None:
        """End the user's turn: its step has ended, or it had none to begin. The other role goes first now."""
        assert self._holder is user, "a turn ends once"
        self._holder, waiting, self._waiting = None, self._waiting, None
        if waiting is not None:
            waiting.resume_steps()
