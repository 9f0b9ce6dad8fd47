"""One line per event on standard error: time, level, role, text. Set up once per process."""

from __future__ import annotations

import logging
import sys


def setup_logging(role: str, level: str = "INFO") -> None:
    """`role` names the process in every line, so that a launcher's mixed output can be read."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname).1s {role:<10} %(message)s", datefmt="%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
