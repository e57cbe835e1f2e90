"""Our tests in upstream's files: added at the end, beside what is there, and refused where a name is taken."""

import pytest

from stack_trees import small_tree

# isort: split
from stack.message import StackError, read_series
from stack.render import Prefix
from stack.suites import joined
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
