"""How often workers report: so often that their connections take a tenth of a core at most. Pure.

Every answer to a report names the time until the next one. It follows from what a report costs the conductor now and
from how many workers there are: about three seconds for a thousand busy ones, and for a few workers less than the
interval that they keep themselves (`report_interval_s`).
"""

from __future__ import annotations

# Of a core, for reports. Pings, which workers send when they have said nothing for a second, take 60 us each: of a
# thousand workers the rest of a tenth.
_SHARE = 0.035
_CALL_S = 70e-6  # what a call costs beside its handler: frames, msgpack, the event loop (x86, 2.5 GHz)
_MAX_HANDLER_S = 2e-3  # something else took what is longer
_FADE = 0.02  # how fast the usual cost follows
_LONGEST_S = 10.0


class ReportPace:
    def __init__(self) -> None:
        self._handler_s = 0.0

    def handled(self, seconds: float) -> None:
        """Take the processor time that the handler of one report took."""
        self._handler_s += _FADE * (min(seconds, _MAX_HANDLER_S) - self._handler_s)

    def interval_s(self, num_workers: int) -> float:
        """Return the least time from one report of a worker to its next one."""
        return min(_LONGEST_S, num_workers * (_CALL_S + self._handler_s) / _SHARE)
