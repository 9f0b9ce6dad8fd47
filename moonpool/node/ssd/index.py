"""Every record on the disk, and which of a key's records counts. No I/O, no locks.

The record with the highest (generation, file, offset) counts; if it is a tombstone, the key does not exist. The other
records (shadows) are remembered as long as their file exists, because a recovery would find them: a tombstone is needed
while it hides a shadow, and an append that would lose against a shadow is refused. So the state is at every moment the
one that a recovery would find.
"""

from __future__ import annotations

from collections.abc import Collection, ItemsView, Iterator
from dataclasses import dataclass, field

from moonpool.base.errors import StaleGeneration
from moonpool.node.ssd.layout import Entry


@dataclass
class FileUse:
    entries: list[Entry] = field(default_factory=list)
    written_nbytes: int = 0  # by objects, dead ones too
    live_nbytes: int = 0
    num_live: int = 0


class LogIndex:
    def __init__(self) -> None:
        self._live: dict[bytes, Entry] = {}
        self._shadows: dict[bytes, list[Entry]] = {}
        self._files: dict[int, FileUse] = {}
        self._salvaged: dict[tuple[bytes, int], Entry] = {}  # by key and generation; not confirmed yet

    def __len__(self) -> int:
        return len(self._live)

    @property
    def live_nbytes(self) -> int:
        return sum(use.live_nbytes for use in self._files.values())

    def find(self, key: bytes) -> Entry | None:
        return self._live.get(key)

    def is_live(self, entry: Entry) -> bool:
        return self._live.get(entry.key) is entry

    def live(self) -> list[Entry]:
        return list(self._live.values())

    def live_of(self, file_number: int) -> Iterator[Entry]:
        """Yield the live objects of a file by offset."""
        return (entry for entry in self._files[file_number].entries if self.is_live(entry))

    def uses(self) -> ItemsView[int, FileUse]:
        return self._files.items()

    def admit(self, key: bytes, generation: int) -> None:
        """Raise StaleGeneration when the disk holds a record of the key with a higher generation."""
        current = self._live.get(key)
        rivals = self._shadows.get(key, ())
        newest = max((entry.generation for entry in (*rivals, *((current,) if current else ()))), default=generation)
        if newest > generation:
            raise StaleGeneration(f"the log knows {key.hex()[:16]} of generation {newest}, newer than {generation}")

    def open_file(self, file_number: int) -> None:
        self._files[file_number] = FileUse()

    def add(self, entry: Entry) -> None:
        """Add a record of the disk. The order of calls does not matter."""
        use = self._files[entry.file_number]
        use.entries.append(entry)
        use.written_nbytes += entry.padded_nbytes
        current = self._live.get(entry.key)
        rivals = self._shadows.get(entry.key, ()) if current is None else (current,)  # it is newer than all shadows
        wins = not rivals or max(rival.order for rival in rivals) < entry.order
        if wins and current is not None:
            self._kill(current)
        if wins and entry.nbytes is not None:
            self._live[entry.key] = entry
            self._count(entry, 1)
        else:
            self._hide(entry)

    def salvage(self, entry: Entry) -> None:
        """Add an object that was found outside of any batch; it counts after confirm()."""
        self._salvaged[entry.key, entry.generation] = entry

    def drop_beaten_salvage(self) -> None:
        """Forget salvaged objects that are older than a record: they are never confirmed but would keep files."""
        self._salvaged = {name: each for name, each in self._salvaged.items() if self._would_win(each)}

    def salvaged(self) -> list[Entry]:
        """Return the salvaged objects that would count if they were confirmed."""
        return [entry for entry in self._salvaged.values() if self._would_win(entry)]

    def salvaged_files(self) -> set[int]:
        return {entry.file_number for entry in self._salvaged.values()}

    def confirm(self, key: bytes, generation: int) -> bool:
        """Make a salvaged object count. Return False when there is none."""
        entry = self._salvaged.pop((key, generation), None)
        if entry is None or not self._would_win(entry):
            return False
        self.add(entry)
        return True

    def refuse(self, key: bytes, generation: int) -> None:
        """Forget a salvaged object; unknown ones are ignored."""
        self._salvaged.pop((key, generation), None)

    def _would_win(self, entry: Entry) -> bool:
        current = self._live.get(entry.key)
        rivals = [*self._shadows.get(entry.key, ()), *((current,) if current else ())]
        return all(rival.order < entry.order and rival.generation != entry.generation for rival in rivals)

    def mark_removed(self, key: bytes, generation: int) -> Entry | None:
        """Remove the object unless it is newer than `generation`, and return it. A tombstone must follow."""
        entry = self._live.get(key)
        if entry is None or entry.generation > generation:
            return None
        self._kill(entry)
        return entry

    def is_hidden(self, key: bytes) -> bool:
        """Return whether a record of the key would come back without a tombstone."""
        return key not in self._live and any(entry.nbytes is not None for entry in self._shadows.get(key, ()))

    def tombstones_to_keep(self, file_number: int) -> list[Entry]:
        """Return the file's tombstones that hide records in other files, one per key."""
        kept: dict[bytes, Entry] = {}
        for entry in self._files[file_number].entries:
            if entry.nbytes is None and self._is_needed(entry):
                kept[entry.key] = max(entry, kept.get(entry.key, entry), key=lambda one: one.order)
        return list(kept.values())

    def drop_file(self, file_number: int) -> None:
        """Forget a file and everything in it."""
        self._salvaged = {name: each for name, each in self._salvaged.items() if each.file_number != file_number}
        for entry in self._files.pop(file_number).entries:
            if self.is_live(entry):
                del self._live[entry.key]
                continue
            shadows = [shadow for shadow in self._shadows[entry.key] if shadow is not entry]
            if shadows:
                self._shadows[entry.key] = shadows
            else:
                del self._shadows[entry.key]

    def check_integrity(self, pending: Collection[bytes] = ()) -> None:
        """Raise AssertionError unless the tables agree with each other and with what a recovery would find. The
        tombstones of `pending` keys are not written yet.
        """
        again = LogIndex()
        for number, use in self._files.items():
            again.open_file(number)
            for entry in reversed(use.entries):
                again.add(entry)
            live = list(self.live_of(number))
            assert use.num_live == len(live), f"file {number} counts its objects wrong"
            assert use.live_nbytes == sum(entry.padded_nbytes for entry in live), f"file {number} counts bytes wrong"
        for key, entry in self._live.items():
            assert again.find(key) is entry, "a recovery would find another object"
        for entry in again.live():
            assert entry.key in self._live or entry.key in pending, "a recovery would bring a removed object back"
        num_records = sum(len(use.entries) for use in self._files.values())
        assert num_records == len(self._live) + sum(map(len, self._shadows.values())), "a record is in no table"

    def _is_needed(self, tombstone: Entry) -> bool:
        if tombstone.key in self._live:
            return False  # a live object is never older than a tombstone and hides the rest itself
        others = (e for e in self._shadows[tombstone.key] if e.file_number != tombstone.file_number)
        return any(entry.nbytes is not None and entry.order < tombstone.order for entry in others)

    def _kill(self, entry: Entry) -> None:
        del self._live[entry.key]
        self._count(entry, -1)
        self._hide(entry)

    def _hide(self, entry: Entry) -> None:
        self._shadows.setdefault(entry.key, []).append(entry)

    def _count(self, entry: Entry, sign: int) -> None:
        use = self._files[entry.file_number]
        use.num_live += sign
        use.live_nbytes += sign * entry.padded_nbytes
