"""docs/troubleshooting.md quotes the messages that the code has, and has a row for each of enable, run and meshes."""

import ast
import re

import pytest

import house

PAGE = (house.ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
GAP = "…"  # on the page: a value that the message fills in
ROWS = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)
SOURCES = house.sources(house.PACKAGE)

# Raised for our own mistakes, or caught before a user sees them.
INTERNAL = {"AssertionError", "PatchError", "AttributeError", "LookupError", "NotPlanned", "ModuleNotFoundError"}
INTERNAL |= {"UnknownFlag"}
# Whose errors need a row: what turns the overlay on and off, and the rooms of meshes and groups. The algebra speaks to
# whoever calls it; the planner's errors become reasons in status(); tools and ParallelDims name the argument at fault.
ROOMS = ("choices", "overlay", "commands/run", "transfer", "versions")
FOLDERS = tuple(f"{house.PACKAGE}/{folder}" for folder in ("patching", "compat", "transfers"))
FILES = tuple(f"{house.PACKAGE}/{room}.py" for room in ROOMS)
# What has no words of its own: the verdict before it has a row.
FRAMES = {"… This rank, …, …s …."}


def text_of(node: ast.AST) -> str:
    """A string as the page would quote it, with a gap for each value; empty for what is no string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or GAP for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return "".join(text_of(part) or GAP for part in (node.left, node.right))
    return ""


def raised(source: house.Source) -> list[str]:
    """The literal messages of the errors that a file raises, apart from internal ones."""
    found = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            text = "".join(map(text_of, node.exc.args))
            if text and getattr(node.exc.func, "id", "") not in INTERNAL:
                found.append(text)
    return found


def needs_rows(source: house.Source) -> bool:
    folder, _, name = source.name.rpartition("/")
    if folder in FOLDERS:
        return True
    return source.name in FILES or (folder == f"{house.PACKAGE}/distributed" and name != "_mesh_layout.py")


def quotes(row: str, text: str) -> bool:
    """Whether the row's words stand in the text, in this order; its gaps are for anything."""
    return re.search(".*?".join(map(re.escape, row.split(GAP))), text, re.DOTALL) is not None


STRINGS = {text for source in SOURCES for node in ast.walk(source.tree) if (text := text_of(node))}
MESSAGES = sorted({text for source in SOURCES if needs_rows(source) for text in raised(source)} - FRAMES)


@pytest.mark.parametrize("row", ROWS)
def test_a_row_quotes_the_source(row):
    assert any(quotes(row, text) for text in STRINGS), "no such message in torch_overlay any more: mend the row"


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_has_a_row(message):
    rows = [row for row in ROWS if len(row.replace(GAP, "").strip()) > 10]
    assert any(quotes(row, message) for row in rows), "docs/troubleshooting.md has no row that says what to do"


def test_the_files_that_need_rows_are_there():
    assert set(FILES) <= {source.name for source in SOURCES}
    assert len(MESSAGES) > 40


def test_each_message_stands_once():
    assert len(ROWS) == len(set(ROWS))


def test_gaps_stand_for_values_and_words_for_themselves():
    assert quotes("needs … ranks, got …", "A mesh needs … ranks, got …")
    assert not quotes("needs … ranks, got …", "got … ranks, needs …")
    raises = house.of("raise ValueError(f'no {x!r}' + y)\nraise AssertionError('ours')")
    assert raised(raises) == ["no ……"]
