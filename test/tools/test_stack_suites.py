"""Our tests in upstream's files: added at the end, beside what is there, and refused where a name is taken."""

import pytest

from stack_trees import small_tree

# isort: split
from stack.message import StackError, read_series
from stack.render import Prefix
from stack.suites import decorated, joined
from stack.tree import Tree

MESSAGES = read_series()
THEIRS = """# Owner(s): ["oncall: distributed"]
import torch.distributed as dist
from torch.testing._internal.common_utils import run_tests, TestCase


class TheirTest(TestCase):
    def test_it(self):
        self.assertFalse(dist.is_initialized())


if __name__ == "__main__":
    run_tests()
"""
OURS = '''# Owner(s): ["oncall: distributed"]
"""What ours is about."""

import itertools
import torch.distributed as dist
from torch.testing._internal.common_utils import TestCase, parametrize, run_tests


def helper():
    return itertools.count()


class TestOurs(TestCase):
    def test_it(self):
        self.assertTrue(helper() and dist)


if __name__ == "__main__":
    run_tests()
'''


def test_classes_go_before_what_runs_the_file():
    after = joined("test/t.py", THEIRS, OURS)
    left = iter(after.splitlines())
    assert all(line in left for line in THEIRS.splitlines()), "every line of theirs is there, in its order"
    assert after.index("class TheirTest") < after.index("def helper") < after.index("class TestOurs")
    assert after.index("class TestOurs") < after.index("if __name__") and after.count("if __name__") == 1
    assert after.count("import torch.distributed as dist") == 1 and "What ours is about" not in after
    assert "\nimport itertools\n" in after and "common_utils import parametrize\n" in after
    namespace = {"__name__": "joined"}
    exec(compile(after, "joined", "exec"), namespace)
    assert {"TheirTest", "TestOurs", "helper"} <= {*namespace}


def test_two_files_of_ours_may_bring_one_helper():
    both = joined("test/t.py", joined("test/t.py", THEIRS, OURS), OURS.replace("TestOurs", "TestMore"))
    assert both.count("def helper") == 1 and both.count("class Test") == 2
    with pytest.raises(StackError, match=r"test/t\.py has a helper of its own, so our tests need another name"):
        joined("test/t.py", both, OURS.replace("TestOurs", "TestMost").replace("count()", "count(1)"))


def test_a_later_file_adds_tests_to_a_class():
    more = OURS.replace("test_it", "test_more")
    both = joined("test/t.py", joined("test/t.py", THEIRS, OURS), more)
    assert both.count("class TestOurs") == 1
    assert both.index("class TestOurs") < both.rindex("test_it") < both.index("test_more") < both.index("if __name__")
    for other in (more.replace("(TestCase)", "(MoreTest)"), OURS.replace("assertTrue", "assertFalse")):
        with pytest.raises(StackError, match=r"test/t\.py has a TestOurs of its own"):
            joined("test/t.py", both, other)


def test_a_submodule_is_imported_beside_its_package():
    ours = OURS.replace("import itertools", "import itertools\nimport torch.fx.traceback")
    after = joined(
        "test/t.py", THEIRS.replace("import torch.distributed", "import torch\nimport torch.distributed"), ours
    )
    assert after.count("import torch\n") == after.count("import torch.fx.traceback\n") == 1


def test_a_helper_of_another_file_of_ours_is_there_already():
    """Where both land in one file of torch's, nothing is imported."""
    later = OURS.replace("TestOurs", "TestLater").replace("def helper():\n    return itertools.count()\n\n\n", "")
    later = later.replace("import itertools\n", "").replace(
        "run_tests\n\n", "run_tests\n\nfrom test_ours import helper\n\n"
    )
    assert "from test_ours import helper" in later
    both = joined("test/t.py", joined("test/t.py", THEIRS, OURS), later)
    assert "class TestLater" in both
    assert "test_ours" not in both
    assert "from test_ours import helper" in joined("test/t.py", THEIRS, later)


@pytest.mark.parametrize("line", ["from torch import distributed as itertools", "itertools = 1"])
def test_a_name_of_theirs_for_something_else_is_refused(line):
    with pytest.raises(StackError, match=r"test/t\.py calls something else itertools than import itertools"):
        joined("test/t.py", THEIRS.replace("import torch.distributed as dist\n", f"import torch\n{line}\n"), OURS)


def test_a_checkout_gets_our_classes_in_its_file(tmp_path):
    """The test of `timeouts` in a tree that has upstream's file, and once only."""
    tree, path = small_tree(tmp_path), "test/distributed/test_device_mesh.py"
    (tree / path).parent.mkdir(parents=True)
    (tree / path).write_text(THEIRS)
    prefix = Prefix(Tree.at(tree), MESSAGES[:3])
    after = prefix.files()[path]
    assert after.index("class TheirTest") < after.index("class TestMeshTimeouts") < after.index("if __name__")
    (tree / path).write_text(after)
    with pytest.raises(StackError, match=r"test_device_mesh\.py, so the stack was rendered onto it already"):
        prefix.files()


MARKS = """import torch.distributed as dist
import unittest


class TheirTest:
    @unittest.skip("said")
    def test_it(): ...
"""


def test_a_test_of_theirs_gets_a_decorator_and_stays_as_it_is():
    after = decorated("test/t.py", THEIRS, MARKS)
    left = iter(after.splitlines())
    assert all(line in left for line in THEIRS.splitlines()), "every line of theirs is there, in its order"
    assert '    @unittest.skip("said")\n    def test_it(self):' in after
    assert after.count("import torch.distributed as dist") == 1 and after.count("import unittest") == 1
    with pytest.raises(StackError, match=r"test/t\.py has no test TheirTest\.test_that, which a patch decorates"):
        decorated("test/t.py", THEIRS, MARKS.replace("test_it", "test_that"))


def test_what_a_patch_changes_in_their_tests_is_in_its_own_commit(tmp_path):
    """Of five tests that hold torch to the step-by-step path, here in the files that the tree has."""
    tree = small_tree(tmp_path)
    path = "test/distributed/tensor/debug/test_debug_mode.py"
    (tree / path).parent.mkdir(parents=True)
    name = "test_debug_mode_densor_redistribution_trace"
    (tree / path).write_text(THEIRS.replace("TheirTest", "TestDTensorDebugMode").replace("test_it", name))
    number = [message.name for message in MESSAGES].index("planned-by-default")
    before, after = (Prefix(Tree.at(tree), MESSAGES[:count]).tests() for count in (number, number + 1))
    assert path not in before
    assert f"    @dist.config.patch(plan_redistribution=False)\n    def {name}(self)" in after[path]
