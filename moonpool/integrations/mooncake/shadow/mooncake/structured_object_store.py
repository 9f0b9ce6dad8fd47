"""`mooncake.structured_object_store`, served by Moonpool's pool."""

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
from moonpool.integrations.mooncake.bundles import DEFAULT_CHUNK_NBYTES as DEFAULT_BUNDLE_CHUNK_BYTES
from moonpool.integrations.mooncake.bundles import BundleStore, BundleTransferPolicy, RemoteBundleRef
from moonpool.integrations.mooncake.column_structure import MISSING, infer_structure
from moonpool.integrations.mooncake.column_structure import choose_leaf_codec as _choose_leaf_codec
from moonpool.integrations.mooncake.column_structure import escape_key as _escape_key
from moonpool.integrations.mooncake.structured_members import raw_destination, tensor_object_buffer
from moonpool.integrations.mooncake.structured_objects import (
    StructuredMemberSlice,
    StructuredObjectPayload,
    StructuredObjectReadSpec,
    StructuredObjectResult,
)
from moonpool.integrations.mooncake.structured_store import MooncakeBundleTransfer

__all__ = [
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
    "_choose_leaf_codec",
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
