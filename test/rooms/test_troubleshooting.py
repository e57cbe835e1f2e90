"""docs/troubleshooting.md quotes messages as the code has them."""

import ast
import re

import pytest

import house

PAGE = (house.ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
GAP = "…"  # on the page: a value that the message fills in
ROWS = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)
SOURCES = house.sources(house.PACKAGE)


def text_of(node: ast.AST) -> str:
    """A string as the page would quote it, with a gap for each value; empty for what is no string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or GAP for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return "".join(text_of(part) or GAP for part in (node.left, node.right))
    return ""


def quotes(row: str, text: str) -> bool:
    """Whether the row's words stand in the text, in this order; its gaps are for anything."""
    return re.search(".*?".join(map(re.escape, row.split(GAP))), text, re.DOTALL) is not None


STRINGS = {text for source in SOURCES for node in ast.walk(source.tree) if (text := text_of(node))}


@pytest.mark.parametrize("row", ROWS)
def test_a_row_quotes_the_source(row):
    assert any(quotes(row, text) for text in STRINGS), "no such message in torch_overlay any more: mend the row"


def test_each_message_stands_once():
    assert len(ROWS) == len(set(ROWS))


def test_gaps_stand_for_values_and_words_for_themselves():
    assert quotes("needs … ranks, got …", "A mesh needs … ranks, got …")
    assert not quotes("needs … ranks, got …", "got … ranks, needs …")
