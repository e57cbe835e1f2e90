"""Who may import whom (DESIGN 3): each rule goes from a file to the lines that break it, tried on such a file."""

import ast
import subprocess
import sys

import networkx  # torch needs it
import pytest

import house

PACKAGE = house.sources("torch_overlay")
UPSTREAM = "torch_overlay.distributed"
# Of the rooms for meshes and groups, those that know no torch: plain ints and tuples, tested in milliseconds.
PURE = {f"{UPSTREAM}.{room}" for room in ("_mesh_layout", "_mesh.rank_map", "_groups.names")}
PLANNER = f"{UPSTREAM}.tensor._planner"  # pure, the whole folder; what lies beside it asks torch
TRANSFERS = "torch_overlay.transfers._planner"  # pure as well
# The engine is told what to patch and what is recognised, so it serves any library; its tests need no torch.
ENGINE = "torch_overlay.patching"


def is_pure(module: str) -> bool:
    """Whether a module of the upstream folder is one of those that know no torch."""
    return module in PURE or not {PLANNER, TRANSFERS}.isdisjoint((module.rpartition(".")[0], module))


def lines(source, wrong):
    return [f"{source.name}:{i.line}: {i.name}" for i in source.imports() if wrong(i)]


def beyond_pure(source):
    """A pure room imports the standard library and, by a relative import, other pure rooms."""

    def wrong(i):
        home = i.name.rpartition(".")[0]
        if i.relative:
            return not (is_pure(i.name) or is_pure(home))
        return i.name.partition(".")[0] not in sys.stdlib_module_names

    return lines(source, wrong) if is_pure(source.module) else []


def out_of_upstream(source):
    """What goes upstream names itself by relative imports, and nothing of the house outside its folder. The seam stays
    behind, and asks which release runs."""
    inside = house.Import(source.module, 0, False, True).under(UPSTREAM)
    may = {"torch_overlay.versions.running"} if source.module == f"{UPSTREAM}._torch" else set()
    wrong = lambda i: i.under(house.PACKAGE) and not (i.relative and i.under(UPSTREAM)) and i.name not in may
    return lines(source, wrong) if inside else []


def tools_or_tests(source):
    """Nothing in the package needs what stays in the checkout."""
    return lines(source, lambda i: i.under("tools", "test", "twins", "setup", "noxfile", "conftest"))


def torch_too_soon(source):
    """The face, the command line and the table cost nothing to import: no torch until they are asked to act."""
    early = ["torch_overlay", "torch_overlay.__main__", "torch_overlay.errors", "torch_overlay.series"]
    return lines(source, lambda i: i.at_import and i.under("torch")) if source.module in early else []


def beyond_engine(source):
    """The engine knows no torch and no other room: it imports the standard library and, relatively, itself."""

    def wrong(i):
        return not i.under(ENGINE) if i.relative else i.name.partition(".")[0] not in sys.stdlib_module_names

    return lines(source, wrong) if source.module == ENGINE or source.module.startswith(ENGINE + ".") else []


def release_asked_elsewhere(source):
    """Only versions.py looks at torch's release; everybody else asks it, or has a row in the series."""
    if source.module == "torch_overlay.versions":
        return []
    wrong = lines(source, lambda i: i.under("torch.__version__", "torch.version", "torch.torch_version"))
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.__version__", "torch.version"):
            wrong.append(f"{source.name}:{node.lineno}: {ast.unparse(node)}")
    return wrong


def torch_asked_what_it_has(source):
    """A body that goes upstream asks no module or class what it has: what differs is a row, or in compat.py."""
    stays = source.module == f"{UPSTREAM}.config"  # stands in for torch's module of this name
    if stays or not house.Import(source.module, 0, False, True).under(UPSTREAM):
        return []
    bound = {name.rpartition(".")[2] for name in (i.name for i in source.imports())}
    imported = [node for node in ast.walk(source.tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    bound |= {alias.asname for node in imported for alias in node.names if alias.asname}
    wrong = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            asks = node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) == 3)
            asks &= ast.unparse(node.args[0]).partition(".")[0] in bound | {"torch"}
        else:
            asks = isinstance(node, ast.Attribute) and node.attr == "__annotations__"
            asks |= isinstance(node, ast.ExceptHandler) and "ImportError" in ast.dump(node)
        wrong += [f"{source.name}:{node.lineno}: {ast.unparse(node)}"] if asks else []
    return wrong


RULES = [beyond_pure, out_of_upstream, tools_or_tests, torch_too_soon, beyond_engine, release_asked_elsewhere]
RULES += [torch_asked_what_it_has]

