"""Finds test functions without a check that can fail.

    python -m tests.gate.scan [FOLDER]

It reads the tests, and does not run them. A test has a check if one of these is in it, or in what it refers to:
functions and methods of the test tree, followed through all that they refer to.

- an `assert` of something that is not the test's own (own_values.py);
- a raise of an AssertionError, or of a class made from it;
- a call that fails by itself: pytest.raises, subprocess.run(check=True), playwright's expect, and so on (_CHECKS).

A check whose failure is caught on the spot (`except AssertionError`, `suppress(Exception)`) is none. A method is looked
for by its name in the modules that the test's module imports, or in the class of its object where that is plain to see.
So this finds tests that look at nothing; it cannot tell whether a test looks at the right thing.
"""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from .code_tree import CodeTree, Function, Module
from .own_values import EVERY_NAME, is_own_value, own_names
from .run import KNOWN_UNSTEADY, read_listed

ROOT = Path(__file__).parents[2]
_CHECKS = {  # the last part of the name of what is called
    *("raises", "warns", "deprecated_call", "fail", "RaisesGroup", "raise_for_status", "check_call", "check_output"),
    *("run_state_machine_as_test", "expect"),
    *("check_integrity", "check_pool"),  # of the product: nothing but asserts
}
_CATCH_FAILURES = {"AssertionError", "Exception", "BaseException"}
_OF_OBJECTS = ("__init__", "__post_init__", "__enter__", "__exit__", "__aenter__", "__aexit__", "__call__")


class Scan:
    def __init__(self, folder: Path) -> None:
        self.tree = CodeTree(folder)
        self._verdicts: dict[tuple[Module, Function], bool] = {}
        failures = {"AssertionError"}
        classes = [each for several in self.tree.modules.values() for module in several for each in module.classes]
        for _ in range(3):  # bases before what is made from them, however they lie
            failures |= {each.name for each in classes if failures & {ast.unparse(base) for base in each.bases}}
        self._failures = failures

    def without_check(self) -> Iterator[tuple[Module, Function]]:
        for module in self.tree.test_modules():
            for function in test_functions(module.tree):
                if not self.has_check(module, function):
                    yield module, function

    def has_check(self, module: Module, function: Function) -> bool:
        """Through all that the function refers to, each function once."""
        seen: set[tuple[Module, Function]] = set()
        left = [(module, function)]
        while left:
            each = left.pop()
            if each in seen:
                continue
            seen.add(each)
            body = Body(self.tree, *each, self._failures, seen_from=module)
            if self._verdicts.setdefault(each, body.has_check()):
                return True
            left += body.referred()
        return False


class Body:
    """Of one function: its checks, and the functions of the tree that it refers to."""

    def __init__(
        self, tree: CodeTree, module: Module, function: Function, failures: set[str], seen_from: Module
    ) -> None:
        self._tree, self._module, self._function = tree, module, function
        self._failures, self._seen_from = failures, seen_from

    @cached_property
    def _parameters(self) -> set[str]:
        return {node.arg for node in ast.walk(self._function.args) if isinstance(node, ast.arg)}

    @cached_property
    def _types(self) -> dict[str, str]:
        return dict(self._known_types())

    @cached_property
    def _own_names(self) -> set[str]:
        return own_names(self._function, self._module.own_names)

    def has_check(self) -> bool:
        for node in uncaught(self._function):
            match node:
                case ast.Assert():
                    if not is_own_value(node.test, EVERY_NAME) or not is_own_value(node.test, self._own_names):
                        return True
                case ast.Raise(exc=ast.AST() as raised):
                    made = raised.func if isinstance(raised, ast.Call) else raised
                    if ast.unparse(made).rpartition(".")[2] in self._failures:
                        return True
                case ast.Call():
                    if fails_by_itself(node):
                        return True
        return False

    def referred(self) -> Iterator[tuple[Module, Function]]:
        for node in uncaught(self._function):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                if node.id not in self._parameters:
                    yield from self._functions_of(self._module, node.id)
                else:
                    yield from self._made_by_fixture(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                yield from self._methods(node)

    def _functions_of(self, module: Module, name: str) -> Iterator[tuple[Module, Function]]:
        found = self._tree.named(module, name)
        if found and isinstance(found[1], ast.ClassDef):
            for method in _OF_OBJECTS:
                yield from self._tree.methods(found[0], found[1], method)
        elif found and isinstance(found[1], Function):
            yield found[0], found[1]

    def _made_by_fixture(self, name: str) -> Iterator[tuple[Module, Function]]:
        """A fixture's own checks are not the test's; those of a function that it gives to the test are."""
        for module in self._tree.visible(self._seen_from):
            fixture = module.definitions.get(name)
            if isinstance(fixture, Function):
                yield from (
                    (module, each) for each in ast.walk(fixture) if isinstance(each, Function) and each != fixture
                )

    def _methods(self, node: ast.Attribute) -> Iterator[tuple[Module, Function]]:
        receiver = node.value.id if isinstance(node.value, ast.Name) else None
        if receiver in self._module.imports and receiver not in self._types:
            for other in self._tree.modules_named(self._module, str(receiver)):
                yield from self._functions_of(other, node.attr)
            found = self._tree.named(self._module, str(receiver))
            if found and isinstance(found[1], ast.ClassDef):
                yield from self._tree.methods(found[0], found[1], node.attr)
            return
        if receiver in self._types:
            found = self._tree.named(self._module, self._types[receiver])
            if found and isinstance(found[1], ast.ClassDef):
                yield from self._tree.methods(found[0], found[1], node.attr)
            if found or self._types[receiver] in self._module.imports:
                return
        for module in self._tree.visible(self._seen_from):
            for of in module.classes:
                yield from ((module, each) for each in of.body if isinstance(each, Function) and each.name == node.attr)

    def _known_types(self) -> Iterator[tuple[str, str]]:
        """Local names whose class is plain to see: from an annotation, or from the call that makes them."""
        for node in ast.walk(self._function):
            match node:
                case ast.arg(arg=name, annotation=ast.Name(id=kind)):
                    yield name, kind
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id=kind))):
                    if kind[:1].isupper():
                        yield name, kind
                case ast.withitem(ast.Call(func=ast.Name(id=kind)), ast.Name(id=name)):
                    if kind[:1].isupper():
                        yield name, kind


