"""What ties KV to one model: the digest of its weight files, and the cache identity made from it. No torch.

The front end, the conductor and the workers compute the same identity from the same files. Digests are kept in
the cache folder by (path, size, modification time), so that a file's bytes are read once and not at every start.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from moonpool.base.errors import ModelError
from moonpool.base.keys import CacheIdentity
from moonpool.engine.cache_folder import cache_folder, locked, written_whole
from moonpool.engine.config import DType, ModelConfig
from moonpool.engine.kv_memory import PIECE_LAYOUT
from moonpool.engine.model_fetch import file_sha256
from moonpool.engine.model_files import ModelFiles


def weights_digest(files: ModelFiles) -> str:
    """Hex sha256 of the weight file's bytes; of several files, the sha256 over their digests in order."""
    digests = [_remembered_digest(path) for path in files.weights]
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def cache_identity(config: ModelConfig, files: ModelFiles, dtype: DType, block_tokens: int) -> CacheIdentity:
    """The identity of KV computed from these files in this dtype and block size."""
    return CacheIdentity(
        model_name=files.name,
        weights_digest=weights_digest(files),
        dtype=dtype,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_tokens=block_tokens,
        piece_layout=PIECE_LAYOUT,
        rope=config.rope_text,
    )


def _remembered_digest(path: Path) -> str:
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
