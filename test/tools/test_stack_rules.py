"""What upstream's reviewers ask: each rule refuses a planted breach by file and line, and what is owed is a list."""

import ast

import pytest

import stack_trees  # noqa: F401  puts tools/ on the path

# isort: split
from stack.message import Debt, PatchMessage, StackError, read_message, read_series
from stack.wrap import wrapped

from stack import rules

FILE, TEST = "torch/distributed/_mesh_views.py", "test/distributed/test_mesh_views.py"
BEFORE = "import torch\n\n\ndef there():\n    return torch\n"
SOUND = PatchMessage("views", "[DeviceMesh] Views", (), (), "**Why.** Because.\n", line=4)


def found(added="", test="", message=SOUND, path=FILE):
    """What the rules find in a patch that adds these lines to a file."""
    before = {path: BEFORE, TEST: None}
    after = {path: BEFORE + added, TEST: test or None}
    return rules.breaches(message, before, after, after)


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
        ("\n\ndef _alone():\n    return _alone()\n", 8, "callers"),
        ("\n\nclass There:\n    def _alone(self):\n        pass\n\n\nthere(There)\n", 9, "callers"),
        ("_ALONE = 1\n", 6, "callers"),
        ("_alone = {}\n_alone['made'] = 1\n_alone['made'] += 1\n", 6, "callers"),
        ("_alone: dict = {}\n", 6, "callers"),
        ("_alone = set()\n_alone.add(1)\n", 6, "callers"),
        ("\n\nclass There:\n    alone: int = 0\n\n\nthere(There)\n", 9, "callers"),
        ("\n\nclass There:\n    def __init__(self):\n        self.alone = 0\n\n\nthere(There)\n", 10, "callers"),
        ("\n\nclass There:\n    alone: int = 0\n\n\nthere().alone += 1\nthere(There)\n", 9, "callers"),
        ("\n\ndef there():\n    return 2\n", 8, "twice"),
        ("if there():\n    pass\nelse:\n    import torch\n", 9, "twice"),
        ("from torch.distributed.tensor import x\nif not is_available():\n    there(x)\n", 6, "guard"),
        (f"there({'9' * 82})\n", 6, "width"),
    ],
)
def test_a_planted_breach_is_refused_by_file_and_line(added, line, rule):
    (breach,) = found(added)
    with pytest.raises(StackError, match=rf"views breaks upstream's rules:\n  {FILE}:{line}: {rule}: "):
        rules.refuse(SOUND, [breach])


def test_what_was_there_and_what_has_a_caller_is_no_breach():
    assert found() == []
    assert found("there(getattr(there(), 'name', None))\n") == [], "of an instance"
    before = {FILE: "# torch's own\n_alone = 1\n" + "#" * 100 + "\n"}
    assert rules.breaches(SOUND, before, {FILE: before[FILE] + "there = 1\nprint(there)\n"}, None) == []
    assert [b.rule for b in found("\n\ndef listed():\n    pass\n")] == ["callers"]
    public = "\n\ndef listed():\n    pass\n"
    assert found(public, test="listed()\n") == [], "torch's users call it, and so does the test"
    assert [b.rule for b in found(public.replace("listed", "_listed"), test="_listed()\n")] == ["callers"]


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
        assert found(message=PatchMessage("views", "[DeviceMesh] V", (), (), f"{line}\n", line=4)) == [], line


def test_an_import_and_a_place_in_all_are_no_use():
    text = "\n\ndef alone():\n    pass\n\n\n__all__ = ['alone']\n"
    assert [breach.why for breach in found(text)] == ["nothing uses alone"]


