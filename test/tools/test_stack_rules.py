"""What upstream's reviewers ask: each rule refuses a planted breach by file and line, and what is owed is a list."""

import ast
import dataclasses

import pytest

import stack_trees  # noqa: F401  puts tools/ on the path

# isort: split
from stack.message import PatchMessage, StackError, read_message, read_series
from stack.wrap import wrapped

from stack import rules

FILE, TEST = "torch/distributed/_mesh_views.py", "test/distributed/test_mesh_views.py"
BEFORE = "import torch\n\n\ndef there():\n    return torch\n"


SOUND = PatchMessage("views", "mesh", "[DeviceMesh] Views", (), (), (), (), "**Why.** Because.\n", line=4)


def says(body="fine\n", title="[DeviceMesh] V"):
    return dataclasses.replace(SOUND, title=title, body=body)


def found(added="", test="", message=SOUND, path=FILE, new=()):
    """What the rules find in a patch that adds these lines to a file, and what nothing uses if it is all there is."""
    before = {path: BEFORE, TEST: None}
    after = {path: BEFORE + added, TEST: test or None}
    return [*rules.breaches(message, before, after, new), *rules.unused(before, after)]


@pytest.mark.parametrize(
    ("added", "line", "rule"),
    [
        ("x = torch.__version__\nthere(x)\n", 6, "releases"),
        ("there(hasattr(torch, 'compiler'))\n", 6, "releases"),
        ("there()\nthere(getattr(torch, 'accelerator', None))\n", 7, "releases"),
        ("there('_layout' in torch.Tensor.__annotations__)\n", 6, "releases"),
        ("try:\n    there()\nexcept ImportError:\n    pass\n", 8, "releases"),
        ("# what torch's own code does\n", 6, "words"),
        ("there()  # as stock does\n", 6, "words"),
        ("there(NotOurs)\n", 6, "words"),
        ("# The room imports nothing\n", 6, "words"),
        ("there()  # where torch pads\n", 6, "words"),
        ("there()  # Torch's steps\n", 6, "words"),
        ("\n\ndef _alone():\n    return _alone()\n", 8, "unused"),
        ("\n\nclass There:\n    def _alone(self):\n        pass\n\n\nthere(There)\n", 9, "unused"),
        ("_ALONE = 1\n", 6, "unused"),
        ("_alone = {}\n_alone['made'] = 1\n_alone['made'] += 1\n", 6, "unused"),
        ("_alone: dict = {}\n", 6, "unused"),
        ("_alone = set()\n_alone.add(1)\n", 6, "unused"),
        ("\n\nclass There:\n    alone: int = 0\n\n\nthere(There)\n", 9, "unused"),
        ("\n\nclass There:\n    def __init__(self):\n        self.alone = 0\n\n\nthere(There)\n", 10, "unused"),
        ("\n\nclass There:\n    alone: int = 0\n\n\nthere().alone += 1\nthere(There)\n", 9, "unused"),
        ("\n\ndef there():\n    return 2\n", 8, "twice"),
        ("if there():\n    pass\nelse:\n    import torch\n", 9, "twice"),
        ("from torch.distributed._late import x\nthere(x)\n", 6, "forward"),
        ("from torch.distributed import _late\nthere(_late)\n", 6, "forward"),
        ("from torch.distributed.tensor import x\nif not is_available():\n    there(x)\n", 6, "guard"),
        (f"there({'9' * 82})\n", 6, "width"),
    ],
)
def test_a_planted_breach_is_refused_by_file_and_line(added, line, rule):
    (breach,) = found(added, new={"torch/distributed/_late.py"})
    with pytest.raises(StackError, match=rf"The stack breaks upstream's rules:\n  {FILE}:{line}: {rule}: "):
        rules.refuse([breach])


def test_what_was_there_and_what_has_a_caller_is_no_breach():
    assert found() == []
    assert found("there(getattr(there(), 'name', None))\n") == [], "of an instance"
    before = {FILE: "# torch's own\n_alone = 1\n" + "#" * 100 + "\n"}
    assert rules.breaches(SOUND, before, {FILE: before[FILE] + "there = 1\nprint(there)\n"}, ()) == []
    assert [b.rule for b in found("\n\ndef listed():\n    pass\n")] == ["unused"]
    public = "\n\ndef listed():\n    pass\n"
    assert found(public, test="listed()\n") == [], "torch's users call it, and so does the test"
    assert [b.rule for b in found(public.replace("listed", "_listed"), test="_listed()\n")] == ["unused"]


