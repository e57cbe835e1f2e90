"""Who may import whom, read from the syntax trees of the package."""

import ast
import graphlib
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[2]
HOUSE, UPSTREAM, ENGINE = "torch_overlay", "torch_overlay.distributed", "torch_overlay.patching"
# These know no torch: plain ints and tuples, tested in milliseconds (test/pure).
PURE = [f"{UPSTREAM}.{room}" for room in ("_mesh_layout", "_mesh.rank_map", "_mesh.text", "tensor._planner")]
PURE += ["torch_overlay.transfers._planner"]


def module_of(path: pathlib.Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in sorted((ROOT / HOUSE).rglob("*.py"))}


def under(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def imports(module: str) -> list[tuple[str, bool]]:
    """Every imported name in full, in functions too, and whether the import is relative."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, False) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            home = [*parts[: len(parts) - node.level + 1]] if node.level else []
            home += [node.module] if node.module else []
            found += [(".".join([*home, alias.name]), node.level > 0) for alias in node.names]
    return found


def is_standard(name: str) -> bool:
    return name.partition(".")[0] in sys.stdlib_module_names


def allowed(module: str, name: str, relative: bool) -> bool:
    if under(name, "tools", "test", "twins", "setup", "noxfile", "conftest"):
        return False  # these stay in the checkout
    if under(module, *PURE):
        return under(name, *PURE) if relative else is_standard(name)
    if under(module, ENGINE):  # is told what to patch, so it serves any library
        return under(name, ENGINE) if relative else is_standard(name)
    if under(module, UPSTREAM) and module != UPSTREAM:  # upstream there is no torch_overlay
        if (module, name) == (f"{UPSTREAM}._torch", "torch_overlay.versions.running"):
            return True  # the seam stays behind, and asks which release runs
        return under(name, UPSTREAM) if relative else not under(name, HOUSE)
    return True


def test_files_import_what_their_rooms_may():
    wrong = [(module, name) for module in MODULES for name, how in imports(module) if not allowed(module, name, how)]
    assert len(MODULES) > 50 and not wrong


def test_what_goes_upstream_asks_for_no_release():
    """Upstream has one release, so such a question would land there as dead code. The seam and the switches stay."""
    asks = re.compile(r"\bRELEASE\b|__version__|TorchVersion|except ImportError|__annotations__|hasattr\(torch")
    asking = {name for name, path in MODULES.items() if under(name, UPSTREAM) and asks.search(path.read_text("utf-8"))}
    assert asking == {f"{UPSTREAM}._torch", f"{UPSTREAM}.config"}


def test_no_circle_of_imports():
    """Also by imports for types alone, and within functions. Packages aren't counted: their modules import them."""
    of = {name: {part for each, _ in imports(name) for part in (each, each.rpartition(".")[0])} for name in MODULES}
    files = {name for name, path in MODULES.items() if path.name != "__init__.py"}
    graph = {name: (of[name] & files) - {name} for name in files}
    assert sum(map(len, graph.values())) > 300
    assert [*graphlib.TopologicalSorter(graph).static_order()]  # CycleError names the circle
