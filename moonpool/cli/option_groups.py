"""The groups in which `--help` and `moonpool config init` list the settings of `serve` and of the roles.

Settings have the same names at all commands, so one table is enough. Within a group they keep the order of their
dataclass.
"""

from __future__ import annotations

from moonpool.base.settings import Setting

REQUIRED = "Required"
_OTHER = "More"
_GROUPS = {
    "Model": "model model_name random_weights max_model_len dtype kv_dtype device",
    "Roles": "prefill decode nodes frontends conductors elastic pipeline pipeline_min_tokens name role "
    "expected_workers expected_nodes",
    "Memory and disk": "dram ssd ssd_size ssd_file_size ssd_rest_s kv numa_node copy_threads fence_check_s",
    "Addresses": "host port listen master conductor run_dir siblings",
    "Transfers": "shm nixl lanes tcp_host tcp_hosts tcp_port tcp_advertise_host tcp_max_connections tcp_idle_s "
    "topology_file",
    "Computing": "block_tokens max_batch_tokens max_num_seqs threads calibrate_s report_interval_s step_limit_s "
    "prepare_limit_s",
    "Requests": "policy ttft_slo_s tbt_slo_s admission request_timeout_s max_attempts worker_wait_s max_body "
    "max_connections prompt_process num_records max_pool_blocks pull_timeout_s pull_grace_s pool_silence_s "
    "pool_timeout_s pool_rest_s",
    "Access": "tenants_file secret_file tls_cert_file tls_key_file tls_ca_file tour tour_dir",
    "Eviction and replicas": "eviction high_watermark low_watermark ssd_high_watermark promote_after_hits "
    "read_ahead_blocks hot_hits hot_window_s hot_max_replicas hot_max_part hot_copies_in_flight offloads_in_flight",
    "Puts, leases and nodes": "lease_s put_discard_s put_release_s heartbeat_s segment_ttl_s away_ttl_s max_objects "
    "max_fates step_objects order_timeout_s task_moves_in_flight tick_s start_timeout_s retry_s",
    "Journal and events": "journal forget_journal journal_sync_s event_delay_s max_pending_event_keys "
    "max_replay_event_keys",
    "Files and logs": "data_dir state_dir log_dir log_level access_log otlp config drain_s",
}
_GROUP_OF = {key: group for group, keys in _GROUPS.items() for key in keys.split()}


def group_of(setting: Setting) -> str:
    """Return the group's title; settings that must be given have a group of their own."""
    if setting.is_required:
        return REQUIRED
    if setting.key.startswith("policy_"):
        return "Requests"
    return _GROUP_OF.get(setting.key, _OTHER)


def grouped(settings: dict[str, Setting]) -> dict[str, list[Setting]]:
    """Return the settings that are shown, by group, in the order in which groups are listed."""
    found: dict[str, list[Setting]] = {group: [] for group in (REQUIRED, *_GROUPS, _OTHER)}
    for setting in settings.values():
        if not setting.hidden:
            found[group_of(setting)].append(setting)
    return {group: members for group, members in found.items() if members}
