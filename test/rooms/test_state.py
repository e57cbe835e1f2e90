"""docs/developers/state.md lists the mutable state of the package: the list against the code."""

import re

import pytest

import house
import state

PAGE = (house.ROOT / "docs" / "developers" / "state.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([^`]+)` \|(.*)\|$", PAGE, re.MULTILINE)


def test_the_page_lists_what_the_code_has():
    listed = {name for name, _ in ROWS}
    missing, gone = state.of_package() - listed, listed - state.of_package()
    assert not missing, f"docs/developers/state.md needs a row, with a bound and who clears it, for {sorted(missing)}"
    assert not gone, f"docs/developers/state.md lists what isn't there any more: {sorted(gone)}"
    assert len(ROWS) == len(listed), "a name stands there twice"


@pytest.mark.parametrize("name, rest", ROWS, ids=[name for name, _ in ROWS])
def test_a_row_says_what_it_holds_its_bound_and_who_clears_it(name, rest):
    cells = [cell.strip() for cell in rest.split("|")]
    assert len(cells) == 3 and all(cells)


STATE = [
    "x = {}",
    "x: list[int] = []",
    "x = [n for n in range(3)]",
    "x = A if B else {}",
    "x = (1, [])",
    "if A:\n    x = set()",
    "try:\n    x = 1\nexcept E:\n    x = dict()",
    "x = Counter()",
    "X = collections.defaultdict(list)",
    "X = weakref.WeakSet()",
    "X = ContextVar('x')",
    "X = threading.local()",
    "X = itertools.count()",
    "X = Ours()\nclass Ours: pass",
    "@functools.cache\ndef x(): pass",
    "@lru_cache(maxsize=3)\ndef x(): pass",
    "x = 1\ndef f():\n    global x\n    x = 2",
    "X = {}\ndef f():\n    X['a'] = 1",
    "X = []\ndef f():\n    X.append(1)",
    "X = {1}\nX |= {2}",
    "X = {}\ndef f():\n    del X[1]",
]
CONSTANT = [
    "X = {1: 2}",
    "_X: dict[int, int] = {1: 2} | {3: 4}",
    "x = (1, 'a', frozenset([1]))",
    "x = MappingProxyType({})",
    "x = tuple[int, ...]",
    "x = Y.attribute",
    "x = logging.getLogger(__name__)",
    "X = re.compile('x')",
    "__all__ = ['x']",
    "x = Ours()\n@dataclass(frozen=True)\nclass Ours: pass",
    "x = Ours()\nclass Ours(NamedTuple): pass",
    "x = (make(),)\ndef make() -> Ours: pass\nclass Ours(NamedTuple): pass",
    "@dataclass\nclass C:\n    x: list = field(default_factory=list)",
    "class C:\n    @cached_property\n    def x(self): pass",
    "def f():\n    x = {}",
]
NAME = "torch_overlay/distributed/room.py"


@pytest.mark.parametrize("text", STATE)
def test_state_is_found(text):
    found = state.found((house.of(text, NAME),))
    assert {name.lower() for name in found} == {"distributed.room:x"}


@pytest.mark.parametrize("text", CONSTANT)
def test_a_constant_is_none(text):
    assert not state.found((house.of(text, NAME),))


def test_state_of_a_class_is_found():
    text = "class C:\n    x = {}\n    @cache\n    def y(): pass\n    LIMITS = {1: 2}"
    assert state.found((house.of(text, NAME),)) == {"distributed.room:C.x", "distributed.room:C.y"}


def test_what_another_module_changes_is_found():
    room = house.of("X = {}\ny = 1", NAME)
    setter = house.of("from .distributed import room\nroom.y = 2", "torch_overlay/setter.py")
    changer = house.of("from .distributed.room import X\nX.clear()", "torch_overlay/changer.py")
    assert state.found((room,)) == set()
    assert state.found((room, setter)) == {"distributed.room:y"}
    assert state.found((room, changer)) == {"distributed.room:X"}


def test_caches_of_a_universe_are_found_by_name():
    text = '@dataclass\nclass Remembered:\n    """Doc."""\n    plans: dict = field()\n    specs: dict = field()'
    assert state.remembered((house.of(text, NAME),)) == {"plans", "specs"}


@pytest.mark.parametrize(
    "text",
    [
        "mesh.__dict__['_x'] = 1",
        "held['_x']",
        "del held['_x']",
        "mesh.__dict__.get('_x')",
        "held.pop('_x', None)",
        "held.setdefault('_x', {})",
        "'_x' not in mesh.__dict__",
    ],
)
def test_what_a_mesh_holds_is_found_by_its_keys(text):
    assert state.on_meshes((house.of(text, NAME),)) == {"_x"}


@pytest.mark.parametrize(
    "text", ["held['_rank']", "held['x']", "held[name]", "rows['_x']", "mesh.__dict__.update(_x=1)"]
)
def test_what_torch_holds_of_a_mesh_is_no_state_of_ours(text):
    assert not state.on_meshes((house.of(text, NAME),))
