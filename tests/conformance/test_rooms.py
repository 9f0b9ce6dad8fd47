"""What the tree promises a reader: one name for one class, and message types that load nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import moonpool

PACKAGE = Path(moonpool.__file__).parent
HEAVY = ("moonpool.transfer", "moonpool.store.client", "moonpool.store.tensors", "moonpool.node", "torch")


def public_classes() -> dict[str, list[str]]:
    """Return the files that define a public class, by the class's name."""
    files: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for statement in ast.parse(path.read_text()).body:
            if isinstance(statement, ast.ClassDef) and not statement.name.startswith("_"):
                files[statement.name].append(str(path.relative_to(PACKAGE)))
    return files


def test_public_class_names_are_unique() -> None:
    doubled = {name: files for name, files in public_classes().items() if len(files) > 1}
    assert not doubled


@pytest.mark.parametrize(
    "module",
    [
        "moonpool.store.messages",
        "moonpool.worker.messages",
        "moonpool.conductor.messages",
        "moonpool.conductor.service",
        "moonpool.frontend.service",
        "moonpool.sim.world.cluster",
        "moonpool.planner.plan",
    ],
)
def test_messages_and_their_users_load_no_transport(module: str) -> None:
    program = f"import sys, {module}; print(*sorted(name for name in sys.modules if name.startswith({HEAVY!r})))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not loaded