@pytest.mark.parametrize(
    ("message", "line", "rule"),
    [
        (PatchMessage("views", "[DeviceMesh] V", (), (), "fine\n" + "a b " * 20 + "\n", line=4), 5, "message"),
        (PatchMessage("views", "[DeviceMesh] " + "V" * 60, (), (), "fine\n", line=4), 1, "message"),
        (PatchMessage("views", "[DeviceMesh] V", (), (), "fine\nunlike stock\n", line=4), 5, "words"),
    ],
)
def test_a_breach_in_the_message_is_refused_by_line(message, line, rule):
    (breach,) = found(message=message)
    assert str(breach).startswith(f"patches/views.md:{line}: {rule}: ")


def test_a_large_patch_says_why():
    long = "there()\n" * 501
    (breach,) = found(long)
    assert str(breach).startswith("patches/views.md:1: size: 501 added lines without tests, at most 500")
    assert found(long, message=PatchMessage("views", "[DeviceMesh] V", (), (), "fine\n", size="for a reason")) == []
    assert found(test=long) == [], "tests don't count"


def test_pure_files_land_before_their_callers():
    pure = "def plan():\n    pass\n"
    message = PatchMessage("views", "[DeviceMesh] V", (), (), "fine\n", files=("_planner/plan.py",))
    path = "torch/distributed/_planner/plan.py"
    after = {path: pure, FILE: BEFORE}
    later = {path: pure, FILE: BEFORE + "plan()\n"}
    before = {path: None, FILE: BEFORE}
    assert rules.breaches(message, before, after, later) == []
    assert [b.rule for b in rules.breaches(message, before, after, after)] == ["callers"], "nor does any later patch"
    assert [b.rule for b in rules.breaches(SOUND, before, after, later)] == ["callers"], "not named by 'Files:'"
    part = PatchMessage("views", "[DeviceMesh] V", (), (), "fine\n", parts=("_planner/plan.py",))
    assert rules.breaches(part, before, after, later) == []
    cut, moved = "def _cut():\n    pass\n", "def plan():\n    _cut()\n\n\n"
    after, later = {path: f"{cut}\n\n{moved}"}, {path: moved + cut, FILE: BEFORE + "plan()\n"}
    assert rules.breaches(message, before, after, later) == [], "its use stands where the definition stood before"


def test_a_debt_is_neither_more_nor_less_than_it_says():
    two = found("# torch's own\n# overlay\n")
    owing = [
        PatchMessage("views", "[DeviceMesh] V", (), (), "fine\n", owes=(Debt("words", count, "why"),))
        for count in (1, 2, 3)
    ]
    with pytest.raises(StackError, match=f"{FILE}:6: words: .*\n  {FILE}:7: words: "):
        rules.refuse(owing[0], two)
    rules.refuse(owing[1], two)
    with pytest.raises(StackError, match=r"views\.md owes less than it says: write 'Owes: words 2'"):
        rules.refuse(owing[2], two)


def test_the_head_of_a_message_is_read(tmp_path):
    head = "Title: [DTensor] x\nFiles: tensor/_planner/plan.py a.py\nParts: b.py\nSize: pure\n"
    head += "Owes: words 2 because of that\n"
    (tmp_path / "patch.md").write_text(f"{head}\nbody\n")
    message = read_message(tmp_path / "patch.md")
    assert (message.files, message.parts) == (("tensor/_planner/plan.py", "a.py"), ("b.py",))
    assert (message.owes, message.size, message.line) == ((Debt("words", 2, "because of that"),), "pure", 7)
    (tmp_path / "patch.md").write_text("Title: [DTensor] x\nOwes: words some\n\nbody\n")
    with pytest.raises(StackError, match=r"patch\.md: 'Owes:' takes a rule, how many breaches, and why"):
        read_message(tmp_path / "patch.md")


def test_the_debt_of_the_stack_is_a_list():
    """It only shrinks: who pays some of it changes this list, and who adds to it says so here."""
    owed = {message.name: {debt.rule: debt.count for debt in message.owes} for message in read_series()}
    assert {name: debts for name, debts in owed.items() if debts} == {}
    assert [m.name for m in read_series() if m.size] == []


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
