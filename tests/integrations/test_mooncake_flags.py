"""The flags of mooncake_master and mooncake_client: what they mean here, what is ignored, what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moonpool.base.errors import ConfigError
from moonpool.cli.mooncake import check_not_installed, installed_mooncake
from moonpool.integrations.mooncake import shadow_path
from moonpool.integrations.mooncake.client_flags import CLIENT_FLAGS, node_config
from moonpool.integrations.mooncake.flags import parse_duration_s
from moonpool.integrations.mooncake.master_flags import MASTER_FLAGS, master_config, with_config_file

ROOT = Path(__file__).resolve().parents[2]


def config_of(*arguments: str) -> object:
    return master_config(MASTER_FLAGS.parse(with_config_file(list(arguments))))


def test_defaults_are_upstreams_but_for_the_addresses() -> None:
    config = master_config(MASTER_FLAGS.parse([]))
    assert config.listen == "tcp:127.0.0.1:50051"
    assert (config.admin_host, config.admin_port, config.metadata_port) == ("127.0.0.1", 9003, None)
    assert config.rules.lease_s == 10.0
    assert config.rules.high_watermark == 0.9
    assert config.rules.low_watermark == pytest.approx(0.85)
    assert config.rules.hot_hits == 0
    assert not config.master("/x").journal


def test_every_flag_in_upstreams_spellings(tmp_path: Path) -> None:
    arguments = [
        "--rpc_port=1",
        "-rpc_address",
        "10.0.0.1",
        "--metrics-port",
        "3",
        "--enable_http_metadata_server",
        "--http_metadata_server_port=4",
        "--default_kv_lease_ttl=500",
        "--eviction_high_watermark_ratio",
        "0.8",
        "--eviction_ratio=0.1",
        "--nopromotion_on_hit",
        "--dynamic_replication_mode=enforce",
        "--client_ttl=3",
        "--data_dir=/d",
        "--max_threads=8",
        "--enable_ha=false",
        "--put_start_discard_timeout_sec=5",
        "--put_start_release_timeout_sec=6",
        "--logtostderr",
    ]
    parsed = MASTER_FLAGS.parse(arguments)
    config = master_config(parsed)
    assert set(parsed.ignored) == {"max_threads", "logtostderr"}
    assert config.listen == "tcp:10.0.0.1:1"
    assert (config.admin_port, config.metadata_port, config.data_dir) == (3, 4, "/d")
    rules = config.rules
    assert (rules.lease_s, rules.high_watermark) == (0.5, 0.8)
    assert rules.low_watermark == pytest.approx(0.7)
    assert (rules.promote_after_hits, rules.hot_hits, rules.segment_ttl_s) == (0, 8, 3.0)
    assert (rules.put_discard_s, rules.put_release_s) == (5.0, 6.0)
    assert config.master("/d").journal


def test_port_is_the_older_name() -> None:
    assert master_config(MASTER_FLAGS.parse(["--port=61351"])).listen.endswith(":61351")
    assert master_config(MASTER_FLAGS.parse(["--port=1", "--rpc_port=2"])).listen.endswith(":2")


def test_a_config_file_comes_before_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "master.json"
    file.write_text(json.dumps({"rpc_port": 5, "metrics_port": 6, "enable_http_metadata_server": True}))
    arguments = with_config_file([f"--config_path={file}", "--rpc_port=7"])
    config = master_config(MASTER_FLAGS.parse(arguments))
    assert (config.listen, config.admin_port, config.metadata_port) == ("tcp:127.0.0.1:7", 6, 8080)
    file.write_text("rpc_port: 5")
    with pytest.raises(ConfigError, match="JSON"):
        with_config_file([f"--config_path={file}"])


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("--eviction_ration=1", "did you mean --eviction_ratio"),
        ("--rpcport=1", "did you mean --rpc_port"),
        ("--enable_ha", "not supported"),
        ("--enable_kv_events=true", "not supported"),
        ("--rpc_port", "needs a value"),
        ("--rpc_port=x", "a whole number"),
        ("--rpc_port=70000", "no port"),
        ("--eviction_ratio=x", "a number"),
        ("--eviction_ratio=0.95", "watermark"),
        ("--promotion_on_hit=perhaps", "true or false"),
        ("--default_kv_lease_ttl=5d", "milliseconds"),
        ("--dynamic_replication_mode=observe", "off or enforce"),
        ("50051", "no flag"),
    ],
)
def test_refusals_say_what_to_do(argument: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config_of(argument)


def test_help_names_every_flag_of_upstream() -> None:
    text = MASTER_FLAGS.usage("x", "y")
    for name in (*MASTER_FLAGS.flags, *MASTER_FLAGS.refused, "rpc_thread_num", "cluster_id", "memory_allocator"):
        assert name in text
    assert MASTER_FLAGS.parse(["--help", "--nonsense"]).wants_help


def test_durations() -> None:
    assert [parse_duration_s("x", text) for text in ("500", "500ms", "2s", "1.5m", "1h")] == [0.5, 0.5, 2, 90, 3600]


def test_the_node_of_a_client() -> None:
    parsed = CLIENT_FLAGS.parse(["--host", "10.0.0.2", "--port=5", "--global_segment_size=1GB", "--protocol=rdma"])
    config = node_config(parsed, "/run/x")
    assert config.name.startswith("mooncake-10.0.0.2:5-")
    assert (config.master_address, config.dram_nbytes) == ("tcp:127.0.0.1:50051", 2**30)
    assert (config.tcp_host, config.tcp_port) == ("10.0.0.2", 5)
    assert set(parsed.ignored) == {"protocol"}
    with pytest.raises(ConfigError, match="state this machine's"):
        node_config(CLIENT_FLAGS.parse(["--host=0.0.0.0"]), "/run/x")
    with pytest.raises(ConfigError, match="--ssd"):
        CLIENT_FLAGS.parse(["--enable_offload=true"])


def test_an_installed_mooncake_is_not_hidden_by_accident(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), shadow_path()])
    assert installed_mooncake() is None
    check_not_installed(force=False)
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    with pytest.raises(ConfigError, match="--force"):
        check_not_installed(force=False)
    check_not_installed(force=True)


def test_run_gives_a_program_our_mooncake(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys, mooncake.engine; print(mooncake.engine.__file__, *sys.argv[1:])")
    command = [sys.executable, "-m", "moonpool", "mooncake"]
    for arguments in (["run", str(program)], ["run", "-m", "program"], ["run", sys.executable, str(program)]):
        done = subprocess.run(
            [*command, *arguments, "--force", "-x", "y"],
            env={"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        )
        file, *rest = done.stdout.split()
        assert file.startswith(shadow_path())
        assert rest == ["--force", "-x", "y"]
    missing = subprocess.run(
        [*command, "run", "no-such-program"], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert missing.returncode == 1
    assert "cannot be run" in missing.stderr
