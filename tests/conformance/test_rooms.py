"""What the tree promises a reader: one name for one class, no import circle, message types that load nothing heavy."""

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


def imports_of(name: str, path: Path, modules: dict[str, Path], with_types: bool) -> set[str]:
    """Return the modules of this package that a module imports; `with_types`: under TYPE_CHECKING, too."""
    found: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and not with_types:
            waiting.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules else str(node.module))
        waiting.extend(ast.iter_child_nodes(node))
    return (found & modules.keys()) - {name}


def import_circles(*, with_types: bool) -> set[frozenset[str]]:
    """Return the sets of modules of which each one imports each other, directly or not."""
    modules = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in PACKAGE.rglob("*.py")
    }
    imports = {name: imports_of(name, path, modules, with_types) for name, path in modules.items()}
    reached: dict[str, set[str]] = {}
    for name in modules:
        seen, waiting = set[str](), [name]
        while waiting:
            for other in imports[waiting.pop()] - seen:
                seen.add(other)
                waiting.append(other)
        reached[name] = seen
    circular = [name for name in modules if name in reached[name]]
    return {
        frozenset(other for other in circular if other in reached[name] and name in reached[other]) for name in circular
    }


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert not import_circles(with_types=False)


def test_no_module_needs_itself_even_for_its_types() -> None:
    """The state of the master still has three: its parts name the whole that they are given."""
    circles = import_circles(with_types=True)
    assert not {each for each in circles if not all(name.startswith("moonpool.master.") for name in each)}
    assert len(circles) <= 3


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
