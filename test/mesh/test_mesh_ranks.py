"""All cases that need real ranks, in one class: eight gloo processes are spawned once."""

from torch.testing._internal.common_utils import run_tests

from mesh_ranks import EightRanks
from rank_collectives import CollectiveCases
from rank_groups import GroupCases
from rank_pickles import PickleCases
from rank_training import TrainingCases


class TestOnEightRanks(CollectiveCases, GroupCases, PickleCases, TrainingCases, EightRanks):
    """Each method runs on all eight ranks, in a world of its own."""


if __name__ == "__main__":
    run_tests()
