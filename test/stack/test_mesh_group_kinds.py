# Owner(s): ["oncall: distributed"]
"""What a group can do is a value: its backend, and its options by value."""

from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed._group_kind import Kind


class TestGroupKinds(TestCase):
    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=8)
        self.addCleanup(dist.destroy_process_group)

    def test_options_count_by_value(self) -> None:
        one, same, longer = (Backend.Options("fake", timedelta(seconds=seconds)) for seconds in (60, 60, 120))
        self.assertEqual(Kind.of(("fake", one)), Kind.of((None, same)))
        self.assertNotEqual(Kind.of(("fake", one)), Kind.of(("fake", longer)))
        self.assertNotEqual(Kind.of(("fake", one)), Kind.of(("fake", None)))

    def test_options_that_cannot_be_compared_equal_themselves_only(self) -> None:
        class Options:
            def __init__(self, stream) -> None:
                self.stream = stream

        one, other = Options(object()), Options(object())
        self.assertEqual(Kind.of(("fake", one)), Kind.of(("fake", one)))
        self.assertNotEqual(Kind.of(("fake", one)), Kind.of(("fake", other)))
        self.assertEqual(Kind.of(("fake", Options((1, "a")))), Kind.of(("fake", Options((1, "a")))))
        self.assertNotEqual(Kind.of(("fake", Options(len))), Kind.of(("fake", Options(max))), msg="a field to call")

    def test_methods_of_nested_options_do_not_count(self) -> None:
        class NCCLConfig:
            def __init__(self, max_ctas) -> None:
                self.max_ctas = max_ctas

            def unsafe_get_ptr(self) -> int:
                return id(self)

        class Options:
            def __init__(self, max_ctas) -> None:
                self.config = NCCLConfig(max_ctas)

        self.assertEqual(Kind.of(("fake", Options(4))), Kind.of(("fake", Options(4))))
        self.assertNotEqual(Kind.of(("fake", Options(4))), Kind.of(("fake", Options(8))))


if __name__ == "__main__":
    run_tests()
