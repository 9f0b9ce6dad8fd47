"""`moonpool doctor`: each check on machines that are well and that are not."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG_S

from moonpool.base.run_dirs import base_dir
from moonpool.cli.doctor import (
    Requirement,
    check_cache,
    check_memory,
    check_packages,
    check_port,
    check_python,
    check_state_dir,
    examine_machine,
    existing_ancestor,
    format_report,
    is_at_least,
    package_finding,
    parse_requirement,
)
from moonpool.launch.plan import ServeConfig
from moonpool.transfer.doctor import (
    Finding,
    check_descriptor_passing,
    check_direct_io,
    check_locked_memory,
    check_loopback_tcp,
    check_memfd,
    check_open_files,
    transport_findings,
)
from moonpool.transfer.topology import (
    DevicePlace,
    Gpu,
    Hardware,
    Nic,
    NumaNode,
    NvmeDrive,
    build_topology,
    read_topology,
)
from moonpool.transfer.transports.nixl import agent as nixl_agent

PLACE = DevicePlace(pci=("pci0000:00", "0000:00:01.0"), numa_node=0)
SERVER = Hardware(
    nodes=(NumaNode(node=0, cpus=(0, 1), memory_nbytes=1 << 30),),
    nics=(
        Nic(name="mlx5_0", kind="rdma", place=PLACE, up=True, speed_gbit_s=200.0, link_layer="InfiniBand"),
        Nic(name="eth0", kind="net", place=PLACE, up=True, speed_gbit_s=25.0, addresses=("10.0.0.1",)),
    ),
    gpus=(Gpu(index=0, place=PLACE, uuid="GPU-1", name="H200"),),
    drives=(NvmeDrive(name="nvme0", place=PLACE, model="Fast", state="live", nbytes=1 << 40),),
)
LAPTOP = Hardware(nodes=(NumaNode(node=0, cpus=(0, 1)),))
WELL = {
    name: Finding(name=name, status="ok", says="well", needed=True)
    for name in ("memfd", "unix sockets", "loopback tcp")
}


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moonpool", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, env=os.environ | environment)


def test_this_machine_in_json_and_its_exit_code() -> None:
    ran = doctor("--json")
    report = json.loads(ran.stdout)
    assert ran.returncode == (0 if report["ok"] else 1), ran.stderr
    assert report["ok"] == (not report["reasons"])
    assert [transport["name"] for transport in report["transports"]] == ["memory", "shm", "cuda", "nixl", "tcp", "file"]
    status = {check["name"]: check["status"] for check in report["checks"]}
    assert {status[name] for name in ("python", "packages", "memfd", "unix sockets", "loopback tcp", "state")} == {"ok"}
    assert any(nic["name"] == "lo" for nic in report["topology"]["hardware"]["nics"])
    assert "cpu:0" in report["topology"]["net"]


def test_it_imports_no_torch() -> None:  # and is quick: benchmarks/start_up.py
    code = "import sys; from moonpool.cli.main import main\ntry: main(['doctor'])\nexcept SystemExit: pass\n"
    code += "sys.exit('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S)
    assert ran.returncode == 0, ran.stderr
    assert "Transports, fastest first" in ran.stdout
    assert "\x1b" not in ran.stdout  # no colours into a pipe


def test_a_machine_that_cannot_serve_is_exit_code_1_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "state"
    file.write_text("")
    ran = doctor(MOONPOOL_STATE=str(file))
    assert ran.returncode == 1
    assert "`moonpool serve` does not work here:" in ran.stdout
    assert f"  state: {file} is no folder" in ran.stdout.splitlines()


def test_a_wrong_override_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "topology.json"
    file.write_text('{"net": {"cpu:77": {"preferred": ["lo"]}}}')
    ran = doctor("--topology", str(file))
    assert ran.returncode == 1
    assert ran.stderr.startswith("moonpool doctor: the topology override is wrong: there is no memory location")


def test_every_part_of_a_server_is_shown() -> None:
    text = format_report(examine_machine(build_topology(SERVER)))
    for part in ("mlx5_0", "InfiniBand, 200 Gbit/s", "10.0.0.1", "cuda:0", "H200, GPU-1, 0000:00:01.0, node 0", "Fast"):
        assert part in text
    assert "NICs for RDMA, by memory" in text
    assert "NICs for RDMA" not in format_report(examine_machine(build_topology(LAPTOP)))


def test_transports_say_what_they_lack() -> None:
    on_laptop = {finding.name: finding for finding in transport_findings(WELL, LAPTOP)}
    assert on_laptop["shm"].ok
    assert "no interface leads to another" in on_laptop["tcp"].says
    assert on_laptop["cuda"].status == "missing"
    sick = WELL | {"memfd": Finding(name="memfd", status="broken", says="no memfd", hint="get one")}
    shm = transport_findings(sick, LAPTOP)[1]
    assert (shm.name, shm.status, shm.says, shm.hint) == ("shm", "broken", "no memfd", "get one")
    on_server = {finding.name: finding.says for finding in transport_findings(WELL, SERVER)}
    assert "eth0" in on_server["tcp"]
    assert "mlx5_0" in on_server["nixl"]


def test_nixl_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    if nixl_agent.installed_package() is not None:
        found = {finding.name: finding for finding in transport_findings(WELL, SERVER)}["nixl"]
        assert (found.status, "UCX" in found.says) == ("ok", True)
    monkeypatch.setattr(nixl_agent, "_PACKAGES", ("moonpool_no_such_package",))
    missing = {finding.name: finding for finding in transport_findings(WELL, LAPTOP)}["nixl"]
    assert missing.status == "missing"
    assert missing.hint is not None
    assert "moonpool[nixl]" in missing.hint


def test_the_basics_work_here() -> None:
    assert check_memfd().ok
    assert check_loopback_tcp().ok
    assert check_descriptor_passing(base_dir()).ok


def test_sockets_need_a_short_path_that_exists(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    for folder in (deep, tmp_path / "none"):
        finding = check_descriptor_passing(folder)
        assert (finding.status, finding.needed) == ("broken", True)
    assert list(deep.iterdir()) == []


def test_direct_files_leave_nothing_behind(tmp_path: Path) -> None:
    finding = check_direct_io("direct", tmp_path)
    assert finding.status in ("ok", "missing")
    assert list(tmp_path.iterdir()) == []
    assert check_direct_io("direct", tmp_path / "none").status == "missing"


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs at /dev/shm")
def test_a_memory_filesystem_is_no_disk() -> None:
    assert check_direct_io("direct", Path("/dev/shm")).status == "missing"


def test_limits() -> None:
    assert check_open_files(1024, 4096).ok
    assert check_open_files(resource.RLIM_INFINITY, resource.RLIM_INFINITY).ok
    assert check_open_files(256, 4096).hint == "ulimit -n 1024 or more"
    assert check_locked_memory(8 << 20, LAPTOP).ok
    assert check_locked_memory(resource.RLIM_INFINITY, SERVER).ok
    assert check_locked_memory(8 << 20, SERVER).status == "missing"


def test_python() -> None:
    assert check_python((3, 12)).ok
    assert not check_python((3, 10)).ok


def test_a_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        taken = check_port("127.0.0.1", port, is_serving=False)
        assert (taken.status, taken.needed) == ("broken", True)
        assert check_port("127.0.0.1", port, is_serving=True).ok
    assert check_port("127.0.0.1", 0, is_serving=False).ok


def test_memory() -> None:
    assert not check_memory(ServeConfig(dram="900TB")).ok
    assert "needed" in check_memory(ServeConfig(dram="1MB", kv="1MB")).says


def test_a_model_that_is_not_fetched_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_CACHE", str(tmp_path / "cache"))
    finding = check_cache("smollm2")
    assert (finding.status, finding.needed) == ("missing", False)
    assert finding.hint is not None
    assert "moonpool model fetch smollm2" in finding.hint
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOONPOOL_CACHE", str(tmp_path / "file"))
    assert check_cache("smollm2").status == "broken"


def test_the_state_folder_is_not_made(tmp_path: Path) -> None:
    assert check_state_dir(tmp_path / "a" / "b").ok
    assert list(tmp_path.iterdir()) == []
    assert existing_ancestor(tmp_path / "a" / "b") == tmp_path


def test_requirements_of_our_own_metadata() -> None:
    assert parse_requirement("msgspec>=0.19") == Requirement("msgspec", "0.19", None)
    assert parse_requirement('torch>=2.4; extra == "engine"') == Requirement("torch", "2.4", "engine")
    assert parse_requirement('moonpool[engine,server]; extra == "all"') is None
    assert parse_requirement(";") is None
    assert check_packages().ok


def test_versions() -> None:
    assert is_at_least("2.13.0+cpu", "2.4")
    assert is_at_least("2.4", "2.4")
    assert not is_at_least("0.9.9rc1", "0.10")


def test_missing_and_old_packages_are_named() -> None:
    wanted = [
        Requirement("torch", "2.4", "engine"),
        Requirement("fastapi", "0.110", "server"),
        Requirement("pytest", "8", "dev"),
    ]
    finding = package_finding(wanted, {"torch": "2.1.0"}.get)
    assert finding.says == "torch is 2.1.0 and must be 2.4 or newer; fastapi is not installed"
    assert (finding.status, finding.hint, finding.needed) == ("missing", "pip install 'moonpool[all]'", True)
    assert package_finding(wanted, {"torch": "2.4", "fastapi": "0.111"}.get).says == "fastapi 0.111, torch 2.4"


def test_this_machine_agrees_with_the_launcher() -> None:
    report = examine_machine(read_topology())
    bad = [check.name for check in report.checks if check.needed and not check.ok]
    assert report.ok == (not bad)
    assert len(report.reasons) == len(bad)
