"""A pool in which one engine stored prompts and ended, and a second engine that has computed nothing yet."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_pool import EnginePool, prompt_of
from sglang_engine import OBJECTS, PYTHON_VARIABLE, SglangEngine, Stored
from tiny_llama import save_tiny_llama

NUM_PROMPTS = 12


@pytest.fixture(scope="session", autouse=True)
def _sglang_is_there() -> None:
    if not os.environ.get(PYTHON_VARIABLE):
        pytest.skip("run by make test-sglang, which makes an environment with SGLang")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    save_tiny_llama(folder)
    return folder


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePool]:
    made = EnginePool(tmp_path_factory.mktemp("p"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def stored(pool: EnginePool, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    engine = SglangEngine(tmp_path_factory.mktemp("first") / "engine", model, pool.address)
    try:
        engine.wait_ready()
        answers, keys = {}, {}
        for seed in range(1, NUM_PROMPTS + 1):
            answers[seed] = engine.generate(prompt_of(seed))
            engine.wait_stored(OBJECTS * seed)
            keys[seed] = list(engine.stored())[-OBJECTS:]
        hashes = engine.stored()
        engine.finish()
    finally:
        engine.close()
    assert all(answer.cached == 0 for answer in answers.values())
    return Stored(answers, keys, hashes)


@pytest.fixture(scope="session")
def engine(
    pool: EnginePool, stored: Stored, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SglangEngine]:
    """The second engine."""
    made = SglangEngine(tmp_path_factory.mktemp("second") / "engine", model, pool.address)
    try:
        made.wait_ready()
        yield made
    finally:
        made.close()
