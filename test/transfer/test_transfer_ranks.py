"""All cases that need real ranks, in one class: eight gloo processes are spawned once."""

from torch.testing._internal.common_utils import run_tests

from mesh_ranks import EightRanks
from rank_background import BackgroundCases
from rank_changes import ChangeCases
from rank_dcp import DcpCases
from rank_gradients import GradientCases
from rank_landings import LandingCases
from rank_layouts import LayoutCases
from rank_loads import LoadCases
from rank_loops import LoopCases
from rank_memory import MemoryCases
from rank_modes import ModeCases
from rank_norms import NormCases
from rank_only_changed import OnlyChangedCases
from rank_own_groups import GroupCases
from rank_pieces import PieceCases
from rank_places import PlaceCases
from rank_recipes import RecipeCases
from rank_reductions import ReductionCases
from rank_refusals import RefusalCases
from rank_relay import RelayCases
from rank_stages import StageCases
from rank_streams import StreamCases
from rank_transfers import TransferCases
from rank_trees import TreeCases
from rank_verify import VerifyCases
from rank_vllm import VllmCases
from rank_weights import WeightCases
from rank_world_recipes import WorldRecipeCases
from way import needs_package


@needs_package
class TestTransferOnEightRanks(
    TransferCases,
    ChangeCases,
    DcpCases,
    BackgroundCases,
    ReductionCases,
    ModeCases,
    GroupCases,
    TreeCases,
    GradientCases,
    LandingCases,
    LayoutCases,
    LoadCases,
    LoopCases,
    MemoryCases,
    NormCases,
    OnlyChangedCases,
    PieceCases,
    PlaceCases,
    RecipeCases,
    RefusalCases,
    RelayCases,
    VerifyCases,
    VllmCases,
    StageCases,
    StreamCases,
    WeightCases,
    WorldRecipeCases,
    EightRanks,
):
    """Each method runs on all eight ranks, in a world of its own."""


if __name__ == "__main__":
    run_tests()
