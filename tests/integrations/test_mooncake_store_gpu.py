"""`mooncake.store` with memory of a GPU: registered by pointer, put from and read into."""

from __future__ import annotations

import pytest
from store_pool import MIB

from moonpool.integrations.mooncake import MooncakeDistributedStore

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def test_blocks_go_from_a_gpu_to_the_pool_and_back(store: MooncakeDistributedStore) -> None:
    """As an engine's blocks do: one object of several layers, each at its own address."""
    import torch

    layers = torch.randint(0, 256, (4, 8, MIB // 8), dtype=torch.uint8, device="cuda")  # layer, block, byte
    torch.cuda.synchronize()
    nbytes = layers.shape[2]
    assert store.register_buffer(layers.data_ptr(), layers.nbytes) == 0

    def pointers(block: int) -> list[int]:
        return [layers[layer, block].data_ptr() for layer in range(4)]

    sizes = [[nbytes] * 4] * 2
    assert store.batch_put_from_multi_buffers(["a", "b"], [pointers(0), pointers(1)], sizes) == [0, 0]
    assert store.get("b") == layers[:, 1].cpu().numpy().tobytes()
    assert store.batch_get_into_multi_buffers(["a", "b"], [pointers(2), pointers(3)], sizes) == [4 * nbytes] * 2
    assert torch.equal(layers[:, 2:4], layers[:, 0:2])
    assert store.batch_get_into_multi_buffers(["none"], [pointers(2)], sizes[:1]) == [-704]
    assert torch.equal(layers[:, 2], layers[:, 0])
