"""A command that runs in this process's place: it has our output, and the signals that would end us."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Sequence


def run_to_end(command: Sequence[str], on_term: int, preexec: Callable[[], None] | None = None) -> int:
    """The command's exit status. A SIGTERM to us reaches it as `on_term`, so that it ends what it started; a SIGINT is
    the terminal's, which tells it too.
    """
    process: subprocess.Popen[bytes] | None = None
    was_told_early = False

    def tell(signum: int, frame: object) -> None:
        nonlocal was_told_early
        if process is None:
            was_told_early = True
        else:
            process.send_signal(on_term)

    signal.signal(signal.SIGTERM, tell)
    signal.signal(signal.SIGINT, lambda *_: None)
    process = subprocess.Popen(command, preexec_fn=preexec)
    with process:
        if was_told_early:
            process.send_signal(on_term)
        return process.wait()
