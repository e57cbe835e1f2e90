"""What upstream's reviewers ask: each rule refuses a planted breach by file and line, and what is owed is a list."""

import pytest

import stack_trees  # noqa: F401  puts tools/ on the path

# isort: split
from stack.message import PatchMessage, StackError

from stack import rules

FILE, TEST = "torch/distributed/_mesh_views.py", "test/distributed/test_mesh_views.py"
BEFORE = "import torch\n\n\ndef there():\n    return torch\n"


SOUND = PatchMessage("views", "mesh", "[DeviceMesh] Views", (), (), (), (), "**Why.** Because.\n", line=4)


def breaches(added="", test="", message=SOUND, path=FILE, new=()):
    """What the rules find in a patch that adds these lines to a file, and what nothing uses if it is all there is."""
    before = {path: BEFORE, TEST: None}
    after = {path: BEFORE + added, TEST: test or None}
    return [*rules.breaches(message, before, after, new), *rules.unused(before, after)]


@pytest.mark.parametrize(
    ("added", "line", "rule"),
    [
        ("# what torch's own code does\n", 6, "words"),
        ("there(NotOurs)\n", 6, "words"),
        ("\n\ndef _alone():\n    return _alone()\n", 1, "unused"),
        ("\n\nclass There:\n    def _alone(self):\n        pass\n\n\nthere(There)\n", 1, "unused"),
        ("from torch.distributed._late import x\nthere(x)\n", 1, "forward"),
        ("from ._late import x\nthere(x)\n", 1, "forward"),
        ("from . import _late\nthere(_late)\n", 1, "forward"),
    ],
)
def test_a_planted_breach_is_refused_by_file_and_line(added, line, rule):
    (breach,) = breaches(added, new={"torch/distributed/_late.py"})
    with pytest.raises(StackError, match=rf"The stack breaks upstream's rules:\n  {FILE}:{line}: {rule}: "):
        rules.refuse([breach])


def test_what_was_there_and_what_has_a_caller_is_no_breach():
    assert breaches() == []
    before = {FILE: "# torch's own\n_alone = 1\n" + "#" * 100 + "\n"}
    assert rules.breaches(SOUND, before, {FILE: before[FILE] + "there = 1\nprint(there)\n"}, ()) == []
    assert [b.rule for b in breaches("\n\ndef listed():\n    pass\n")] == ["unused"]
    public = "\n\ndef listed():\n    pass\n"
    assert breaches(public, test="listed()\n") == [], "torch's users call it, and so does the test"
    assert [b.rule for b in breaches(public.replace("listed", "_listed"), test="_listed()\n")] == ["unused"]


@pytest.mark.parametrize(("stack", "refused"), [("fixes", ["unused"]), ("mesh", [])])
def test_a_fix_brings_nothing_that_only_a_later_patch_uses(stack, refused):
    messages = [PatchMessage(name, stack, f"[DeviceMesh] {name}", (), (), (), (), "**Why.**\n") for name in "ab"]
    later = BEFORE + "\n\ndef later():\n    pass\n"
    rendered = [{FILE: BEFORE}, {FILE: later}, {FILE: later + "\n\nthere(later)\n"}]
    assert [breach.rule for breach in rules.unused_in_fixes(messages, rendered)] == refused
    assert not [*rules.unused(rendered[0], rendered[-1])]
