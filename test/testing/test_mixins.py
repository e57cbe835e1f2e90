"""The mixins on real ranks: the overlay on where a test's work is done, off around it, and traces found."""

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_distributed import MultiProcContinuousTest, MultiThreadedTestCase
from torch.testing._internal.distributed._tensor.common_dtensor import (
    DTensorTestBase,
    LocalDTensorTestBase,
    with_comms,
)

import forks
import torch_overlay
from torch_overlay import series
from torch_overlay.patching import patch
from torch_overlay.testing import OverlayContinuous, OverlayProcesses, OverlayThreads, Trace, left_as_found

STOCK_GETITEM = vars(DeviceMesh)["__getitem__"]  # of the moment in which this file is imported: in ranks, too


def overlay_is_on() -> bool:
    return torch_overlay.is_enabled() and vars(DeviceMesh)["__getitem__"] is not STOCK_GETITEM


class Two:
    """Two gloo ranks of any of torch's classes."""

    world_size = 2
    device_type = "cpu"
    backend = "gloo"

    def _spawn_processes(self):
        """Forked from a server that has imported torch, where torch's own class has each rank import it."""
        self._start_processes(forks.context().Process)


class TestProcesses(OverlayProcesses, Two, DTensorTestBase):
    """DTensorTestBase is MultiProcessTestCase with a way to open a world."""

    overlay_options = {"check_mesh": True}

    def setUp(self):
        super().setUp()
        self.assertFalse(torch_overlay.is_enabled(), "the process that waits for the ranks needs no overlay")

    @with_comms
    def test_a_rank_has_the_overlay_with_its_options_and_a_trace_fails_it(self):
        self.assertTrue(overlay_is_on())
        self.assertTrue(torch_overlay.options().check_mesh)
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
        self.assertIs(mesh["a", "b"]._flatten("x").get_group(), dist.group.WORLD)
        torch_overlay.disable()
        with self.assertRaisesRegex(AssertionError, r"(?s)torch isn't as it was found:.*DeviceMesh.__getitem__ is"):
            with type(self).overlay():
                torch_overlay.disable()
                DeviceMesh.__getitem__ = lambda self, names: None
        DeviceMesh.__getitem__ = STOCK_GETITEM


class TestLocal(OverlayProcesses, Two, LocalDTensorTestBase):
    @with_comms
    def test_one_process_plays_the_ranks(self):
        with self._get_local_tensor_mode():
            self.assertTrue(overlay_is_on())

    def tearDown(self):
        super().tearDown()
        self.assertFalse(torch_overlay.is_enabled())


class TestContinuous(OverlayContinuous, MultiProcContinuousTest):
    world_size = 1

    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu"

    @classmethod
    def _init_pg(cls, rank, world_size, rdvz_file):
        super()._init_pg(rank, world_size, rdvz_file)
        cls.between = torch_overlay.is_enabled()

    def test_each_test_of_a_rank_has_it(self):
        self.assertEqual((self.between, overlay_is_on()), (False, True))

    def test_the_test_after_one_that_turned_it_off_has_it(self):
        torch_overlay.disable()


class TestThreads(OverlayThreads, Two, MultiThreadedTestCase):
    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def test_ranks_that_are_threads_share_it(self):
        self.assertTrue(overlay_is_on())
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        self.assertEqual(dist.get_process_group_ranks(mesh.get_group()), [0, 1])

    def tearDown(self):
        super().tearDown()
        self.assertTrue(torch_overlay.is_enabled(), "a thread that is late still has it")

    @classmethod
    def tearDownClass(cls):
        super().tearDownClass()
        assert not torch_overlay.is_enabled()


# --- what finds the traces


def test_a_trace_of_nothing_left_is_empty():
    before = Trace.take()
    with torch_overlay.enabled():
        on = before.left()
    assert before.left() == []
    targets = {row.target for row in torch_overlay.status().rows}
    assert len(on) > 20 and {line.partition(" is ")[0] for line in on} <= targets


def test_a_module_that_came_under_the_overlay_is_compared_with_its_source(monkeypatch):
    """As if nothing had been imported when the overlay came."""
    unseen = Trace({})
    with torch_overlay.enabled():
        assert len(unseen.left()) > 20
    assert unseen.left() == []
    monkeypatch.setattr(DeviceMesh, "permute", 7, raising=False)
    assert unseen.left() == ["torch.distributed.device_mesh:DeviceMesh.permute is the int 7"]


@pytest.mark.parametrize("name", ["DeviceMesh.__getitem__", "DeviceMesh.permute", "init_device_mesh"])
def test_what_stays_behind_is_named(name):
    row = next(row for row in series.PATCHES if row.qualname == name)
    owner, name, stock = patch.look_up(row.target)
    with pytest.raises(AssertionError, match=rf"{row.qualname} is .*, and it was ") as error:
        with left_as_found():
            ours = stock.__code__ if row.is_swap else vars(owner)[name]
            torch_overlay.disable()
            if row.is_swap:
                kept, stock.__code__ = stock.__code__, ours
            else:
                setattr(owner, name, ours)
    if row.is_swap:
        stock.__code__ = kept
    elif row.kind is patch.Kind.ADD:
        delattr(owner, name)
    else:
        setattr(owner, name, stock)
    assert str(error.value).count("\n") == 1


def test_an_error_from_inside_comes_out_and_an_overlay_that_was_on_stays_on():
    with pytest.raises(KeyError), left_as_found():
        raise KeyError
    assert not torch_overlay.is_enabled()
    with torch_overlay.enabled(flatten="existing"):
        with left_as_found(check_mesh=True):
            assert torch_overlay.options().check_mesh
        assert torch_overlay.is_enabled() and not torch_overlay.options().check_mesh
