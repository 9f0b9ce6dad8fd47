"""The library under the SSD tier: objects in log files, recovered after any crash (log.py is the way in)."""

from moonpool.node.ssd.log import SsdLog
from moonpool.node.ssd.types import Item, Location, Moved, Read, SsdConfig, SsdStats, Stored

__all__ = ["Item", "Location", "Moved", "Read", "SsdConfig", "SsdLog", "SsdStats", "Stored"]
