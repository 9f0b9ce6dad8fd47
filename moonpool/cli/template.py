"""The template of roles: `python -m moonpool.cli.template FD`, started by the launcher (launch/template.py).

It imports a role when the launcher first asks for one, and forks for each process of it. The new process is what
`python -m moonpool ROLE ...` would be: in a session of its own, with the command line, the environment and the output
that the launcher has chosen. The template ends when the launcher does.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import sys

from moonpool.base.forking import fork_to_adopt, show_command_line
from moonpool.base.process import LIFELINE_FD
from moonpool.cli.main import COMMANDS, load_command, main
from moonpool.cli.roles import worker_class

_NUM_FDS = 4  # the order, the output, the ready pipe, the lifeline


def serve(orders: socket.socket) -> list[str]:
    """Fork as the launcher asks. Return only in a new process: the arguments of its command."""
    while True:
        command, fds, _, _ = socket.recv_fds(orders, 64, _NUM_FDS)
        if not command:
            os._exit(0)
        with contextlib.suppress(Exception):  # the role meets the same error, and reports it
            _load(command.decode())
        orders.send(b"loaded")
        if not fds:
            continue  # only to be prepared
        if not orders.recv(64):
            os._exit(0)
        try:
            pid = fork_to_adopt()
        except OSError as error:
            orders.send(b"-%d" % (error.errno or 0))
        else:
            if pid is None:
                orders.close()
                return _become(*fds)
            orders.send(b"%d" % pid)
        for fd in fds:
            os.close(fd)


def _load(role: str) -> None:
    load_command(COMMANDS[role][0])
    if role == "worker":
        worker_class()


def _become(order_fd: int, output: int, ready: int, lifeline: int) -> list[str]:
    os.setsid()
    with open(order_fd, "rb") as file:
        text = file.read()
    if not text:
        os._exit(1)  # the launcher does not know of this process
    order = json.loads(text)
    for place in (1, 2):
        os.dup2(output, place)
    os.close(output)
    os.environ.clear()
    os.environ.update({**order["environment"], LIFELINE_FD: str(lifeline)})
    arguments: list[str] = [*order["arguments"], "--ready-fd", str(ready)]
    show_command_line([sys.executable, "-m", "moonpool", *arguments])
    gc.enable()
    return arguments


if __name__ == "__main__":
    gc.disable()
    show_command_line(sys.orig_argv[:-1])
    main(serve(socket.socket(fileno=int(sys.argv[1]))))
