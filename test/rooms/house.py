"""The house as syntax trees: its files, what each imports, how long its functions are. Runs none of it."""

import ast
import dataclasses
import functools
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = "torch_overlay"


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported module: its name in full (``torch_overlay.errors`` for ``from . import errors``), where and how."""

    name: str
    line: int
    relative: bool
    at_import: bool  # runs when the file is imported: not inside a function, not under ``if TYPE_CHECKING``

    def under(self, *packages: str) -> bool:
        """Whether this is one of the packages or a module inside one."""
        return any(self.name == package or self.name.startswith(package + ".") for package in packages)


@dataclasses.dataclass(frozen=True)
class Source:
    """One Python file of the house."""

    path: pathlib.Path

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @property
    def module(self) -> str:
        """Its dotted name, of a package's ``__init__`` too."""
        return self.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def package(self) -> str:
        """What a single leading dot means in it."""
        return self.module if self.path.name == "__init__.py" else self.module.rpartition(".")[0]

    @functools.cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.name)

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    def functions(self) -> list[tuple[int, str, int]]:
        """(lines, name, first line) of every function, longest first; decorators don't count."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        found = [(n.end_lineno - n.lineno + 1, n.name, n.lineno) for n in ast.walk(self.tree) if isinstance(n, kinds)]
        return sorted(found, reverse=True)

    def imports(self) -> list[Import]:
        """Every import, in functions too; ``from x import y`` gives ``x.y``: a module or a name in ``x``."""
        return list(self._imports(self.tree, at_import=True))

    def _imports(self, node, at_import):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, False, at_import) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                home = self._home(child)
                yield from (Import(f"{home}.{a.name}", child.lineno, child.level > 0, at_import) for a in child.names)
            later = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or for_types_only(child)
            yield from self._imports(child, at_import and not later)

    def _home(self, node: ast.ImportFrom) -> str:
        """The module after ``from``, its dots resolved."""
        if not node.level:
            return node.module
        parts = self.package.split(".")
        if node.level > len(parts):
            raise ValueError(f"{self.name}:{node.lineno}: {node.level} dots climb out of the house")
        return ".".join(parts[: len(parts) - node.level + 1] + ([node.module] if node.module else []))


def for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


@functools.cache
def sources(room: str) -> tuple[Source, ...]:
    """The Python files under a folder of the house, in order of name."""
    return tuple(Source(path) for path in sorted((ROOT / room).rglob("*.py")))


def of(text: str, name: str = f"{PACKAGE}/distributed/x.py") -> Source:
    """A file that isn't there, for the tests of this file and to show that each rule catches what it forbids."""
    source = Source(ROOT / name)
    source.__dict__["text"] = text
    return source
