"""What the tree promises a reader: one name for one class, no import circle, message types that load nothing heavy."""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import moonpool

PACKAGE = Path(moonpool.__file__).parent
LIGHT = (
    "moonpool.store.messages",
    "moonpool.worker.messages",
    "moonpool.conductor.messages",
    "moonpool.conductor.service",
    "moonpool.frontend.service",
    "moonpool.sim.world.cluster",
    "moonpool.planner.plan",
)
HEAVY = ("moonpool.transfer", "moonpool.store.client", "moonpool.store.tensors", "moonpool.node", "torch")


class Outline(NamedTuple):
    """What the tests here want of a file. (Its whole tree would slow the collector down for all tests that follow.)"""

    public_classes: list[str]
    imports: list[ast.Import | ast.ImportFrom]


@functools.cache
def outline(path: Path) -> Outline:
    tree = ast.parse(path.read_text())
    classes = [each.name for each in tree.body if isinstance(each, ast.ClassDef) and not each.name.startswith("_")]
    return Outline(classes, [each for each in statements(tree) if isinstance(each, ast.Import | ast.ImportFrom)])


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all that is below `tree`, except what is part of an expression: there is no import in one."""
    waiting = [tree]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if not isinstance(node, ast.expr):
                yield node
                waiting.append(node)


def public_classes() -> dict[str, list[str]]:
    """Return the files that define a public class, by the class's name."""
    files: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in outline(path).public_classes:
            files[name].append(str(path.relative_to(PACKAGE)))
    return files


def test_public_class_names_are_unique() -> None:
    doubled = {name: files for name, files in public_classes().items() if len(files) > 1}
    assert not doubled


def test_names_of_test_files_are_unique() -> None:
    """pytest imports them without their folders."""
    paths = (Path(__file__).parents[1]).rglob("test_*.py")
    assert [name for name, count in Counter(path.name for path in paths).items() if count > 1] == []


def imports_of(name: str, path: Path, modules: dict[str, Path]) -> set[str]:
    """Return the modules of this package that a module imports at its top, in a function or under TYPE_CHECKING."""
    found: set[str] = set()
    for node in outline(path).imports:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        else:
            assert not node.level, f"{path}: imports in this package are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules else str(node.module))
    return (found & modules.keys()) - {name}


def import_circles(package: Path) -> set[frozenset[str]]:
    """Return the sets of modules of which each one imports each other, directly or not."""
    modules = {
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in package.rglob("*.py")
    }
    imports = {name: imports_of(name, path, modules) for name, path in modules.items()}
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
    """Not even for its types, or inside a function."""
    assert not import_circles(PACKAGE)


@pytest.mark.parametrize(
    "source",
    [
        "from room.low import x",
        "import room.low",
        "def f():\n    from room import low",
        "if TYPE_CHECKING:\n    from room.low import X",
    ],
)
def test_an_import_circle_is_found_in_every_form(source: str, tmp_path: Path) -> None:
    room = tmp_path / "room"
    room.mkdir()
    (room / "__init__.py").write_text("")
    (room / "low.py").write_text("from room.high import y")
    (room / "high.py").write_text(source)
    assert import_circles(room) == {frozenset({"room.low", "room.high"})}


_LOAD = """
import importlib, json, sys
loaded = {}
for module in json.loads(sys.argv[1]):
    known = set(sys.modules)
    importlib.import_module(module)
    new = set(sys.modules) - known
    loaded[module] = sorted(name for name in new if name.startswith(tuple(json.loads(sys.argv[2]))))
print(json.dumps(loaded))
"""


def test_messages_and_their_users_load_no_transport() -> None:
    """One after the other in one process: the first one that loads something heavy is named."""
    command = [sys.executable, "-c", _LOAD, json.dumps(LIGHT), json.dumps(HEAVY)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(said) == {module: [] for module in LIGHT}
