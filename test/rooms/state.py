"""Module-level mutable state, found in syntax trees: what outlives a call and isn't a constant.

A module or a class holds state where it binds

- what a call makes, unless FROZEN names the call, or it makes what a frozen class of the package is;
- a dict, list or set, unless the name is UPPER_CASE and nothing in the package changes what it names;
- a function with a cache;
- a name that a function rebinds by ``global``, or that another module of the package sets from outside.

Fields of dataclasses belong to their objects; so do cached properties. What the package puts into a mesh, which is
torch's object, is found by its keys.
"""

import ast
import functools

import house

# Calls that make what nobody changes: by the last name of what is called.
FROZEN = {
    "ContextDecorator",
    "MappingProxyType",
    "TypeVar",
    "compile",
    "frozenset",
    "hasattr",
    "original",
    "object",
    "str",
}
FROZEN |= {
    "tuple",
    "type",
    "Adopting",
    "OfTheRank",
    "StashKey",
    "property",
    "getLogger",
}  # loggers are those of `logging`
CACHES = ("lru_cache", "cache")
DISPLAYS = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
CHANGES = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}
CHANGES |= {"difference_update", "intersection_update", "move_to_end", "sort", "reverse"}

# What torch's meshes hold, on some release.
OF_TORCH = {"_coordinate_on_dim", "_device_type", "_dim_group_names", "_flatten_mapping", "_flatten_mesh_list", "_hash"}
OF_TORCH |= {"_flatten_rank_map", "_layout", "_mesh_dim_names", "_pg_registry", "_rank", "_rank_map", "_root_mesh"}
OF_TORCH |= {"_thread_id"}


def found(sources: tuple[house.Source, ...]) -> set[str]:
    """The state of these files, as ``module:name``, the module without the package's name."""
    frozen = FROZEN | {name for source in sources for name in _frozen_classes(source.tree)}
    frozen |= {name for source in sources for name in _makers(source.tree, frozen)}
    changed = {name for source in sources for name in _changed(source.tree)}
    names = set()
    for source in sources:
        held = {name for name, value in _bindings(source.tree) if _is_state(name, value, frozen, changed)}
        held |= _cached(source.tree) | _rebound(source.tree)
        names |= {f"{_short(source.module)}:{name}" for name in held}
        names |= _set_from_outside(source, {other.module for other in sources})
    return names


def remembered(sources: tuple[house.Source, ...]) -> set[str]:
    """The fields of `Remembered`: the caches of a universe."""
    classes = [node for source in sources for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)]
    fields = [node for found in classes if found.name == "Remembered" for node in found.body]
    return {node.target.id for node in fields if isinstance(node, ast.AnnAssign)}


