"""The Python files of the test tree, and what a name in one of them refers to."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from .own_values import own_names

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


@dataclass(eq=False)
class Module:
    path: Path
    tree: ast.Module
    definitions: dict[str, Definition] = field(default_factory=dict)
    imports: dict[str, tuple[str, str | None]] = field(default_factory=dict)  # local name: module, and name in it

    @property
    def name(self) -> str:
        return self.path.stem

    @cached_property
    def own_names(self) -> set[str]:
        return own_names(self.tree)

    @cached_property
    def classes(self) -> list[ast.ClassDef]:
        return [each for each in self.definitions.values() if isinstance(each, ast.ClassDef)]


class CodeTree:
    def __init__(self, folder: Path) -> None:
        self.modules: dict[str, list[Module]] = {}  # by the last part of their names; conftest is there several times
        for path in sorted(folder.rglob("*.py")):
            module = _read(path)
            self.modules.setdefault(module.name, []).append(module)
        self._visible: dict[Module, list[Module]] = {}

    def test_modules(self) -> Iterator[Module]:
        return (module for name, several in self.modules.items() if name.startswith("test_") for module in several)

    def visible(self, module: Module) -> list[Module]:
        """The module, what it imports of the tree, what these import, and the conftest files above it."""
        if module not in self._visible:
            found = {module: None}
            left = [module, *(each for each in self.modules.get("conftest", ()) if _is_above(each, module))]
            while left:
                each = left.pop()
                found[each] = None
                named = {name.rpartition(".")[2] for name, _ in each.imports.values()}
                named |= {name for _, name in each.imports.values() if name}
                left += [other for name in named for other in self.modules.get(name, ()) if other not in found]
            self._visible[module] = list(found)
        return self._visible[module]

    def named(self, module: Module, name: str) -> tuple[Module, Definition] | None:
        """What a name at the top of the module is: a function or class of the tree."""
        if name in module.definitions:
            return module, module.definitions[name]
        source, original = module.imports.get(name, ("", None))
        for other in self.modules.get(source.rpartition(".")[2], ()):
            if original and (found := self.named(other, original) if other is not module else None):
                return found
        return None

    def modules_named(self, module: Module, name: str) -> list[Module]:
        """The modules of the tree that a name at the top of the module is."""
        source, original = module.imports.get(name, ("", None))
        return self.modules.get(original or source.rpartition(".")[2], [])

    def methods(self, module: Module, of: ast.ClassDef, name: str) -> Iterator[tuple[Module, Function]]:
        """The method of the class, or of its base classes."""
        own = [each for each in of.body if isinstance(each, Function) and each.name == name]
        yield from ((module, each) for each in own)
        for base in () if own else of.bases:
            found = self.named(module, ast.unparse(base).split("[")[0])
            if found and isinstance(found[1], ast.ClassDef) and found[1] is not of:
                yield from self.methods(found[0], found[1], name)


def _is_above(conftest: Module, module: Module) -> bool:
    return module.path.is_relative_to(conftest.path.parent)


def _read(path: Path) -> Module:
    module = Module(path, ast.parse(path.read_text(), str(path)))
    for node in _statements(module.tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                module.imports[each.asname or each.name.split(".")[0]] = (each.name, None)
        elif isinstance(node, ast.ImportFrom):
            for each in node.names:
                module.imports[each.asname or each.name] = (node.module or "", each.name)
    for statement in module.tree.body:
        if isinstance(statement, Definition):
            module.definitions[statement.name] = statement
    return module


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """All statements, those within others too, and no expressions: that is much faster than ast.walk()."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        yield node
        for part in ("body", "handlers", "orelse", "finalbody", "cases"):
            left += getattr(node, part, ())
