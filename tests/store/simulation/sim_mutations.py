"""Bugs to plant: what the simulation is worth is how soon it finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import moonpool.master.state.members
import moonpool.node.copying
import moonpool.node.mount
import moonpool.node.session_registry
import moonpool.node.voiding
import moonpool.store.client.ahead
import moonpool.store.client.mapped_copy
import moonpool.store.client.remote_read
import moonpool.store.client.small_read
import moonpool.store.client.views
from moonpool.base.rpc import RpcPeer
from moonpool.master.state.ahead import SpaceAhead
from moonpool.master.state.answers import Answers
from moonpool.master.state.hot_replicas import HotReplicas
from moonpool.master.state.members import Members
from moonpool.master.state.orders import Copies
from moonpool.master.state.pins import PinTable
from moonpool.master.state.puts import Puts
from moonpool.master.state.reads import ReadState
from moonpool.master.state.records import Outcomes, Recounting
from moonpool.master.state.space import Generations, PoolSpace
from moonpool.master.state.ssd_tier import SsdTier
from moonpool.master.state.unfinished_puts import AHEAD, PendingPut, UnfinishedPuts, Voiding
from moonpool.master.state.unsynced import UnsyncedKeys
from moonpool.master.state.voids import Voids
from moonpool.transfer.memory.fence import Fence

Change = tuple[Any, str, Any]


def _discard_frees_at_once() -> list[Change]:
    original = Puts.abandon
    return [(Puts, "abandon", lambda self, puts, fate, settled, now_s: original(self, puts, fate, True, now_s))]


def _sessions_hold_nothing() -> list[Change]:
    def hold_put(self: PoolSpace, generation: int, places: Any, nbytes: int, session: int) -> None:
        self.free_put_at(0.0, generation, places, nbytes)

    return [(PoolSpace, "hold_put", hold_put)]


def _removals_are_not_journalled() -> list[Change]:
    return [(Outcomes, "dropped", lambda self, key, fate: None)]


def _replicas_are_not_voided() -> list[Change]:
    return [(moonpool.node.voiding.Voider, "_void", lambda self, order: None)]


def _upserts_void_nothing() -> list[Change]:
    def begin(self: Voids, put: PendingPut, *_: object) -> None:
        put.voiding = Voiding()

    return [(Voids, "begin_upsert", begin)]


def _held_places_are_used_after_they_were_discarded() -> list[Change]:
    def keep_space(self: UnfinishedPuts, put: PendingPut, *args: Any) -> None:
        if put.terms.flags & AHEAD:
            self._space.free(put.places, put.nbytes)
        else:
            original(self, put, *args)

    original = UnfinishedPuts.keep_space
    return [(UnfinishedPuts, "keep_space", keep_space), (moonpool.store.client.ahead, "_USABLE", 1e9)]


def _taken_keys_are_replaced() -> list[Change]:
    return [(SpaceAhead, "_check", lambda self, put, held, now_s: None)]


def _places_are_remembered_too_long() -> list[Change]:
    return [(Voids, "remember_s", lambda self, now_s: 30.0)]


def _puts_are_not_journalled() -> list[Change]:
    return [(Outcomes, "ended", lambda self, keys, generations, left: None)]


def _removed_records_are_adopted() -> list[Change]:
    original = SsdTier.adopt
    return [(SsdTier, "adopt", lambda self, segment, item, _, now_s: original(self, segment, item, True, now_s))]


def _the_fence_admits_everybody() -> list[Change]:
    return [(Fence, "admit", Fence.stamp), (Fence, "confirm", lambda *args: None)]


def _views_are_not_pinned() -> list[Change]:
    original = ReadState.lookup
    return [
        (
            ReadState,
            "lookup",
            lambda self, keys, prefix, lease, _, now_s, reads: original(self, keys, prefix, lease, 0, now_s, reads),
        )
    ]


def _views_ignore_void_marks() -> list[Change]:
    return [(moonpool.store.client.views, "may_be_remembered", lambda *_: True)]


def _checksums_are_believed() -> list[Change]:
    modules = (moonpool.store.client.remote_read, moonpool.store.client.mapped_copy, moonpool.store.client.views)

    def copy_only(header: Any, pieces: Any, copy_and_sum: Any, at: int = 0) -> bool:
        for view in (view for views in pieces for view in views):
            copy_and_sum(at, view, 0)
            at += view.nbytes
        return True

    small = (moonpool.store.client.small_read, "are_whole", lambda header, data: True)
    return [small, *[(module, "are_right", copy_only) for module in modules]]


def _damage_is_not_quarantined() -> list[Change]:
    return [(Copies, "quarantine", lambda self, *args: True)]


def _unwritten_replicas_count() -> list[Change]:
    original = Puts.end
    return [(Puts, "end", lambda self, keys, generations, failed, now_s: original(self, keys, generations, {}, now_s))]


def _ends_are_not_told() -> list[Change]:
    return [
        (
            moonpool.node.session_registry.SessionRegistry,
            "_on_disconnect",
            lambda self, peer: self._sessions_of.pop(peer) and None,
        )
    ]


def _memory_is_mounted_again_as_it_is() -> list[Change]:
    async def make_ready(self: Any) -> bool:
        return True

    return [(moonpool.node.mount.DramMount, "_prepare", make_ready)]


def _lost_registries_are_not_missed() -> list[Change]:
    return [(Members, "_ask_nodes_about", lambda self, sessions: None)]


def _pins_of_removed_objects_are_not_restored() -> list[Change]:
    return [(PinTable, "add_removed", lambda self, holders, key, places, nbytes: None)]


def _recounts_are_ignored() -> list[Change]:
    return [(moonpool.master.state.members, "reserve_unknown", lambda *args: [])]


def _unanswered_recounts_are_forgotten() -> list[Change]:
    return [(Members, "recounting", lambda self: Recounting([], []))]


def _lost_grants_are_admitted() -> list[Change]:
    return [(Fence, "refuse", lambda self, above, up_to: None)]


def _uncounted_memory_is_viewed() -> list[Change]:
    return [(Members, "check_counted", lambda self, keys, now_s: None)]


def _what_is_not_synced_is_remembered() -> list[Change]:
    return [(UnsyncedKeys, "add", lambda self, keys: None)]


def _moves_are_not_journalled() -> list[Change]:
    return [(Outcomes, "placed", lambda self, table, slot: None)]


def _every_generation_is_believed() -> list[Change]:
    return [(Generations, "is_possible", lambda self, generation: True)]


def _answers_are_forgotten_in_a_restart() -> list[Change]:
    return [(Answers, "restore", lambda self, record: None)]


def _replicas_stay_when_their_key_has_cooled() -> list[Change]:
    return [(HotReplicas, "_review", lambda self, now_s, limit: False)]


def _late_calls_are_carried_out() -> list[Change]:
    return [(RpcPeer, "_is_refused", lambda self, call_id, wait_ms, waited_s: False)]


def _dropped_answers_keep_their_space() -> list[Change]:
    return [(UnfinishedPuts, "drop", lambda self, number, keys, now_s: None)]


MUTATIONS: dict[str, Callable[[], list[Change]]] = {
    "discard frees at once": _discard_frees_at_once,
    "sessions hold nothing": _sessions_hold_nothing,
    "removals are not journalled": _removals_are_not_journalled,
    "replicas are not voided": _replicas_are_not_voided,
    "upserts void nothing": _upserts_void_nothing,
    "space held is free when it is discarded": _held_places_are_used_after_they_were_discarded,
    "taken keys are replaced": _taken_keys_are_replaced,
    "places are remembered too long": _places_are_remembered_too_long,
    "puts are not journalled": _puts_are_not_journalled,
    "moves are not journalled": _moves_are_not_journalled,
    "removed records are adopted": _removed_records_are_adopted,
    "the fence admits everybody": _the_fence_admits_everybody,
    "views are not pinned": _views_are_not_pinned,
    "views ignore void marks": _views_ignore_void_marks,
    "pins of removed objects are not restored": _pins_of_removed_objects_are_not_restored,
    "checksums are believed": _checksums_are_believed,
    "damage is not quarantined": _damage_is_not_quarantined,
    "unwritten replicas count": _unwritten_replicas_count,
    "ends of processes are not told": _ends_are_not_told,
    "memory is mounted again as it is": _memory_is_mounted_again_as_it_is,
    "lost registries are not missed": _lost_registries_are_not_missed,
    "recounts are ignored": _recounts_are_ignored,
    "unanswered recounts are forgotten": _unanswered_recounts_are_forgotten,
    "lost grants are admitted": _lost_grants_are_admitted,
    "uncounted memory is viewed": _uncounted_memory_is_viewed,
    "what is not synced is remembered": _what_is_not_synced_is_remembered,
    "every generation is believed": _every_generation_is_believed,
    "replicas stay when their key has cooled": _replicas_stay_when_their_key_has_cooled,
    "answers are forgotten in a restart": _answers_are_forgotten_in_a_restart,
    "late calls are carried out": _late_calls_are_carried_out,
    "dropped answers keep their space": _dropped_answers_keep_their_space,
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Inside sim_patches.simulated(), which notes what it must note around the original."""
    changes = MUTATIONS[name]()
    before = [(where, attribute, getattr(where, attribute)) for where, attribute, _ in changes]
    for where, attribute, value in changes:
        setattr(where, attribute, value)
    try:
        yield
    finally:
        for where, attribute, value in before:
            setattr(where, attribute, value)
