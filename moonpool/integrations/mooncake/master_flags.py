"""`moonpool mooncake master`: the flags of upstream's `mooncake_master`, and what they are for our master. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from moonpool.base.address import host_port
from moonpool.base.errors import ConfigError
from moonpool.integrations.mooncake.flags import FlagTable, ParsedFlags, ProgramFlag, parse_duration_s
from moonpool.master.rules import PoolRules
from moonpool.master.service import MasterConfig

LOOPBACK = "127.0.0.1"
_FLAGS = {
    "rpc_address": ProgramFlag(
        LOOPBACK, "address at which clients and nodes reach the master; 0.0.0.0 for all interfaces"
    ),
    "rpc_port": ProgramFlag(50051, "port of the master"),
    "port": ProgramFlag(0, "the older name of rpc_port, used when rpc_port is not given"),
    "metrics_host": ProgramFlag(
        LOOPBACK, "address of the admin HTTP server; everybody who reaches it can remove objects"
    ),
    "metrics_port": ProgramFlag(
        9003, "port of the admin HTTP server: /metrics, /get_all_segments, /query_key, drain jobs, ..."
    ),
    "enable_http_metadata_server": ProgramFlag(False, "also run the HTTP metadata server, for mooncake.engine"),
    "http_metadata_server_host": ProgramFlag(LOOPBACK, "address of the HTTP metadata server"),
    "http_metadata_server_port": ProgramFlag(8080, "port of the HTTP metadata server"),
    "default_kv_lease_ttl": ProgramFlag("10000", "how long a look-up protects an object: milliseconds, or 10s, 1m"),
    "eviction_high_watermark_ratio": ProgramFlag(0.9, "start to evict when this part of the pool's bytes is used"),
    "eviction_ratio": ProgramFlag(0.05, "evict until this part of the pool's bytes is free below the high watermark"),
    "client_ttl": ProgramFlag(10, "seconds without a report after which a client's memory counts as lost"),
    "put_start_discard_timeout_sec": ProgramFlag(30, "seconds after which an unfinished put is dropped"),
    "put_start_release_timeout_sec": ProgramFlag(600, "seconds after which the space of a dropped put is reused"),
    "dynamic_replication_mode": ProgramFlag("off", "more replicas for hot keys: off or enforce"),
    "dynamic_replication_admission_qps_threshold": ProgramFlag(0.8, "look-ups per second that make a key hot"),
    "dynamic_replication_heat_window_seconds": ProgramFlag(10, "seconds over which these look-ups are counted"),
    "dynamic_replication_max_memory_replicas": ProgramFlag(2, "replicas of a hot key in memory, including the first"),
    "promotion_on_hit": ProgramFlag(True, "copy objects that are only on SSD back to memory when they are asked for"),
    "promotion_admission_threshold": ProgramFlag(2, "look-ups before that happens"),
    "config_path": ProgramFlag("", "JSON file with values of these flags; the command line counts more"),
    "data_dir": ProgramFlag(
        "", "Moonpool's own: folder of a journal, from which a restarted master knows its objects again"
    ),
    "log_level": ProgramFlag("INFO", "Moonpool's own: DEBUG, INFO, WARNING or ERROR"),
}
_IGNORED = {
    "the master is one event loop, and always sets TCP_NODELAY": (
        "max_threads rpc_thread_num rpc_enable_tcp_no_delay rpc_conn_timeout_seconds"
    ),
    "there is one allocator, and objects are placed by free space": (
        "allocation_strategy memory_allocator use_mmap_arena_allocator mmap_arena_pool_size"
    ),
    "a client states how long its soft pins last; soft-pinned objects are evicted last": (
        "default_kv_soft_pin_ttl max_kv_soft_pin_ttl allow_evict_soft_pinned_objects"
    ),
    "nodes own their SSDs and offload by themselves: moonpool node --ssd": (
        "enable_offload offload_on_evict offload_force_evict offload_cap_ratio offloading_queue_limit "
        "promotion_max_per_heartbeat promotion_queue_limit enable_disk_eviction quota_bytes root_fs_dir "
        "global_file_segment_size"
    ),
    "tasks end by the master's own time limits": (
        "max_total_finished_tasks max_total_pending_tasks max_total_processing_tasks pending_task_timeout_sec "
        "processing_task_timeout_sec max_retry_attempts"
    ),
    "metrics are read at /metrics": "enable_metric_reporting",
    "an engine that ends removes its own entry; the next one of that name replaces a stale one": (
        "enable_metadata_cleanup_on_timeout"
    ),
    "settings of features that are refused below, or of high availability": (
        "cluster_id etcd_endpoints ha_backend_type ha_backend_connstring batch_oplog_retry_timeout_sec "
        "oplog_batch_max_entries oplog_poll_interval_ms pod_name pod_namespace cxl_path cxl_size "
        "kv_events_additional_salt kv_events_backend_id kv_events_bind_endpoint kv_events_block_size kv_events_dp_rank "
        "kv_events_emit_legacy_compat kv_events_emit_object_key kv_events_lora_name kv_events_model_name "
        "kv_events_queue_capacity kv_events_tenant_id nof_eviction_high_watermark_ratio nof_eviction_ratio "
        "nof_heartbeat_failures_threshold nof_heartbeat_interval_sec nof_heartbeat_probe_timeout_ms "
        "snapshot_backup_dir snapshot_catalog_backend_connstring snapshot_catalog_backend_type "
        "snapshot_catalog_store_connstring snapshot_catalog_store_type snapshot_child_timeout_seconds "
        "snapshot_interval_seconds snapshot_object_store_type snapshot_payload_backend_type "
        "snapshot_payload_store_type snapshot_retention_count tenant_quota_connector_type tenant_quota_connector_uri"
    ),
    "the log goes to stderr; see --log_level": (
        "logtostderr alsologtostderr stderrthreshold minloglevel v vmodule log_dir colorlogtostderr max_log_size"
    ),
}
_REFUSED = {
    "enable_ha": "there is one master; with --data_dir a restarted one knows its objects again",
    "enable_oplog": "there is one master; with --data_dir a restarted one knows its objects again",
    "enable_snapshot": "the journal of --data_dir has its part",
    "enable_snapshot_restore": "the journal of --data_dir has its part",
    "enable_cxl": "nodes offer main memory and SSDs",
    "enable_kv_events": "changes of the pool are streamed to Moonpool's own clients (Store.events), not over ZMQ",
    "enable_multi_tenants": "keys of tenants are always apart; there are no quotas",
    "rpc_interface": "state the address by --rpc_address",
}
MASTER_FLAGS = FlagTable(_FLAGS, {reason: names.split() for reason, names in _IGNORED.items()}, _REFUSED)


@dataclass(frozen=True, kw_only=True)
class MooncakeMasterConfig:
    """What the flags say. A port None: that server does not run."""

    listen: str
    data_dir: str | None
    rules: PoolRules
    admin_host: str
    admin_port: int
    metadata_host: str
    metadata_port: int | None
    log_level: str

    def master(self, data_dir: str) -> MasterConfig:
        """Return the settings of the master. Without `--data_dir` it keeps no journal."""
        rules = {name: getattr(self.rules, name) for name in PoolRules.__dataclass_fields__}
        return MasterConfig(data_dir=data_dir, listen=self.listen, journal=self.data_dir is not None, **rules)


def with_config_file(arguments: list[str]) -> list[str]:
    """Return the arguments after those of the file that `--config_path` names. ConfigError when it cannot be read."""
    path = MASTER_FLAGS.parse(arguments).text("config_path")
    if not path:
        return arguments
    try:
        values = msgspec.json.decode(Path(path).read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"--config_path {path}: {error}; it is a JSON object of flags", param="config_path"
        ) from error
    return [
        f"--{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in values.items()
    ] + arguments


def master_config(parsed: ParsedFlags) -> MooncakeMasterConfig:
    """Return our settings for upstream's flags. Raise ConfigError when a value is out of range."""
    port = parsed.integer("rpc_port")
    if "rpc_port" not in parsed.given and parsed.integer("port"):
        port = parsed.integer("port")
    metadata_port = parsed.integer("http_metadata_server_port")
    for name, number in (("rpc_port", port), ("metrics_port", parsed.integer("metrics_port"))):
        if not 0 <= number < 65536:
            raise ConfigError(f"--{name} {number} is no port", param=name)
    return MooncakeMasterConfig(
        listen=f"tcp:{host_port(parsed.text('rpc_address'), port)}",
        data_dir=parsed.text("data_dir") or None,
        rules=_rules(parsed),
        admin_host=parsed.text("metrics_host"),
        admin_port=parsed.integer("metrics_port"),
        metadata_host=parsed.text("http_metadata_server_host"),
        metadata_port=metadata_port if parsed.switch("enable_http_metadata_server") else None,
        log_level=parsed.text("log_level"),
    )


