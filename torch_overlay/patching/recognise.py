"""Recognise whether a target is what a row was written for, by fingerprints of files and by comparing live objects.

A fingerprint is a hash of the definition's syntax tree without docstrings. White space, comments and documentation
don't change it; a default, an annotation or a decorator does. It is the same under every Python that can parse the
file. Nothing here knows torch.
"""

import ast
import contextlib
import functools
import hashlib
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from typing import Any

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# Wrappers that a decorator of the standard library puts around a function; torch's own lie in torch's folder.
STANDARD_WRAPPERS = (contextlib.__file__, functools.__file__)


class Source:
    """A module's file, read once for all rows that name it. It is parsed and compiled only when that is needed."""

    def __init__(self, name: str, path: str | None):
        self.name = name
        self.path = path

    @functools.cached_property
    def text(self) -> bytes | None:
        """The source text; None if the module has no file, or one that is no source or can't be read."""
        if self.path is None or not self.path.endswith(".py"):
            return None
        try:
            with open(self.path, "rb") as file:
                return file.read()
        except OSError:
            return None

    @functools.cached_property
    def digest(self) -> str | None:
        """Hash of the whole file; None if there is no source. If it is a known one, the file needn't be parsed."""
        return None if self.text is None else hashlib.sha256(self.text).hexdigest()[:32]

    @functools.cached_property
    def tree(self) -> ast.Module | None:
        """The syntax tree; None if there is no source, or if this Python can't parse it."""
        try:
            return None if self.text is None else ast.parse(self.text)
        except SyntaxError:
            return None

    @functools.cached_property
    def code(self) -> types.CodeType | None:
        """What the module's loader would run; None without a source, or if this Python can't compile it."""
        if self.text is None or self.path is None:
            return None
        try:
            return importlib.machinery.SourceFileLoader(self.name, self.path).get_code(self.name)
        except (ImportError, SyntaxError):
            return None

    def fingerprint(self, qualname: str) -> str | None:
        """Hash of all definitions of this name in the file (a property has several). None if there is none."""
        nodes = None if self.tree is None else list(definitions(self.tree, qualname))
        if not nodes:
            return None
        return hashlib.sha256("\n".join(map(dump, nodes)).encode()).hexdigest()[:32]

    def codes(self, qualname: str) -> list[types.CodeType]:
        """The compiled functions of this name in the file: several of a property or an overloaded function."""
        found = [] if self.code is None else [self.code]
        for name in qualname.split("."):
            found = [c for code in found for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == name]
        return found


def source_of(name: str) -> Source:
    """Return the source of a module, imported or not; it isn't imported here. Its `text` is None if there is no
    file."""
    if name in sys.modules:
        return Source(name, getattr(sys.modules[name], "__file__", None))
    parent, _, _ = name.rpartition(".")
    path: Any = None
    if parent:
        # Not importlib.util.find_spec, which would import the parent package.
        package = sys.modules.get(parent)
        path = getattr(package, "__path__", None) if package else _spec_path(parent)
        if path is None:
            return Source(name, None)
    spec = importlib.machinery.PathFinder.find_spec(name, path)
    return Source(name, spec.origin if spec else None)


def _spec_path(name: str) -> Any:
    """Where a package keeps its modules, without importing it. None if it isn't found or is no package."""
    parent, _, _ = name.rpartition(".")
    if name in sys.modules:
        return getattr(sys.modules[name], "__path__", None)
    path = _spec_path(parent) if parent else None
    if parent and path is None:
        return None
    spec = importlib.machinery.PathFinder.find_spec(name, path)
    return spec.submodule_search_locations if spec else None


def definitions(tree: ast.AST, qualname: str) -> Iterator[ast.AST]:
    """The functions, classes and assignments that bind this name, also inside ``if`` and ``try``."""
    first, _, rest = qualname.partition(".")
    for node in _statements(tree):
        if isinstance(node, DEFINITIONS):
            if node.name == first and not rest:
                yield node
            elif node.name == first and isinstance(node, ast.ClassDef):
                yield from definitions(node, rest)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and not rest:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == first for target in targets):
                yield node


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements of a block and of the blocks in it that share its scope."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.ExceptHandler)):
            yield child
            if not isinstance(child, DEFINITIONS):
                yield from _statements(child)


def dump(node: Any) -> str:
    """The tree as text that is the same under every Python version: no positions, empty fields or docstrings."""
    if isinstance(node, list):
        return f"[{','.join(map(dump, node))}]"
    if not isinstance(node, ast.AST):
        return f"{type(node).__name__}:{node!r}"
    fields = dict(ast.iter_fields(node))
    # Docstrings are taken out, so that a release which only rewords one is recognised.
    if isinstance(node, (*DEFINITIONS, ast.Module)) and ast.get_docstring(node, clean=False) is not None:
        fields["body"] = fields["body"][1:]
    # A Python that is newer gives nodes more fields, such as `type_params` in 3.12; those that are empty don't count.
    skipped = ("ctx", "kind", "type_comment")
    kept = [f"{k}={dump(v)}" for k, v in sorted(fields.items()) if k not in skipped and v is not None and v != []]
    if isinstance(node, ast.Constant) and node.value is None:
        kept = ["None"]  # else the constant would be left out as a field that isn't there
    return f"{type(node).__name__}({','.join(kept)})"


def stranger(source: Source, qualname: str, value: Any) -> str | None:
    """Describe a live value that isn't what its module's file defines; None if it is.

    Functions are compared by their code, inside wrappers of the standard library or of the module's own package. A
    callable without Python code is a stranger. Any other value passes, a class or a constant say: nothing tells it
    apart.
    """
    expected = source.codes(qualname)
    home = _package_folder(source.name)
    for function in _functions(value, home):
        code = getattr(function, "__code__", None)
        if code is None or code not in expected:
            return describe(function)
    return None


def _package_folder(name: str) -> str:
    """The first folder of the module's top-level package; "/nowhere" if there is none."""
    package = sys.modules.get(name.partition(".")[0])
    return next(iter(getattr(package, "__path__", None) or ["/nowhere"]))


def _functions(value: Any, home: str) -> Iterator[Any]:
    """The innermost functions of a raw attribute: a property's accessors, none of a class. Wrappers from elsewhere than
    the package and the standard library count as the function."""
    if isinstance(value, (staticmethod, classmethod)):
        yield from _functions(value.__func__, home)
    elif isinstance(value, property):
        for accessor in filter(None, (value.fget, value.fset, value.fdel)):
            yield from _functions(accessor, home)
    elif callable(value) and not isinstance(value, type):
        inner = getattr(value, "__wrapped__", None)
        code = getattr(value, "__code__", None)
        file = code.co_filename if code else ""
        trusted = code is None or file in STANDARD_WRAPPERS or file.startswith(home)
        if callable(inner) and trusted:
            yield from _functions(inner, home)
        else:
            yield value


def describe(value: Any) -> str:
    """Where a value comes from: its name, file and line, or its type.

    >>> describe(3)
    'the int 3'
    """
    function = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
    code = getattr(function, "__code__", None)
    if code is not None:
        name = f"{getattr(function, '__module__', None)}.{getattr(function, '__qualname__', code.co_name)}"
        return f"{name} ({code.co_filename}:{code.co_firstlineno})"
    text = repr(value)
    return f"the {type(value).__name__} {text if len(text) < 80 else text[:77] + '...'}"
