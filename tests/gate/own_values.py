"""Which values in a test are the test's own: constants, and what is computed from them alone.

An assert of own values says nothing about the system. A list or dictionary that the test also hands to somebody, or
changes, is not its own: it may show what the system did.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection, Iterator

Function = ast.FunctionDef | ast.AsyncFunctionDef
_PURE = {
    *("abs", "all", "any", "bool", "bytes", "chr", "dict", "divmod", "enumerate", "float", "frozenset", "int", "len"),
    *("list", "max", "min", "ord", "range", "repr", "reversed", "round", "set", "sorted", "str", "sum", "tuple", "zip"),
}
_MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
_MADE_MUTABLE = {"list", "dict", "set"}
_DISPLAYS = (ast.Tuple, ast.List, ast.Set, ast.Dict, ast.JoinedStr, ast.FormattedValue, ast.Slice, ast.Starred)
_OPERATIONS = (ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Subscript)
_LOOPS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_NOT_VALUES = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)
# Where a list may stand and stay as it is.
_READING = (ast.Compare, ast.Assert, ast.For, ast.AsyncFor, ast.comprehension, ast.BoolOp, ast.UnaryOp, *_DISPLAYS)


class _EveryName:
    def __contains__(self, name: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


EVERY_NAME: Collection[str] = _EveryName()  # where even this is not enough, nobody needs to look at the names


def is_own_value(value: ast.AST, own: Collection[str]) -> bool:
    """Whether the expression is of constants and of the names in `own`."""
    match value:
        case ast.Constant():
            return True
        case ast.Name():
            return value.id in own
        case ast.Call():
            return _is_pure(value.func, own) and all(map_own(value.args, own)) and all(map_own(value.keywords, own))
        case ast.keyword():
            return is_own_value(value.value, own)
        case _ if isinstance(value, _LOOPS):
            names = {name for loop in value.generators for name in names_in(loop.target)}
            if not all(is_own_value(loop.iter, own) for loop in value.generators):
                return False
            parts = [child for child in ast.iter_child_nodes(value) if not isinstance(child, ast.comprehension)]
            tests = [test for loop in value.generators for test in loop.ifs]
            return all(map_own([*parts, *tests], own if own is EVERY_NAME else {*own, *names}))
        case _ if isinstance(value, _DISPLAYS + _OPERATIONS):
            parts = [child for child in ast.iter_child_nodes(value) if not isinstance(child, _NOT_VALUES)]
            return all(map_own(parts, own))
    return False


def map_own(values: Collection[ast.AST], own: Collection[str]) -> Iterator[bool]:
    return (is_own_value(value, own) for value in values)


def _is_pure(function: ast.expr, own: Collection[str]) -> bool:
    if isinstance(function, ast.Name):
        return function.id in _PURE
    return isinstance(function, ast.Attribute) and is_own_value(function.value, own)


def names_in(target: ast.AST) -> Iterator[str]:
    return (node.id for node in ast.walk(target) if isinstance(node, ast.Name))


def own_names(scope: Function | ast.Module, outer: Collection[str] = ()) -> set[str]:
    """The names of a function, or of a module, that are bound to own values only. `outer` are those around it."""
    bound: dict[str, list[ast.expr | None]] = defaultdict(list)  # None: to something else
    for node in _nodes_of(scope):
        _note_bindings(node, bound)
    if not isinstance(scope, ast.Module):
        _note_parameters(scope, bound)
    mutable = {name for name, values in bound.items() if any(map(_is_mutable, values))}
    own = set(bound) - (mutable & _shared_names(scope) if mutable else set())
    own |= set(outer) - set(bound)
    while True:
        kept = {
            name for name in own if all(value is not None and is_own_value(value, own) for value in bound.get(name, ()))
        }
        if kept == own:
            return own
        own = kept


def _nodes_of(scope: Function | ast.Module) -> Iterator[ast.AST]:
    """Of a module only what stands outside of functions and classes."""
    if not isinstance(scope, ast.Module):
        yield from (node for statement in scope.body for node in ast.walk(statement))
        return
    for statement in scope.body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)):
            yield from ast.walk(statement)


def _note_bindings(node: ast.AST, bound: dict[str, list[ast.expr | None]]) -> None:
    def bind(target: ast.AST, value: ast.expr | None) -> None:
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            pairs = list(zip(target.elts, value.elts, strict=True))
        for each, its in pairs:
            if isinstance(each, (ast.Name, ast.Tuple, ast.List, ast.Starred)):
                for name in names_in(each):
                    bound[name].append(its)

    match node:
        case ast.Assign():
            for target in node.targets:
                bind(target, node.value)
        case ast.AnnAssign() | ast.AugAssign() | ast.NamedExpr():
            bind(node.target, node.value)
        case ast.For() | ast.comprehension():
            bind(node.target, _one_of(node.iter))
        case ast.AsyncFor():
            bind(node.target, None)
        case ast.withitem(optional_vars=ast.AST() as target):
            bind(target, None)
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            bound[name].append(None)
        case ast.Nonlocal() | ast.Global():
            for name in node.names:
                bound[name].append(None)
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            bound[node.name].append(None)
        case ast.arg():
            bound[node.arg].append(None)


def _note_parameters(function: Function, bound: dict[str, list[ast.expr | None]]) -> None:
    """A parameter comes from elsewhere, unless its values are written down before the test."""
    written: dict[str, ast.expr] = {}
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("mark.parametrize"):
            match decorator.args:
                case [ast.Constant(value=str(names)), values, *_]:
                    written |= {name.strip(): values for name in names.split(",")}
                case [ast.Tuple(elts=names) | ast.List(elts=names), values, *_]:
                    written |= {str(name.value): values for name in names if isinstance(name, ast.Constant)}
    for node in ast.walk(function.args):
        if isinstance(node, ast.arg):
            its = written.get(node.arg)
            bound[node.arg].append(its and _one_of(its))


def _one_of(values: ast.expr) -> ast.expr:
    """As own, and as mutable, as one element of these is."""
    if isinstance(values, (ast.List, ast.Set)) and not any(_is_mutable(each) for each in values.elts):
        return ast.Tuple(values.elts)
    return values


def _is_mutable(value: ast.expr | None) -> bool:
    is_made = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in _MADE_MUTABLE
    return is_made or isinstance(value, _MUTABLE)


def _shared_names(scope: Function | ast.Module) -> set[str]:
    """Names that stand where their value may be changed, or handed to somebody."""
    shared = set()
    for parent in ast.walk(scope):
        for child in ast.iter_child_nodes(parent):
            if not isinstance(child, ast.Name):
                continue
            is_read = isinstance(parent, _READING)
            if isinstance(parent, ast.Call):
                is_read = isinstance(parent.func, ast.Name) and parent.func.id in _PURE
            if isinstance(parent, ast.Subscript):
                is_read = isinstance(parent.ctx, ast.Load)
            if isinstance(child.ctx, ast.Load) and not is_read:
                shared.add(child.id)
    return shared
