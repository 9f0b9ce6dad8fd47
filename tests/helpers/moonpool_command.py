"""The moonpool command as a script for forked_script.py; it loads the commands and modules that its arguments name."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys

from moonpool.cli.main import COMMANDS, main


def load(names: list[str]) -> None:
    for name in names:
        if name in COMMANDS:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
                main([name, "--help"])
        else:
            importlib.import_module(name)


if __name__ == "__main__":
    sys.argv[0] = "moonpool"
    main()
else:
    load(sys.argv[1:])
