"""`mooncake.structured_object_store`, served by Moonpool's pool."""

from moonpool.integrations.mooncake.column_structure import MISSING, infer_structure
from moonpool.integrations.mooncake.column_structure import choose_leaf_codec as _choose_leaf_codec
from moonpool.integrations.mooncake.column_structure import escape_key as _escape_key

__all__ = ["MISSING", "_choose_leaf_codec", "_escape_key", "infer_structure"]
