"""Rights that one process has at a time, each for as long as it renews it: conductors change roles by one. Pure.

A lease has a number that is higher than all before it. Whoever obeys a holder refuses lower numbers than it has seen,
so a holder whose lease has ended without its knowledge changes nothing any more. A restarted master knows no leases
and issues higher numbers (Generations).
"""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.base.errors import InvalidInput
from moonpool.master.state.space import Generations

MAX_TTL_S = 60.0
_MAX_LEASES = 1000


@dataclass(slots=True)
class _Lease:
    holder: str
    number: int
    until_s: float


class RoleLeases:
    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self._leases: dict[str, _Lease] = {}

    def acquire(self, name: str, holder: str, ttl_s: float, now_s: float) -> int:
        """Return the number of the holder's lease, which now lasts until `now_s` + `ttl_s`; 0 while another holder has
        the right. Raise InvalidInput for a time that is too long, or for too many rights."""
        if not holder or not 0 < ttl_s <= MAX_TTL_S:
            raise InvalidInput(f"a lease has a holder, and lasts up to {MAX_TTL_S:g} s", param="ttl_s")
        lease = self._leases.get(name)
        if lease is not None and now_s < lease.until_s:
            if lease.holder != holder:
                return 0
            lease.until_s = now_s + ttl_s
            return lease.number
        if lease is None and len(self._leases) >= _MAX_LEASES:
            raise InvalidInput("there are too many leases", param="name")
        self._leases[name] = _Lease(holder, self._generations.issue(), now_s + ttl_s)
        return self._leases[name].number
