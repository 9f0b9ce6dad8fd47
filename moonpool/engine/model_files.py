"""Finds a model's files, by name in the cache or by path (a Hugging Face folder or a .gguf file), and reads them. No
torch.

    files = resolve("smollm2")            # or "/models/Qwen3-0.6B", or "model.gguf"
    config = read_config(files)
    identity = cache_identity(config, files, "float32", 64)

A missing, truncated or unsupported file raises ModelError with the file and the reason. This module never uses the
network; model_fetch.py fetches named models.

A Hugging Face folder may have no weights: with `random_weights` they are generated from a fixed seed, for measuring a
machine without a download. Without it, the first use of the weights raises ModelError.

The cache identity ties KV to one model. The front end, the conductor and the workers compute the same identity from the
same files; that of random weights names their seed and the model's shape, so their KV never mixes with other KV.
Digests of weight files are kept in the cache folder by (path, size, modification time), so that the bytes are read once
and not at every start.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from moonpool.base.errors import InvalidInput, ModelError, UnknownModel
from moonpool.base.keys import CacheIdentity
from moonpool.engine.cache_folder import cache_folder, locked, written_whole
from moonpool.engine.config import DType, KvDType, ModelConfig, tensor_shapes
from moonpool.engine.gguf_file import GgufFile
from moonpool.engine.kv_memory import PIECE_LAYOUT
from moonpool.engine.model_fetch import NAMED_MODELS, fetched_path, file_sha256
from moonpool.engine.sequence import SamplingDefaults, SamplingParams

_ROPE_DIVISORS = "rope_freqs.weight"
RANDOM_SEED = 0
_RANDOM_VERSION = 1  # of how weights.py generates random weights


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk. `root` is the folder or the .gguf file; `weights` are its weight files, in order, which are not
    used if it runs with random weights."""

    name: str
    kind: Literal["huggingface", "gguf"]
    root: Path
    weights: tuple[Path, ...]
    random_weights: bool = False


def resolve(model: str, *, random_weights: bool = False) -> ModelFiles:
    """Return the files of a named model, which must have been fetched, or of a path."""
    return replace(_find(model), random_weights=random_weights)


def _find(model: str) -> ModelFiles:
    if model in NAMED_MODELS:
        path = fetched_path(model)
        if not path.exists():
            raise ModelError(f"{model} is not on this machine yet; run: moonpool model fetch {model}")
        return ModelFiles(model, "gguf", path, (path,))
    path = Path(model).expanduser()
    if path.is_dir():
        return ModelFiles(path.resolve().name, "huggingface", path.resolve(), _folder_weights(path.resolve()))
    if path.is_file() and path.suffix == ".gguf":
        return ModelFiles(path.stem, "gguf", path.resolve(), (path.resolve(),))
    known = ", ".join(sorted(NAMED_MODELS))
    raise UnknownModel(f"{model!r} is neither a known model ({known}), nor a Hugging Face folder, nor a .gguf file")


def read_config(files: ModelFiles) -> ModelConfig:
    """Return the model's shape, from config.json or from the GGUF header."""
    if files.kind == "gguf":
        return _gguf_config(GgufFile.open(files.root))
    return ModelConfig.from_hf(
        read_json(files.root / "config.json"), read_json(files.root / "generation_config.json", optional=True)
    )


def read_sampling_defaults(files: ModelFiles) -> SamplingDefaults:
    """Return the sampling values that the model's authors recommend: of generation_config.json, or of a named model."""
    if files.kind == "gguf":
        return NAMED_MODELS[files.name].sampling if files.name in NAMED_MODELS else SamplingDefaults()
    known = read_json(files.root / "generation_config.json", optional=True)
    if known.get("do_sample") is False:
        return SamplingDefaults()
    given = {name: known[name] for name in SamplingDefaults.__struct_fields__ if known.get(name) is not None}
    try:
        made = msgspec.convert(given, SamplingDefaults, strict=False)
        SamplingParams(max_tokens=1, **msgspec.structs.asdict(made))
    except (msgspec.ValidationError, InvalidInput) as error:
        raise ModelError(f"{files.root / 'generation_config.json'}: {error}") from error
    return made


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """Return a JSON object from disk; an empty one for a missing optional file."""
    if optional and not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path.parent} has no {path.name}") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


def _gguf_config(file: GgufFile) -> ModelConfig:
    divisors: tuple[float, ...] = ()
    if _ROPE_DIVISORS in file.tensors:
        divisors = tuple(float(value) for value in file.read(_ROPE_DIVISORS))
    shapes = {tensor.name: tensor.shape for tensor in file.tensors.values()}
    return ModelConfig.from_gguf(file.metadata, shapes, divisors)


def _folder_weights(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors files that the index names, or all of the folder; there may be none."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelError(f"{index} has no weight_map")
        paths = [folder / name for name in sorted({str(name) for name in weight_map.values()})]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    for path in paths:
        if not path.is_file():
            raise ModelError(f"{folder} lacks {path.name}, which its index names")
    return tuple(paths)


def require_weights(files: ModelFiles) -> None:
    """Raise ModelError if the model has no weight files and does not run with random weights."""
    if not files.weights and not files.random_weights:
        raise ModelError(f"{files.root} has no .safetensors files; --random-weights serves it with random weights")


def weights_digest(files: ModelFiles) -> str:
    """Return the hex sha256 of the weight file's bytes; for several files, the sha256 over their digests in order."""
    require_weights(files)
    digests = [_cached_digest(path) for path in files.weights]
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def random_digest(config: ModelConfig) -> str:
    """Return what stands in the cache identity for random weights: their version and seed, and a digest of their
    shapes. No digest of weight files looks like it."""
    shapes = hashlib.sha256(json.dumps(tensor_shapes(config)).encode()).hexdigest()
    return f"random/{_RANDOM_VERSION}/seed={RANDOM_SEED}/{shapes}"


def cache_identity(
    config: ModelConfig, files: ModelFiles, dtype: DType, block_tokens: int, kv_dtype: KvDType | None = None
) -> CacheIdentity:
    """Return the identity of KV computed from these files in this dtype and block size, and kept in `kv_dtype`."""
    return CacheIdentity(
        model_name=files.name,
        weights_digest=random_digest(config) if files.random_weights else weights_digest(files),
        dtype=dtype if kv_dtype in (None, dtype) else f"{kv_dtype} of {dtype}",
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_tokens=block_tokens,
        piece_layout=PIECE_LAYOUT,
        rope=config.rope_text,
    )


def _cached_digest(path: Path) -> str:
    try:
        stat = path.stat()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    described = json.dumps([str(path), stat.st_size, stat.st_mtime_ns])
    memo = cache_folder("digests") / hashlib.sha256(described.encode()).hexdigest()
    with locked(memo):
        if memo.exists() and len(known := memo.read_text()) == hashlib.sha256().digest_size * 2:
            return known
        digest = file_sha256(path)
        with written_whole(memo) as partial:
            partial.write_text(digest)
        return digest
