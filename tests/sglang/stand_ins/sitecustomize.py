"""What SGLang needs of a GPU machine, for a machine without one. Python loads this at the start of every process that
has this folder on PYTHONPATH. SGLang itself is unmodified; these stand in:

- `torchvision`: an empty module, because its wheel does not fit the CPU's torch; only image models use it.
- `platform.machine()`: a name that SGLang does not know. For those it knows it asks for compiled CPU kernels, which no
  wheel has; without them it computes with plain torch.
- page-locking of host memory for CUDA: nothing, because no GPU copies from it.
- the two copies between the engine's KV and its host memory (layout `page_first_direct`): plain tensor copies.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import platform
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

platform.machine = lambda: "plain"


class _AnyClass(type):
    """A class in which every name exists, as a text."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _AnyName(types.ModuleType):
    """A module in which every name exists, as a class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyClass(name, (), {})


def _copy_to_host(
    *, src_ptrs: Sequence[Any], dst_ptrs: Sequence[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """src: per layer (tokens, heads, dim), all K before all V. dst: K and V, each (pages, layers, page, heads, dim)."""
    num_layers = len(src_ptrs) // len(dst_ptrs)
    for at in range(0, len(src_indices), page_size):
        begin, page = int(src_indices[at]), int(dst_indices[at]) // page_size
        for number, layer in enumerate(src_ptrs):
            dst_ptrs[number // num_layers][page, number % num_layers] = layer[begin : begin + page_size]


def _copy_to_engine(
    *,
    src_ptrs: Sequence[Any],
    dst_ptrs: Sequence[Any],
    src_indices: Any,
    dst_indices: Any,
    layer_id: int,
    page_size: int,
) -> None:
    """The reverse of _copy_to_host for one layer."""
    for at in range(0, len(src_indices), page_size):
        page, begin = int(src_indices[at]) // page_size, int(dst_indices[at])
        for host, layer in zip(src_ptrs, dst_ptrs, strict=True):
            layer[begin : begin + page_size] = host[page, layer_id]


def _patch_common(module: Any) -> None:
    module._cuda_host_register = lambda *_, **__: None
    module._cuda_host_unregister = lambda *_, **__: None


def _patch_mha(module: Any) -> None:
    module.transfer_kv_all_layer_direct_lf_pf = _copy_to_host
    module.transfer_kv_per_layer_direct_pf_lf = _copy_to_engine
    module.require_kvcacheio_ops = lambda *_, **__: None  # asks whether the compiled copies are there


_PATCHES: dict[str, Callable[[Any], None]] = {
    "sglang.srt.mem_cache.pool_host.common": _patch_common,
    "sglang.srt.mem_cache.pool_host.mha": _patch_mha,
}


class _Patching(importlib.abc.MetaPathFinder):
    """Finds the modules of _PATCHES as Python would, and changes them when they have been loaded."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] == "torchvision":
            return importlib.util.spec_from_loader(name, _AnyLoader(), is_package=True)
        patch = _PATCHES.get(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path) if patch else None
        if spec is None or spec.loader is None or patch is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            load(module)
            patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _AnyLoader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _AnyName(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__version__ = "0.28.0"  # type: ignore[attr-defined]  # transformers asks


sys.meta_path.insert(0, _Patching())
