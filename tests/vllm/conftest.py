"""A pool of real processes, a tiny model, and the answers of a vLLM without any pool."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tiny_llama import save_tiny_llama
from vllm_pool import Pool, prompt_of
from vllm_process import PYTHON_VARIABLE, Answer, Connector, NodeProcess, VllmProcess

SEEDS = (1, 2, 3)
StartVllm = Callable[..., VllmProcess]


@pytest.fixture(scope="session", autouse=True)
def _vllm_is_there() -> None:
    if not os.environ.get(PYTHON_VARIABLE):
        pytest.skip("run by make test-vllm, which makes an environment with vLLM")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    save_tiny_llama(folder)
    return folder


@pytest.fixture(scope="session")
def right_answers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Answer]:
    """By the prompt's seed, from a vLLM without a connector."""
    engine = VllmProcess(tmp_path_factory.mktemp("alone") / "engine", model)
    try:
        engine.wait_ready()
        answers = {seed: engine.generate(prompt_of(seed)) for seed in SEEDS}
        engine.finish()
    finally:
        engine.close()
    assert all(answer.cached == 0 for answer in answers.values())
    return answers


@pytest.fixture
def bare_pool(tmp_path: Path) -> Iterator[Pool]:
    """Without memory."""
    with ExitStack() as stack:
        yield Pool(tmp_path, stack)


@pytest.fixture
def node(bare_pool: Pool) -> NodeProcess:
    return bare_pool.add_node()


@pytest.fixture
def pool(bare_pool: Pool, node: NodeProcess) -> Pool:
    """With the memory of one node."""
    return bare_pool


@pytest.fixture
def start_vllm(tmp_path: Path, model: Path) -> Iterator[StartVllm]:
    """`start_vllm(name, connector)`; it may still be loading when this returns."""
    with ExitStack() as stack:

        def start(name: str, connector: Connector) -> VllmProcess:
            engine = VllmProcess(tmp_path / name, model, connector)
            stack.callback(engine.close)
            return engine

        yield start