def _rules(parsed: ParsedFlags) -> PoolRules:
    high, ratio = parsed.number("eviction_high_watermark_ratio"), parsed.number("eviction_ratio")
    if not (0 < high <= 1 and 0 <= ratio < high):
        raise ConfigError("eviction needs 0 < high watermark <= 1 and a ratio below it", param="eviction_ratio")
    return PoolRules(
        lease_s=parse_duration_s("default_kv_lease_ttl", parsed.text("default_kv_lease_ttl")),
        high_watermark=high,
        low_watermark=high - ratio,
        segment_ttl_s=parsed.number("client_ttl"),
        put_discard_s=parsed.number("put_start_discard_timeout_sec"),
        put_release_s=parsed.number("put_start_release_timeout_sec"),
        hot_hits=_hot_hits(parsed),
        hot_window_s=parsed.number("dynamic_replication_heat_window_seconds"),
        hot_max_replicas=parsed.integer("dynamic_replication_max_memory_replicas"),
        promote_after_hits=parsed.integer("promotion_admission_threshold") if parsed.switch("promotion_on_hit") else 0,
    )


def _hot_hits(parsed: ParsedFlags) -> int:
    """Return the look-ups within one window that make a key hot; 0: none does."""
    mode = parsed.text("dynamic_replication_mode")
    if mode not in ("off", "enforce"):
        raise ConfigError(
            f"--dynamic_replication_mode is off or enforce, not {mode!r}", param="dynamic_replication_mode"
        )
    per_s = parsed.number("dynamic_replication_admission_qps_threshold")
    window_s = parsed.number("dynamic_replication_heat_window_seconds")
    return max(1, math.ceil(per_s * window_s)) if mode == "enforce" else 0
