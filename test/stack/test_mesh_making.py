# Owner(s): ["oncall: distributed"]
"""Which groups meshes ask for, how these are made and named, and what ranks are told first."""

from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.distributed import distributed_c10d
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_overlay.distributed import config
from torch_overlay.distributed._mesh.groups import Request, axis_group, new_groups
from torch_overlay.distributed._mesh.rank_map import RankMap, View
from torch_overlay.distributed._mesh.universe import Kind, current_world
from torch_overlay.distributed._mesh_layout import _MeshLayout
from torch_overlay.distributed.distributed_c10d import MemberNames


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


class TestMemberNames(TestCase):
    def test_members_agree_on_names_whatever_else_they_made(self) -> None:
        one, other = MemberNames(), MemberNames()
        one.next([0, 2])
        first = one.next([0, 1])
        self.assertEqual(first, other.next([0, 1]))
        self.assertNotEqual(first, one.next([0, 1]), msg="another group")
        self.assertNotEqual(first, other.next([1, 0]), msg="another order")
        self.assertEqual(one.next([0, 3]), other.next(list(torch.tensor([0, 3]))), msg="ranks of another type")

    def test_a_group_is_named_by_how_often_its_members_made_one(self) -> None:
        named = []
        for others in ([0, 1, 2], [1, 2]):  # of which rank 3 knows nothing
            dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=8)
            for _ in others:
                dist.new_group(others, use_local_synchronization=True)
            made = [dist.new_group([1, 3], use_local_synchronization=True) for _ in range(2)]
            named.append([group.group_name for group in made])
            dist.destroy_process_group()
        self.assertEqual(*named)
        self.assertEqual(len({*named[0]}), 2)


class TestNewGroups(TestCase):
    """In a world of 8 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
        self.addCleanup(dist.destroy_process_group)
        view = View(RankMap.identity(8), _MeshLayout.from_sizes_strides((2, 4)).select((1,)))
        self.request = Request(view, "tp", (None, None), "cpu")

    def test_they_keep_the_order_and_one_that_this_rank_is_not_in_is_none(self) -> None:
        other, mine = new_groups(self.request, [[0, 1, 2, 3], [7, 6, 5, 4]], False)
        self.assertIsNone(other)
        self.assertEqual(dist.get_process_group_ranks(mine), [7, 6, 5, 4])
        self.assertEqual(mine.group_desc, "mesh_tp")

    def test_an_error_says_which_axis_and_ranks(self) -> None:
        for error, said in (
            (RuntimeError("late"), "axis 'tp'.*4.*7.*late"),
            (dist.DistStoreError("late"), "axis 'tp'"),
        ):
            with mock.patch.object(distributed_c10d, "new_group", side_effect=error):
                with self.assertRaisesRegex(type(error), said):
                    new_groups(self.request, [[4, 5, 6, 7]], True)
        with mock.patch.object(
            distributed_c10d, "new_group", side_effect=NotImplementedError("who catches it still does")
        ):
            with self.assertRaisesRegex(NotImplementedError, "^who catches"):
                new_groups(self.request, [[4, 5, 6, 7]], True)


class TestAxisGroups(TestCase):
    """In a world of 8 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        switched_on = config.patch(mesh_share_groups="names")
        switched_on.__enter__()
        self.addCleanup(switched_on.__exit__, None, None, None)
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
        self.addCleanup(dist.destroy_process_group)
        patched = mock.patch.object(distributed_c10d, "new_group", wraps=distributed_c10d.new_group)
        self.made = patched.start()
        self.addCleanup(patched.stop)

    def _asked(self):
        return [list(call.kwargs["ranks"]) for call in self.made.call_args_list]

    def _axis(self, ranks, name="tp") -> Request:
        """The inner axis, of four, of a mesh over these ranks."""
        layout = _MeshLayout.from_sizes_strides((len(ranks) // 4, 4)).select((1,))
        return Request(View(RankMap(ranks), layout), name, (None, None), "cpu")

    def _group(self, universe, request):
        return getattr(axis_group(universe, request), "group_name", None)

    def test_members_make_it_once(self) -> None:
        universe = current_world().open_universe(RankMap.identity(8))
        first = self._group(universe, self._axis(range(8)))
        self.assertEqual(self._asked(), [[4, 5, 6, 7]])
        self.assertEqual(self._group(universe, self._axis(range(8))), first)
        self.assertEqual(self.made.call_count, 1)
        self.assertNotEqual(self._group(universe, self._axis(range(8), "ep")), first)
        other = current_world().open_universe(RankMap.identity(8))
        self.assertNotEqual(self._group(other, self._axis(range(8))), first, msg="another universe")

    @config.patch(mesh_create_groups="world")
    def test_all_ranks_of_the_world_make_it_if_asked(self) -> None:
        universe = current_world().open_universe(RankMap.identity(8))
        self._group(universe, self._axis(range(8)))
        self.assertEqual(self._asked(), [[0, 1, 2, 3], [4, 5, 6, 7]])

    def test_it_keeps_the_order_of_the_mesh(self) -> None:
        ranks = [7, 6, 5, 4, 3, 2, 1, 0]
        universe = current_world().open_universe(RankMap(ranks))
        group = axis_group(universe, self._axis(ranks))
        self.assertEqual(dist.get_process_group_ranks(group), [7, 6, 5, 4])

    def test_a_rank_outside_has_none_and_makes_none(self) -> None:
        universe = current_world().open_universe(RankMap([0, 1, 2, 3]))
        self.assertIsNone(axis_group(universe, self._axis([0, 1, 2, 3])))
        self.made.assert_not_called()

    def test_one_that_members_destroyed_is_made_again(self) -> None:
        universe = current_world().open_universe(RankMap.identity(8))
        first = axis_group(universe, self._axis(range(8)))
        dist.destroy_process_group(first)
        again = axis_group(universe, self._axis(range(8)))
        self.assertEqual(dist.get_process_group_ranks(again), [4, 5, 6, 7])


class TestDefaultGroup(TestCase):
    """In a world of 8 of which this process plays one; no bytes move."""

    def setUp(self) -> None:
        super().setUp()
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
        self.addCleanup(dist.destroy_process_group)

    def _has_it(self, ranks, override=(None, None)) -> bool:
        universe = current_world().open_universe(RankMap(ranks))
        view = View(RankMap(ranks), _MeshLayout.from_sizes_strides((len(ranks),)))
        return axis_group(universe, Request(view, "world", override, "cpu")) is dist.group.WORLD

    def test_an_axis_over_the_world_has_the_default_group(self) -> None:
        self.assertTrue(self._has_it(range(8)))
        self.assertFalse(self._has_it([1, 0, *range(2, 8)]), msg="in another order")
        self.assertFalse(self._has_it(range(2, 6)), msg="over some ranks")
        self.assertFalse(self._has_it(range(8), ("fake", None)), msg="on a backend that was asked for")


if __name__ == "__main__":
    run_tests()
