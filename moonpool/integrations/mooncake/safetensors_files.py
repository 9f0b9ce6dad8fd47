"""`SafetensorsCalls`: tensors from files in the safetensors format to the pool and back.

safetensors and torch are imported when a call needs them.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from moonpool.integrations.mooncake.codes import ErrorCode
from moonpool.integrations.mooncake.tensors import WholeTensorCalls

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger(__name__)


class SafetensorsCalls(WholeTensorCalls):
    """One tensor and one file per call."""

    def save_tensor_to_safetensor(self, key: str, file_name: str | None = None) -> int:
        """Write the tensor to a file (default: named as the key) under the name `key`. -1100 when there is no tensor
        under the key, -600 when the file cannot be written.
        """
        if self._session is None:
            return ErrorCode.INVALID_PARAMS
        tensor = self.get_tensor(key)
        if tensor is None:
            return ErrorCode.FILE_NOT_FOUND
        try:
            _safetensors().save_file({key: tensor}, file_name or key)
        except Exception as error:  # noqa: BLE001  # the library raises types of its own
            _LOG.warning("save_tensor_to_safetensor %s: %s", key, error)
            return ErrorCode.INVALID_PARAMS
        return ErrorCode.OK

    def load_tensor_from_safetensor(self, key: str | None = None, file_name: str = "") -> torch.Tensor | None:
        """Store a tensor of the file under `key` (default: the file's name), and return it. The tensor named `key` is
        taken, or the first one. None when the file cannot be read or the tensor not stored.
        """
        if self._session is None or not file_name:
            return None
        try:
            tensors = _safetensors().load_file(file_name)
        except Exception as error:  # noqa: BLE001  # the library raises types of its own
            _LOG.warning("load_tensor_from_safetensor %s: %s", file_name, error)
            return None
        if not tensors:
            _LOG.warning("load_tensor_from_safetensor %s: the file has no tensors", file_name)
            return None
        if key is not None and key not in tensors:
            _LOG.warning("load_tensor_from_safetensor %s: no tensor is named %s; the first is taken", file_name, key)
        tensor: torch.Tensor = tensors[key] if key in tensors else next(iter(tensors.values()))
        code = self.put_tensor(file_name if key is None else key, tensor)
        if code != ErrorCode.OK:
            _LOG.warning("load_tensor_from_safetensor %s: the tensor was not stored (%d)", file_name, code)
            return None
        return tensor


def _safetensors() -> Any:
    return importlib.import_module("safetensors.torch")
