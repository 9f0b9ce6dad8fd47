"""`mooncake.structured_object_store`, served by Moonpool's pool.

The names that begin with "_" are for programs that use upstream's helpers. `_concat_arrays_into`, a copy in C, does not
exist here.
"""

from moonpool.integrations.mooncake.batch_refs import (
    FieldSchema,
    MooncakeDataProtoRef,
    StructuredFieldLocation,
    export_dataproto_ref,
    export_ref,
    import_dataproto_ref,
    import_ref,
    is_dataproto_ref_handle,
)
from moonpool.integrations.mooncake.bundle_payloads import GatheredPayload as _DirectCopyPayload
from moonpool.integrations.mooncake.bundle_payloads import GatheredPayload as _MultiBufferPayload
from moonpool.integrations.mooncake.bundle_payloads import raw_destination, tensor_object_buffer
from moonpool.integrations.mooncake.bundles import RemoteBundleRef
from moonpool.integrations.mooncake.bundles import decode_manifest as _decode_manifest
from moonpool.integrations.mooncake.column_codecs import decode_msgpack as _decode_msgpack_ragged_values
from moonpool.integrations.mooncake.column_codecs import encode_msgpack as _encode_msgpack_ragged_values
from moonpool.integrations.mooncake.column_encoding import encode_column as _encode_with_schema
from moonpool.integrations.mooncake.column_structure import MISSING, infer_structure
from moonpool.integrations.mooncake.column_structure import choose_leaf_codec as _choose_leaf_codec
from moonpool.integrations.mooncake.column_structure import escape_key as _escape_key
from moonpool.integrations.mooncake.payload_writes import DEFAULT_CHUNK_NBYTES as DEFAULT_BUNDLE_CHUNK_BYTES
from moonpool.integrations.mooncake.payload_writes import PARALLEL_MIN_CHUNKS as AUTO_PARALLEL_MIN_CHUNKS
from moonpool.integrations.mooncake.payload_writes import PARALLEL_MIN_NBYTES as AUTO_PARALLEL_MIN_BYTES
from moonpool.integrations.mooncake.payload_writes import BundleStore, BundleTransferPolicy
from moonpool.integrations.mooncake.ragged_codecs import decode_arrays as _decode_typed_ragged_values
from moonpool.integrations.mooncake.ragged_codecs import encode_arrays as _encode_typed_ragged_values
from moonpool.integrations.mooncake.ragged_codecs import (
    encode_regular_arrays as _encode_typed_ragged_regular_ndarray_rows,
)
from moonpool.integrations.mooncake.structured_objects import (
    StructuredMemberSlice,
    StructuredObjectPayload,
    StructuredObjectReadSpec,
    StructuredObjectResult,
)
from moonpool.integrations.mooncake.structured_store import MooncakeBundleTransfer
from moonpool.integrations.mooncake.write_groups import config_for_keys as _config_for_grouped_keys

_concat_arrays_into = None

__all__ = [
    "AUTO_PARALLEL_MIN_BYTES",
    "AUTO_PARALLEL_MIN_CHUNKS",
    "DEFAULT_BUNDLE_CHUNK_BYTES",
    "MISSING",
    "BundleStore",
    "BundleTransferPolicy",
    "FieldSchema",
    "MooncakeBundleTransfer",
    "MooncakeDataProtoRef",
    "RemoteBundleRef",
    "StructuredFieldLocation",
    "StructuredMemberSlice",
    "StructuredObjectPayload",
    "StructuredObjectReadSpec",
    "StructuredObjectResult",
    "_DirectCopyPayload",
    "_MultiBufferPayload",
    "_choose_leaf_codec",
    "_concat_arrays_into",
    "_config_for_grouped_keys",
    "_decode_manifest",
    "_decode_msgpack_ragged_values",
    "_decode_typed_ragged_values",
    "_encode_msgpack_ragged_values",
    "_encode_typed_ragged_regular_ndarray_rows",
    "_encode_typed_ragged_values",
    "_encode_with_schema",
    "_escape_key",
    "export_dataproto_ref",
    "export_ref",
    "import_dataproto_ref",
    "import_ref",
    "infer_structure",
    "is_dataproto_ref_handle",
    "raw_destination",
    "tensor_object_buffer",
]
