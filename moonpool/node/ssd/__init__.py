"""The library under the SSD tier: objects in log files, recovered after any crash (log.py is the way in)."""

from moonpool.node.ssd.log import SsdLog
from moonpool.node.ssd.types import LogItem, LogLocation, LogRead, MovedRecord, SsdConfig, SsdStats, StoredRecord

__all__ = ["LogItem", "LogLocation", "LogRead", "MovedRecord", "SsdConfig", "SsdLog", "SsdStats", "StoredRecord"]
