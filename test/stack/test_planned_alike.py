# Owner(s): ["oncall: distributed"]
"""Pieces of one shape are packed and unpacked by one permute."""

from unittest import mock

import torch
from torch.testing._internal.common_utils import TestCase, run_tests

from torch_overlay.distributed.tensor._exchange import all_to_all
from torch_overlay.distributed.tensor._joint_groups import Group
from torch_overlay.distributed.tensor._pack import Place, packing, part, unpacking
from torch_overlay.distributed.tensor._planner.grids import Grid
from torch_overlay.distributed.tensor._planner.regions import Regions
from torch_overlay.distributed.tensor._planner.steps import AllToAll


class TestAlike(TestCase):
    """No process group."""

    def test_equal_pieces_are_one_permute(self) -> None:
        local = torch.arange(24).reshape(6, 4)
        packed = packing(Grid((2, 3, 4), (2, 3, 4), (1, 0, 2)))(local)
        self.assertEqual(packed, local.reshape(2, 3, 4).transpose(0, 1).flatten())
        self.assertEqual(unpacking(Grid((3, 2, 4), (3, 2, 4), (1, 0, 2)), (6, 4))(packed), local)

    def test_rows_to_columns_list_no_pieces(self) -> None:
        whole = torch.arange(64).reshape(8, 8)
        rows, columns = (Regions.of((dim,), (None,), (8, 8), (4,)) for dim in (0, 1))
        place = Place((1,), rows.box((1,)), columns.box((1,)))
        group = Group("", (0, 1, 2, 3), in_order=True)
        with (
            mock.patch.object(AllToAll, "sends", side_effect=AssertionError),
            mock.patch.object(AllToAll, "receives", side_effect=AssertionError),
        ):
            pack, _, land = all_to_all(AllToAll(rows, columns, (0,)), place, group, torch.Tensor.clone)
        sent = torch.cat([columns_of.flatten() for columns_of in part(whole, place.held).split(2, dim=1)])
        self.assertEqual(pack(part(whole, place.held)), sent)
        came = torch.cat([rows_of.flatten() for rows_of in part(whole, place.wanted).split(2)])
        self.assertEqual(land(came), part(whole, place.wanted))

    def test_a_group_in_another_order_goes_by_pieces(self) -> None:
        whole = torch.arange(64).reshape(8, 8)
        rows, columns = (Regions.of((dim,), (None,), (8, 8), (4,)) for dim in (0, 1))
        place = Place((1,), rows.box((1,)), columns.box((1,)))
        group = Group("", (3, 2, 1, 0), in_order=False)
        pack, _, land = all_to_all(AllToAll(rows, columns, (0,)), place, group, torch.Tensor.clone)
        sent = torch.cat([columns_of.flatten() for columns_of in reversed(part(whole, place.held).split(2, dim=1))])
        self.assertEqual(pack(part(whole, place.held)), sent)
        came = torch.cat([rows_of.flatten() for rows_of in reversed(part(whole, place.wanted).split(2))])
        self.assertEqual(land(came), part(whole, place.wanted))


if __name__ == "__main__":
    run_tests()
