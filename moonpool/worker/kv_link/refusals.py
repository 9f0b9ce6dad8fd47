"""Says once what must be set differently when a peer does not let this worker in.

Such a refusal stays until somebody changes a setting, so it comes back with every request; the log has it once and
the counters have all of them.
"""

from __future__ import annotations

import logging
import threading

from moonpool.base.errors import MoonpoolError, Unauthorized

_LOG = logging.getLogger(__name__)
_MAX_KNOWN = 64


class RefusalLog:
    """For any thread. `meaning` is what follows for the user, e.g. "nothing is reused"."""

    def __init__(self, meaning: str) -> None:
        self._meaning = meaning
        self._lock = threading.Lock()
        self._known: set[str] = set()

    def note(self, error: MoonpoolError | None) -> None:
        """Every error may come here; those that are no refusal are none of its business."""
        if not isinstance(error, Unauthorized):
            return
        with self._lock:
            if str(error) in self._known or len(self._known) >= _MAX_KNOWN:
                return
            self._known.add(str(error))
        _LOG.warning("%s; until this is set right %s", error, self._meaning)
