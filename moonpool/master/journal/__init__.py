"""The master's durable storage: a folder of journals and snapshots. It does not interpret the records."""

from moonpool.master.journal.folder import epoch_now, forget
from moonpool.master.journal.journal import Journal, JournalConfig, JournalHealth, snapshot_due
from moonpool.master.journal.recovery import FileReport, FolderReport, describe
from moonpool.master.journal.snapshot import SnapshotWriter

__all__ = [
    "FileReport",
    "FolderReport",
    "Journal",
    "JournalConfig",
    "JournalHealth",
    "SnapshotWriter",
    "describe",
    "epoch_now",
    "forget",
    "snapshot_due",
]