def test_functions(tree: ast.Module) -> Iterator[Function]:
    for node in tree.body:
        several = node.body if isinstance(node, ast.ClassDef) and node.name.startswith("Test") else [node]
        yield from (each for each in several if isinstance(each, Function) and each.name.startswith("test_"))


def fails_by_itself(call: ast.Call) -> bool:
    name = ast.unparse(call.func) if isinstance(call.func, (ast.Name, ast.Attribute)) else ""
    last = name.rpartition(".")[2]
    if last in _CHECKS or last.startswith("assert_") or (last.startswith("assert") and last[6:7].isupper()):
        return True
    is_checked = any(key.arg == "check" and getattr(key.value, "value", None) is True for key in call.keywords)
    return last == "run" and is_checked


def uncaught(function: Function) -> Iterator[ast.AST]:
    """All that is in the function, but for what stands where a failure would be caught, and for functions in it that
    nobody uses.
    """
    left: list[ast.AST] = list(function.body)
    while left:
        node = left.pop()
        if isinstance(node, (Function, ast.ClassDef)) and not node.decorator_list and not is_used(function, node.name):
            continue
        yield node
        if isinstance(node, (ast.Try, ast.TryStar)) and any(map(catches_failures, node.handlers)):
            left += [*node.handlers, *node.orelse, *node.finalbody]
        elif isinstance(node, (ast.With, ast.AsyncWith)) and any(suppresses_failures(each) for each in node.items):
            continue
        else:
            left += ast.iter_child_nodes(node)


def is_used(function: Function, name: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(function))


def catches_failures(handler: ast.ExceptHandler) -> bool:
    if any(isinstance(node, ast.Raise) for node in ast.walk(handler)):
        return False
    return handler.type is None or bool(_CATCH_FAILURES & {*_words(handler.type)})


def suppresses_failures(item: ast.withitem) -> bool:
    call = item.context_expr
    if not isinstance(call, ast.Call) or not ast.unparse(call.func).endswith("suppress"):
        return False
    return bool(_CATCH_FAILURES & {word for argument in call.args for word in _words(argument)})


def _words(node: ast.expr) -> list[str]:
    return [ast.unparse(each) for each in (node.elts if isinstance(node, ast.Tuple) else [node])]


def listed_but_gone(folder: Path, listed: Path = KNOWN_UNSTEADY) -> Iterator[str]:
    """Names on the list that are no tests any more: a renamed test stays listed under its new name."""
    for name in sorted(read_listed(listed)):
        path, _, rest = name.partition("::")
        function = rest.split("[")[0].rpartition("::")[2]
        file = folder.parent / path
        if not file.exists() or f"def {function}(" not in file.read_text():
            yield f"{listed.name}: there is no test {name}"


def main(arguments: Sequence[str]) -> int:
    gc.disable()  # it would look through all the trees again and again, and find nothing
    folder = Path(arguments[0]) if arguments else ROOT / "tests"
    problems = [] if arguments else list(listed_but_gone(folder))
    for module, function in Scan(folder).without_check():
        path = module.path.relative_to(folder.parent)
        problems.append(f"{path}:{function.lineno} {function.name}: no check that can fail")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
