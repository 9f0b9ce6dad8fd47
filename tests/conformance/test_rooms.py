"""What the tree promises a reader: one name for one class, no import circle, message types that load nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter, defaultdict
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


def test_names_of_test_files_are_unique() -> None:
    """pytest imports them without their folders."""
    paths = (Path(__file__).parents[1]).rglob("test_*.py")
    assert [name for name, count in Counter(path.name for path in paths).items() if count > 1] == []


def imports_of(name: str, path: Path, modules: dict[str, Path]) -> set[str]:
    """Return the modules of this package that a module imports at its top, in a function or under TYPE_CHECKING."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
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
