"""Where PyTorch's own tests are meant to end otherwise under the overlay; `tools/run_pytorch_tests.py` reads it.

Each entry has a pattern on ``file::Class::test``, a reason, and the torch releases that it is for. An entry that no
longer holds fails the run, so that this list says what is, not what was. Each was seen on the release that it begins
with.
"""

from pytorch_tests.difference import Expected

_REDISTRIBUTE = "distributed/tensor/test_redistribute.py"
_DEBUG_MODE = "distributed/tensor/debug/test_debug_mode.py::TestDTensorDebugMode"
_FEWER = "The test holds redistribute to the number of collectives that stock takes, and a plan takes fewer"

EXPECTED = [
    Expected(
        "*test_device_mesh.py::TestDeviceMeshGetItem*::test_flatten_mesh_3d",
        'The test expects torch to refuse mesh["dp_tp", "cp"], since dp and tp don\'t lie side by side. The overlay '
        "slices such views, and refuses this one in other words, as 2.13 does: its axes aren't in order.",
        ">=2.11.0,<2.13.0",
    ),
    Expected(
        f"{_REDISTRIBUTE}::MultiDimRedistributeTest::test_redistribute_shard_dim_multi_dim_mesh",
        f"{_FEWER}: one all-to-all for (S0, S0, S0) to (S1, S1, S1), where it expects 3.",
        ">=2.13.0",
    ),
    Expected(
        f"{_REDISTRIBUTE}::MultiDimRedistributeOptimizationTest::test_multi_dim_redistribute",
        f"{_FEWER}: one reduce-scatter for (P, P) to (S0, S1), where it expects 2.",
        ">=2.13.0",
    ),
    Expected(
        f"{_REDISTRIBUTE}::FlattenedReductionIntegrationTest::test_merging_reductions",
        f"{_FEWER}: two for (P, S0, P) to replicated, where it expects 3.",
        ">=2.13.0",
    ),
    Expected(
        f"{_DEBUG_MODE}::test_debug_mode_densor_redistribution_trace",
        f"{_FEWER}: one all-gather for (S1, S1) to replicated, where the text that it expects has 2.",
        ">=2.13.0",
    ),
    Expected(
        "distributed/tensor/test_utils.py::Test2DStridedLocalShard::test_fsdp1_tp_2d_dtensor_local_shards_and_offsets",
        "The test counts the all-gather that stock takes for (R, S0) to (S0, S0); a plan takes an "
        "all-to-all, by which two ranks get the row that they lack, and two get nothing.",
        ">=2.13.0",
    ),
]