def test_branches_bind_a_name_once_and_what_is_guarded_may_import_c10d():
    guarded = "if not is_available():\n    x = 1\nelse:\n    from torch.distributed.tensor import x\nthere(x)\n"
    assert found(guarded) == []
    typed = "if TYPE_CHECKING:\n    from collections.abc import y\nelse:\n    y = 1\nthere(y)\n"
    assert found(typed) == []


def test_torch_as_a_name_a_path_or_a_release_is_no_word():
    for line in (
        "import torch.fx",
        "    from torch import fx",
        "torch.ones(1)",
        "there('torch')",
        "# torch/distributed",
    ):
        assert found(f"{line}\n") == [], line
    for line in ("Measured with torch 2.13.0", "see `torch` and torch.ones", "uses_torchcomms", "Torch 2.13.0, fake"):
        assert found(message=says(f"{line}\n")) == [], line


@pytest.mark.parametrize(
    ("message", "line", "rule"),
    [
        (says("fine\n" + "a b " * 20 + "\n"), 5, "message"),
        (says(title="[DeviceMesh] " + "V" * 60), 1, "message"),
        (says("fine\nunlike stock\n"), 5, "words"),
    ],
)
def test_a_breach_in_the_message_is_refused_by_line(message, line, rule):
    (breach,) = found(message=message)
    assert str(breach).startswith(f"patches/views.md:{line}: {rule}: ")


def test_a_patch_has_as_many_lines_as_reviewers_take():
    """Its tests included."""
    long = "there()\n" * 1001
    (breach,) = found(long, test=long)
    assert str(breach) == "patches/views.md:1: size: 2002 changed lines, at most 2000"
    assert found(long, test=long[:-20]) == []


def test_an_import_and_a_place_in_all_are_no_use():
    text = "\n\ndef alone():\n    pass\n\n\n__all__ = ['alone']\n"
    assert [breach.why for breach in found(text)] == ["nothing uses alone"]


def test_the_head_of_a_message_is_read(tmp_path):
    (tmp_path / "series").write_text("# why\n[planner]\npatch\n")
    head = "Title: [DTensor] x\nFiles: tensor/_planner/plan.py\n  a.py\nModule: torch.x\n  f g\nTests: t.py=u.py\n"
    (tmp_path / "patch.md").write_text(f"{head}\nbody\n")
    (message,) = read_series(tmp_path)
    assert (message.files, message.rows) == (("tensor/_planner/plan.py", "a.py"), ("torch.x:f", "torch.x:g"))
    assert (message.tests, message.stack, message.line) == (("t.py=u.py",), "planner", 8)
    (tmp_path / "patch.md").write_text("  x\n\nbody\n")
    with pytest.raises(StackError, match=r"patch\.md:1: needs one of 'Title:'"):
        read_message(tmp_path / "patch.md")


WIDE = '''"""A module of which the first line says more than eighty-eight columns can hold, and goes on.

It goes on.
"""


def function(value):
    """Takes a value.

    Args:
        value: what is taken, told at such a length that the line must be broken somewhere near
            its end.
        other: short.

    >>> function("an example stays as it is, however long it may be, since breaking it breaks it")  # here
    """
    # A comment that is too long for its line goes on in the next line, and a second sentence follows
    # it there.
    value = value + 1  # a comment behind code that makes its line too long moves to a line of its own
    raise ValueError(
        f"a message about {value} and {value + 1} that is longer than a line may be, in one literal {value}"
    )
'''


def test_long_lines_of_ours_are_wrapped_and_mean_the_same():
    after = wrapped(WIDE, ())
    long = [line for line in after.splitlines() if len(line) > rules.WIDTH]
    example, literals = long  # the formatter parts the literals
    assert ">>>" in example and literals.endswith('longer than a line may be, " f"in one literal {value}"')
    assert "\n            somewhere near its end.\n        other: short.\n" in after
    assert "\n    # sentence follows it there.\n    # a comment behind code that makes" in after
    assert "\n    value = value + 1\n" in after
    ours, theirs = (ast.parse(text) for text in (WIDE, after))
    for tree in (ours, theirs):
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.FunctionDef)):
                node.body[0].value.value = " ".join(node.body[0].value.value.split())
    assert ast.dump(ours) == ast.dump(theirs)
    assert wrapped(WIDE, WIDE.splitlines()) == WIDE, "lines that torch has already"
