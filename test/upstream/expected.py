"""Where PyTorch's own tests are meant to end otherwise under the overlay; `tools/run_pytorch_tests.py` reads it.

Each entry has a pattern on ``file::Class::test``, a reason, and the torch releases that it is for. An entry that no
longer holds fails the run, so that this list says what is, not what was. Each was seen on the release that it begins
with.
"""

from pytorch_tests.difference import Expected

_REDISTRIBUTE = "distributed/tensor/test_redistribute.py"
_COMPILE = "distributed/tensor/test_dtensor_compile.py::TestDTensorCompile"
_DEBUG_MODE = "distributed/tensor/debug/test_debug_mode.py::TestDTensorDebugMode"
_FEWER = "The test holds redistribute to the number of collectives that stock takes, and a plan takes fewer"
_GOLDEN = "The test has the text of every operation inside a redistribution, and a plan runs others"

EXPECTED = [
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
        f"{_REDISTRIBUTE}::RedistributeTest::test_all_gather_no_optimization_gather_dim_not_1",
        f"{_GOLDEN}: view, permute and reshape after the all-gather, where it expects split and cat.",
        ">=2.15.0",
    ),
    Expected(
        f"{_REDISTRIBUTE}::RedistributeTest::test_all_gather_split_cat_fallback_batch_gt_1",
        f"{_GOLDEN}: view, permute and reshape after the all-gather, where it expects split and cat.",
        ">=2.15.0",
    ),
    Expected(
        f"{_DEBUG_MODE}::test_debug_mode_densor_redistribution_trace",
        f"{_GOLDEN}: one all-gather over both axes, where it expects two with chunk and cat after each.",
        ">=2.13.0",
    ),
    Expected(
        f"{_DEBUG_MODE}::test_debug_mode_explicit_redistribute",
        f"{_GOLDEN}: an all-gather of the flat shard and a view, where it expects one of the shard in its shape.",
        ">=2.13.0",
    ),
    Expected(
        f"{_DEBUG_MODE}::test_debug_mode_mm",
        f"{_GOLDEN}: the same collective, with tensors numbered otherwise, since there is one view more.",
        ">=2.13.0",
    ),
    Expected(
        f"{_DEBUG_MODE}::test_output_placements",
        f"{_GOLDEN}: view, permute and reshape after the all-gather, where it expects chunk and cat.",
        ">=2.13.0",
    ),
    Expected(
        "distributed/tensor/test_utils.py::Test2DStridedLocalShard::test_fsdp1_tp_2d_dtensor_local_shards_and_offsets",
        "The test counts the all-gather that stock takes for (R, S0) to (S0, S0); a plan takes an all-to-all, by which "
        "each rank gets the row that it lacks.",
        ">=2.13.0",
    ),
    Expected(
        f"{_COMPILE}::test_make_fx_with_invoke_subgraph_dtensor",
        f"{_GOLDEN}: two views more, to the flat shard and back.",
        ">=2.15.0",
    ),
    Expected(
        f"{_COMPILE}::test_to_local_symbolic_sizes_uneven_shard",
        "The test gives rank 0 four of nine columns, where the spec says five. Stock gathers what there is; under the "
        "overlay, a local tensor that doesn't fit its spec is an error before anything is sent.",
        ">=2.15.0",
    ),
]
