"""`moonpool mooncake client`: the flags of upstream's `mooncake_client`, which offers memory to the pool. Pure."""

from __future__ import annotations

import os

from moonpool.base.address import host_port
from moonpool.base.errors import ConfigError
from moonpool.integrations.mooncake.flags import FlagTable, ParsedFlags, ProgramFlag
from moonpool.integrations.mooncake.segment_names import node_name
from moonpool.integrations.mooncake.setup_config import SetupConfig
from moonpool.node.config import NodeConfig
from moonpool.store.client.config import credentials

_FLAGS = {
    "master_server_address": ProgramFlag("127.0.0.1:50051", "address of the master"),
    "host": ProgramFlag("127.0.0.1", "address of this machine at which others reach the memory"),
    "port": ProgramFlag(50052, "tcp port of the memory; the segment is named host:port"),
    "global_segment_size": ProgramFlag("4 GB", "memory to offer, for example 16GB"),
    "log_level": ProgramFlag("INFO", "Moonpool's own: DEBUG, INFO, WARNING or ERROR"),
}
_IGNORED = {
    "bytes move directly between the memory of callers and the pool; nothing is staged": ["local_buffer_size"],
    "the master knows where memory is, so no metadata server is asked": ["metadata_server"],
    "the transport is chosen per peer: shared memory, tcp, or what `moonpool node` is told": [
        "protocol",
        "device_names",
    ],
    "memory belongs to all tenants": ["tenant_id"],
    "a node has its own threads": ["threads", "use_mmap_arena_allocator", "mmap_arena_pool_size"],
    "the log goes to stderr; see --log_level": ["logtostderr", "v", "minloglevel", "log_dir"],
    "objects on SSDs are read from their node": ["start_offload_rpc_server"],
}
_REFUSED = {"enable_offload": "run moonpool node with --ssd and --ssd-size instead"}
CLIENT_FLAGS = FlagTable(_FLAGS, _IGNORED, _REFUSED)


def node_config(parsed: ParsedFlags, run_dir: str) -> NodeConfig:
    """Return the settings of the node that offers the memory. Raise ConfigError when a value cannot be used."""
    host, port = parsed.text("host"), parsed.integer("port")
    if not 0 < port < 65536:
        raise ConfigError(f"--port {port} is no port", param="port")
    is_any = host in ("0.0.0.0", "::")
    setup = SetupConfig(
        local_hostname=host_port(host, port),
        metadata_server="",
        global_segment_size=parsed.text("global_segment_size").replace(" ", ""),
        master_server_addr=parsed.text("master_server_address"),
    )
    if is_any:
        raise ConfigError(f"--host {host} is no address that others can connect to; state this machine's", param="host")
    return NodeConfig(
        name=node_name(host_port(host, port), os.getpid(), 1),
        master_address=setup.master_address,
        dram_nbytes=setup.offered_nbytes,
        run_dir=run_dir,
        tcp_host=host,
        tcp_port=port,
        **credentials(),
    )