# What each rule must catch, and the nearest thing that it must let pass: (rule, file, text, how many lines break it).
TRIED = [
    (beyond_pure, "distributed/_mesh_layout.py", "import torch", 1),
    (beyond_pure, "distributed/_mesh_layout.py", "def f():\n  import numpy.linalg", 1),
    (beyond_pure, "distributed/_mesh_layout.py", "import math\nfrom collections.abc import Iterator", 0),
    (
        beyond_pure,
        "distributed/_mesh/rank_map.py",
        "from .._mesh_layout import _FlatLayout",
        0,
    ),
    (beyond_pure, "distributed/_mesh/rank_map.py", "from .state import SharedState", 1),
    (
        beyond_pure,
        "distributed/tensor/_planner/cost.py",
        "from .regions import Box\nfrom ..._mesh_layout import row_major",
        0,
    ),
    (beyond_pure, "distributed/tensor/_planner/cost.py", "from .._redistribute import run\nimport torch", 2),
    (beyond_pure, "distributed/tensor/_planner/new.py", "import torch", 1),
    (beyond_pure, "transfers/_planner/lines.py", "import torch\nfrom ..trees import leaves", 2),
    (beyond_pure, "transfers/_planner/lines.py", "from ...distributed.tensor._planner.regions import Box", 0),
    (beyond_pure, "distributed/device_mesh.py", "import torch", 0),
    (beyond_pure, "distributed/tensor/placement_types.py", "import torch", 0),
    (beyond_pure, "distributed/tensor/_new.py", "import torch", 0),
    (beyond_pure, "distributed/tensor/_planner/new.py", "from torch import Tensor", 1),
    (beyond_pure, "distributed/_process_groups_split.py", "import torch", 0),
    (out_of_upstream, "distributed/device_mesh.py", "from ..errors import OverlayError", 1),
    (
        out_of_upstream,
        "distributed/device_mesh.py",
        "from torch_overlay.distributed._mesh_layout import row_major",
        1,
    ),
    (out_of_upstream, "distributed/tensor/_redistribute.py", "from .. import device_mesh\nfrom ._plan import plan", 0),
    (out_of_upstream, "distributed/tensor/_redistribute.py", "def f():\n  from ... import options", 1),
    (out_of_upstream, "parallel_dims.py", "from . import errors", 0),
    (out_of_upstream, "distributed/_torch.py", "from ..versions import running", 0),
    (out_of_upstream, "distributed/_torch.py", "from ..overlay import enable", 1),
    (tools_or_tests, "explain.py", "def f():\n  from tools.bench import main\n  import twins", 2),
    (tools_or_tests, "explain.py", "import testing, toolsmith", 0),
    (torch_too_soon, "__init__.py", "from torch.distributed import device_mesh", 1),
    (torch_too_soon, "__init__.py", "def enable():\n  import torch\nif TYPE_CHECKING:\n  import torch", 0),
    (beyond_engine, "patching/patch.py", "def f():\n  import torch", 1),
    (beyond_engine, "patching/engine.py", "from ..series import PATCHES\nfrom torch_overlay import errors", 2),
    (beyond_engine, "patching/__init__.py", "from .. import overlay", 1),
    (beyond_engine, "patching/engine.py", "import dis\nfrom . import recognise\nfrom .patch import Patch", 0),
    (beyond_engine, "patchings.py", "import torch", 0),
    (torch_asked_what_it_has, "distributed/_mesh_x.py", "from torch import cuda\nhasattr(cuda, 'x')", 1),
    (torch_asked_what_it_has, "distributed/_mesh_x.py", "import torch as t\ngetattr(t.cuda, 'x', None)", 1),
    (torch_asked_what_it_has, "distributed/_mesh_x.py", "from torch import M\n'x' in M.__annotations__", 1),
    (torch_asked_what_it_has, "distributed/_mesh_x.py", "try:\n  import torch.x\nexcept ImportError:\n  pass", 1),
    (torch_asked_what_it_has, "distributed/_mesh_x.py", "from torch import cuda\ngetattr(mesh, 'x', cuda)", 0),
    (torch_asked_what_it_has, "compat.py", "from torch import cuda\nhasattr(cuda, 'x')", 0),
    (release_asked_elsewhere, "series.py", "if torch.__version__ > '2.13': pass", 1),
    (release_asked_elsewhere, "series.py", "from torch.torch_version import TorchVersion", 1),
    (release_asked_elsewhere, "versions.py", "import torch\ntorch.__version__", 0),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule):
    assert PACKAGE, "the package has no files?"
    broken = [line for source in PACKAGE for line in rule(source)]
    assert not broken, "\n".join([rule.__doc__, *broken])


@pytest.mark.parametrize("rule, name, text, count", TRIED, ids=[f"{row[0].__name__}-{row[3]}" for row in TRIED])
def test_rule_catches(rule, name, text, count):
    assert len(rule(house.of(text, f"torch_overlay/{name}"))) == count


def circles(sources):
    """Files that import one another, in functions and for types too."""
    modules = {source.module for source in sources}
    arrows = networkx.DiGraph()
    for source in sources:
        named = {i.name if i.name in modules else i.name.rpartition(".")[0] for i in source.imports()}
        arrows.add_edges_from((source.module, name) for name in (named & modules) - {source.module})
    return [sorted(found) for found in networkx.strongly_connected_components(arrows) if len(found) > 1]


def test_only_files_of_one_folder_make_a_circle():
    assert not [found for found in circles(PACKAGE) if len({name.rpartition(".")[0] for name in found}) > 1]
    files = [
        ("distributed/one.py", "if TYPE_CHECKING:\n  from .two.y import y"),
        ("distributed/two/y.py", "from ..one import x"),
    ]
    assert circles([house.of(text, f"torch_overlay/{name}") for name, text in files]) == [
        ["torch_overlay.distributed.one", "torch_overlay.distributed.two.y"]
    ]


def test_too_many_dots_are_an_error():
    with pytest.raises(ValueError, match="3 dots climb out of the house"):
        house.of("from ... import x", "torch_overlay/patch.py").imports()


def test_importing_the_face_imports_no_torch():
    code = "import sys, torch_overlay; print([m for m in sys.modules if m.partition('.')[0] in ('torch', 'numpy')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=house.ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
