"""`moonpool serve`: everything on this machine with one command.

All checks come before anything starts, so that a wrong port, model or size is reported in one line within two seconds.
Sockets are in a private run directory that is removed with the launcher; secrets and the master's journal, which must
outlive it, are in the state directory.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from moonpool.base.address import host_port, own_sockets_lost
from moonpool.base.errors import ConfigError, Unavailable
from moonpool.base.limits import available_cores, require_disk
from moonpool.base.log import setup_logging
from moonpool.base.process import LOOK_S, Lifeline
from moonpool.base.run_dirs import write_state_dir, write_tour_token, write_url
from moonpool.base.security import Secret
from moonpool.engine.config import Device
from moonpool.engine.model_files import read_config, resolve
from moonpool.frontend.tenants import load_tenants
from moonpool.launch.checks import (
    choose_port,
    free_device_nbytes,
    require_address_space,
    require_device,
    require_memory,
    require_whole_model,
)
from moonpool.launch.cluster_file import ClusterFile, ClusterMachine
from moonpool.launch.control import ControlServer, WorkerMaker
from moonpool.launch.launcher import Launcher, say
from moonpool.launch.machine import MachinePlan
from moonpool.launch.plan import ServeConfig, one_machine, plan_kv, plan_machine, plan_roles
from moonpool.launch.role_settings import RoleTables, with_settings
from moonpool.launch.run_dir import RunDir

_HERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # how this machine reaches a front end that listens on all addresses


def serve(config: ServeConfig, prepare_model: Callable[[str], None], role_tables: RoleTables | None = None) -> None:
    """Run until the service is stopped (SIGINT, SIGTERM). Raise MoonpoolError if it cannot start or go on.

    `prepare_model` may download the model; it is called after all cheaper checks. `role_tables` are more settings of
    the roles, from a configuration file.
    """
    config.check()
    _run(config, prepare_model, role_tables or {})


def up(
    cluster: ClusterFile, machine_name: str, prepare_model: Callable[[str], None], role_tables: RoleTables | None = None
) -> None:
    """Run one machine's part of a cluster, as serve() does. Raise ConfigError if the file has no such machine, or if
    this is not it."""
    machine = cluster.machine(machine_name)
    _run(machine.serve, prepare_model, role_tables or {}, cluster, machine)


def _run(
    config: ServeConfig,
    prepare_model: Callable[[str], None],
    role_tables: RoleTables,
    cluster: ClusterFile | None = None,
    place: ClusterMachine | None = None,
) -> None:
    setup_logging("launcher", config.log_level)
    config = replace(config, port=choose_port(config.host, config.port if config.frontends else 0))
    for device in config.device.split(","):
        require_device(device.strip())
    require_address_space(config.pool_nbytes, config.host_kv_nbytes)
    require_memory(config.pool_nbytes, config.devices.count("cpu") * config.host_kv_nbytes)
    state_dir = _own_folder(Path(config.state_dir).expanduser() if config.state_dir else default_state_dir())
    log_dir = _own_folder(Path(config.log_dir).expanduser()) if config.log_dir else None
    if config.ssd is not None:
        ssd = _own_folder(Path(config.ssd).expanduser())
        require_disk(ssd, config.ssd_nbytes, config.nodes)
        config = replace(config, ssd=str(ssd))
    if config.secret_file is not None:
        Secret.from_file(config.secret_file)
    load_tenants(state_dir, Path(config.tenants_file) if config.tenants_file else None)
    gpu_kv_nbytes: dict[Device, int] = {}
    if config.num_workers or config.frontends:
        prepare_model(config.model)
        files = resolve(config.model, random_weights=config.random_weights)
        require_whole_model(files)
        gpu_kv_nbytes = plan_kv(config, read_config(files), free_device_nbytes(config.devices))
    prefix = place.prefix if place is not None else ""
    machine = plan_machine(config, num_cores=available_cores(), gpu_kv_nbytes=gpu_kv_nbytes, prefix=prefix)
    for folder in machine.ssd_dirs:
        _own_folder(Path(folder))
    with (owned := RunDir()) as run_dir, Lifeline() as lifeline:
        owned.keep(partial(write_state_dir, run_dir, state_dir))
        tour_token = secrets.token_urlsafe(24) if config.tour else None
        if tour_token is not None:
            owned.keep(partial(write_tour_token, run_dir, tour_token))
        if cluster is not None and place is not None:
            wiring = cluster.wiring(place)
        else:
            wiring = one_machine(machine, run_dir, config.conductors)
        planned = plan_roles(config, machine, run_dir, state_dir, wiring)
        roles = [with_settings(role, role_tables, os.environ) for role in planned]

        def announce(seconds: float) -> None:
            _announce(config, machine, owned, seconds, tour_token)

        launcher = Launcher(roles, lifeline, announce, log_dir, partial(_restore, owned))
        maker = WorkerMaker(config, machine, wiring, run_dir, prefix, role_tables)
        failure = asyncio.run(_supervise(launcher, maker, owned))
    if failure is not None:
        raise Unavailable(failure)


async def _supervise(launcher: Launcher, maker: WorkerMaker, folder: RunDir) -> str | None:
    """Run the launcher and take orders for it. Return the reason of a failure; None after a stop signal."""
    control = ControlServer(launcher, maker)
    await control.start()
    keeping = asyncio.create_task(_keep_run_dir(folder, control), name="run directory")
    try:
        return await launcher.run()
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await control.close()


async def _keep_run_dir(folder: RunDir, control: ControlServer) -> None:
    """Make the run directory and the launcher's socket in it again when they were removed, until cancelled. Roles look
    for their own sockets: those that lost one end, and are started again (base/process.py)."""
    failure = ""
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            _restore(folder)
            if own_sockets_lost():
                await control.listen()
            failure = ""
        except (OSError, ConfigError) as error:
            if str(error) != failure:
                say(f"{folder.path} was removed and cannot be made again: {error}", "yellow")
            failure = str(error)


def _restore(folder: RunDir) -> None:
    if folder.restore():
        say(
            f"{folder.path} was removed; it is made again, and roles that had sockets in it are started again", "yellow"
        )


def default_state_dir() -> Path:
    """Return $MOONPOOL_STATE_DIR, $MOONPOOL_STATE (its former name), or the XDG state folder of this user."""
    chosen = os.environ.get("MOONPOOL_STATE_DIR") or os.environ.get("MOONPOOL_STATE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "moonpool"


def _own_folder(path: Path) -> Path:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot create the folder {path}: {error.strerror or error}") from error
    return path.resolve()


def _announce(
    config: ServeConfig, machine: MachinePlan, folder: RunDir, seconds: float, tour_token: str | None
) -> None:
    """Print the URL for the user, and write it where `moonpool chat` finds it."""
    if not machine.frontends:
        print(f"\nMoonpool runs this machine's part (ready after {seconds:.1f} s)\n{machine.describe()}", flush=True)
        return
    host = _HERE.get(config.host, config.host)
    folder.keep(partial(write_url, folder.path, f"http://{host_port(host, config.port)}"))
    url = f"http://{host_port(host, config.port)}/v1"
    body = {
        "model": resolve(config.model).name,
        "messages": [{"role": "user", "content": "What is the capital of Japan?"}],
    }
    key = "-H 'Authorization: Bearer YOUR_KEY' " if config.tenants_file else ""
    tour = f"  {url.removesuffix('/v1')}/ui#tour/{tour_token} lets you break things and watch\n" if tour_token else ""
    print(
        f"\nMoonpool serves {body['model']} at {url} (ready after {seconds:.1f} s)\n"
        f"{machine.describe()}\n\n"
        f"  curl {url}/chat/completions {key}-H 'Content-Type: application/json' \\\n"
        f"    -d '{json.dumps(body)}'\n\n"
        f"  moonpool chat\n  {url.removesuffix('/v1')}/ui shows what it does\n{tour}\n"
        "Ctrl-C stops it.",
        flush=True,
    )
