"""What the journal's tests share: lives that can be cut off at any moment, and folders put back from what was left."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from moonpool.master.journal import Journal, JournalConfig
from moonpool.master.journal.folder import JournalFolder
from moonpool.master.journal.recovery import recover

BY_HAND = JournalConfig(sync_s=3600.0)  # synced by the test alone
Image = dict[str, bytes]


def image_of(directory: Path) -> Image:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.is_file()}


def put_back(image: Image, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in image.items():
        (directory / name).write_bytes(content)
    return directory


def replayed(directory: Path) -> list[bytes]:
    """What a master would be given, without changing a byte."""
    folder = JournalFolder(directory)
    return list(recover(folder).replay(folder))


def reopened(directory: Path, config: JournalConfig = BY_HAND) -> list[bytes]:
    """What a master is given, by a whole life of one."""
    journal, records = Journal.open(directory, config)
    try:
        return list(records)
    finally:
        journal.close()


@dataclass
class Life:
    """A journal, what was appended to it, and what is known to be on disk."""

    directory: Path
    config: JournalConfig = BY_HAND
    records: list[bytes] = field(default_factory=list)
    num_synced: int = 0
    synced_nbytes: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.journal, _ = Journal.open(self.directory, self.config)

    def append(self, *sizes: int) -> None:
        first = len(self.records)
        batch = [f"{first + i:08d}".encode().ljust(size, b"%c" % (97 + i % 26)) for i, size in enumerate(sizes)]
        self.journal.append(batch)
        self.records += batch

    def sync(self) -> None:
        sizes = {path.name: path.stat().st_size for path in self.directory.glob("journal-*")}
        self.journal.sync()
        self.num_synced, self.synced_nbytes = len(self.records), sizes

    def rotate(self) -> None:
        """A snapshot that comes to nothing: the journal goes on in a new file."""
        writer = self.journal.begin_snapshot()
        writer.abort()
        writer.join()

    def cut_off(self) -> Image:
        """The files as they are now in the page cache; the life is over."""
        image = image_of(self.directory)
        self.journal.close()
        return image