def on_meshes(sources: tuple[house.Source, ...]) -> set[str]:
    """The private keys of a mesh's ``__dict__``, by that name or as ``held``, that torch's meshes don't have."""
    asked = [key for source in sources for node in ast.walk(source.tree) for key in _keys(node)]
    names = {key.value for key in asked if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    return {name for name in names if name.startswith("_")} - OF_TORCH


def _keys(node: ast.AST) -> list[ast.expr]:
    """What a node asks of a mesh's ``__dict__``: by an index, by ``in`` or by a method."""
    match node:
        case ast.Subscript(value=held, slice=key) | ast.Compare(left=key, comparators=[held]):
            pass
        case ast.Call(func=ast.Attribute(value=held, attr="get" | "pop" | "setdefault"), args=[key, *_]):
            pass
        case _:
            return []
    of_mesh = isinstance(held, ast.Attribute) and held.attr == "__dict__"
    return [key] if of_mesh or (isinstance(held, ast.Name) and held.id == "held") else []


def _short(module: str) -> str:
    return module.removeprefix(house.PACKAGE).removeprefix(".") or "__init__"


def _last(node: ast.AST) -> str:
    """``b`` of ``a.b``, of ``b``, of ``b[c]`` and of ``b(c)``; empty for what has no name."""
    if isinstance(node, ast.Call):
        return _last(node.func)
    if isinstance(node, ast.Subscript):
        return _last(node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _scopes(tree: ast.Module):
    """The statements that run when a module is imported: its own, those under conditions, those of its classes."""
    waiting = [("", False, list(tree.body))]
    while waiting:
        prefix, fields, body = waiting.pop()
        for node in body:
            if isinstance(node, ast.ClassDef):
                dataclass = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
                waiting.append((f"{prefix}{node.name}.", dataclass, node.body))
            elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                parts = [getattr(node, part, []) for part in ("body", "orelse", "finalbody", "handlers")]
                waiting.append((prefix, fields, [inner for part in parts if isinstance(part, list) for inner in part]))
            yield prefix, fields, node


def _bindings(tree: ast.Module):
    """Each name that a module or a class binds, with the value; fields of dataclasses are left out."""
    for prefix, fields, node in _scopes(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, (ast.AnnAssign, ast.AugAssign)) and node.value is not None and not fields:
            targets = [node.target]
        yield from ((prefix + target.id, node.value) for target in targets if isinstance(target, ast.Name))


def _is_state(name: str, value: ast.AST, frozen: set[str], changed: set[str]) -> bool:
    last = name.rpartition(".")[2]
    if last.startswith("__"):
        return False
    if isinstance(value, ast.IfExp):
        return any(_is_state(name, part, frozen, changed) for part in (value.body, value.orelse))
    if isinstance(value, (ast.BinOp, ast.BoolOp)):
        parts = value.values if isinstance(value, ast.BoolOp) else (value.left, value.right)
        return any(_is_state(name, part, frozen, changed) for part in parts)
    if isinstance(value, ast.Tuple):
        return any(_is_state(name, part, frozen, changed) for part in value.elts)
    if isinstance(value, ast.Call):
        return _last(value) not in frozen
    return isinstance(value, DISPLAYS) and (not last.isupper() or last in changed)


def _frozen_classes(tree: ast.Module):
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = {_last(base) for base in node.bases}
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            if bases & {"NamedTuple", "Enum"} or any("frozen=True" in text for text in decorators):
                yield node.name


def _makers(tree: ast.Module, frozen: set[str]):
    """The functions that say that they return one of these classes."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.returns is not None]
    yield from (node.name for node in functions if _last(node.returns) in frozen - FROZEN)


def _changed(tree: ast.Module):
    """The names of what some code changes: by a method, by an item, or in place."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            yield _last(node.func.value)
        targets = getattr(node, "targets", []) if isinstance(node, (ast.Assign, ast.Delete)) else []
        targets = [node.target] if isinstance(node, (ast.AugAssign, ast.AnnAssign)) else targets
        for target in targets:
            if isinstance(target, ast.Subscript) or isinstance(node, ast.AugAssign):
                yield _last(target)


def _cached(tree: ast.Module) -> set[str]:
    functions = [(prefix, node) for prefix, _, node in _scopes(tree) if isinstance(node, ast.FunctionDef)]
    return {prefix + node.name for prefix, node in functions if any(map(_is_cache, node.decorator_list))}


def _is_cache(decorator: ast.AST) -> bool:
    return _last(decorator) in CACHES


def _rebound(tree: ast.Module) -> set[str]:
    return {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}


def _set_from_outside(source: house.Source, modules: set[str]) -> set[str]:
    """What a file sets on another module of the package: ``module.name = value``."""
    ours = {i.name.rpartition(".")[2]: i.name for i in source.imports() if i.name in modules}
    targets = [t for node in ast.walk(source.tree) if isinstance(node, ast.Assign) for t in node.targets]
    targets = [t for t in targets if isinstance(t, ast.Attribute) and isinstance(t.value, ast.Name)]
    return {f"{_short(ours[t.value.id])}:{t.attr}" for t in targets if t.value.id in ours}


@functools.cache
def of_package() -> frozenset[str]:
    """The state of the package as it is."""
    sources = house.sources(house.PACKAGE)
    caches = {f"SharedState.remembered.{key}" for key in remembered(sources)}
    return frozenset(found(sources) | caches | {f"DeviceMesh.{key}" for key in on_meshes(sources)})
