"""`mooncake.mooncake_config`. The two names with an underscore are upstream's too; its programs use them."""

from moonpool.integrations.mooncake.mooncake_config import (
    DEFAULT_GLOBAL_SEGMENT_SIZE,
    DEFAULT_LOCAL_BUFFER_SIZE,
    MooncakeConfig,
    _parse_bool,
    _parse_segment_size,
    logger,
)

__all__ = [
    "DEFAULT_GLOBAL_SEGMENT_SIZE",
    "DEFAULT_LOCAL_BUFFER_SIZE",
    "MooncakeConfig",
    "_parse_bool",
    "_parse_segment_size",
    "logger",
]
