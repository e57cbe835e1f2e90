"""Which test files: known sets by name, paths in a checkout, or files by themselves."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

_TENSOR = "distributed/tensor"
_FSDP = "distributed/_composable/fsdp"
_CHECKPOINT = "distributed/checkpoint"

# Paths under PyTorch's test/ folder. A release lacks some; what is missing is said and left out.
SETS: dict[str, tuple[str, ...]] = {
    "mesh": ("distributed/test_device_mesh.py",),
    "redistribute": (f"{_TENSOR}/test_redistribute.py",),
    "tensor": tuple(
        f"{_TENSOR}/{name}.py"
        for name in (
            "test_api",
            "test_attention",
            "test_common_rules",
            "test_convolution_ops",
            "test_dtensor",
            "test_dtensor_ops",
            "test_dtensor_testbase",
            "test_dynamic",
            "test_embedding_ops",
            "test_experimental_ops",
            "test_init",
            "test_math_ops",
            "test_matrix_ops",
            "test_op_schema",
            "test_op_strategy",
            "test_optimizers",
            "test_placement_types",
            "test_pointwise_ops",
            "test_random_ops",
            "test_redistribute",
            "test_tensor_ops",
            "test_utils",
            "test_view_ops",
            "test_xla_integration",
            "debug/test_comm_mode",
            "debug/test_comm_mode_features",
            "debug/test_debug_mode",
            "experimental/test_local_map",
            "experimental/test_register_sharding",
            "experimental/test_tp_transform",
            "parallel/test_parallelize_api",
            "parallel/test_tp_examples",
            "parallel/test_tp_random_state",
            "parallel/test_tp_style",
        )
    ),
    "fsdp": (
        *(
            f"{_FSDP}/test_fully_shard_{name}.py"
            for name in (
                "autograd",
                "clip_grad_norm_",
                "comm",
                "extensions",
                "frozen",
                "grad_scaler",
                "ignore_params",
                "init",
                "logging",
                "memory",
                "mixed_precision",
                "overlap",
                "state",
                "state_dict",
                "training",
            )
        ),
        "distributed/_composable/test_replicate_training.py",
        "distributed/_composable/test_composability/test_2d_composability.py",
        f"{_TENSOR}/parallel/test_fsdp_2d_parallel.py",
    ),
    "checkpoint": tuple(
        f"{_CHECKPOINT}/{name}.py"
        for name in (
            "test_checkpoint",
            "test_dtensor_checkpoint",
            "test_dtensor_resharding",
            "test_file_system_checkpoint_cpu",
            "test_fsdp_model_state",
            "test_fsdp_optim_state",
            "test_hsdp_checkpoint",
            "test_planner",
            "test_save_load_api",
            "test_state_dict",
            "test_state_dict_utils",
            "test_tp_checkpoint",
            "test_utils",
            "e2e/test_e2e_save_and_load",
        )
    ),
    "compile": (
        f"{_TENSOR}/test_dtensor_compile.py",
        f"{_TENSOR}/test_dtensor_export.py",
        f"{_TENSOR}/parallel/test_micro_pipeline_tp.py",
        f"{_FSDP}/test_fully_shard_compile.py",
        "distributed/test_dynamo_distributed.py",
        "distributed/test_functional_api.py",
    ),
}


@dataclasses.dataclass(frozen=True)
class File:
    """One test file. ``name`` is what results and expectations call it: its path under test/, or its bare name."""

    name: str
    path: pathlib.Path
    folder: (
        pathlib.Path
    )  # where its process starts: test/ as in PyTorch's own runs, never a checkout's root with torch/


def resolve(wanted: Sequence[str], checkout: str | None) -> tuple[list[File], list[str]]:
    """(the files, what a set names and the checkout lacks); ValueError for a name that is neither set nor file."""
    home = None if checkout is None else pathlib.Path(checkout).resolve() / "test"
    if home is not None and not home.is_dir():
        raise ValueError(f"{checkout} has no folder test: --pytorch names a checkout of PyTorch")
    if home is None and not wanted:
        raise ValueError(f"name test files, or --pytorch PATH and sets of them: {', '.join(SETS)}")
    found: dict[pathlib.Path, File] = {}
    missing = []
    for name in wanted or list(SETS):
        if name in SETS and home is not None:
            missing += [path for path in SETS[name] if not (home / path).is_file()]
            files = [file_at(home / path) for path in SETS[name] if (home / path).is_file()]
        else:
            files = [file_at(_path(name, home))]
        found |= {file.path: file for file in files}
    return list(found.values()), missing


def _path(name: str, home: pathlib.Path | None) -> pathlib.Path:
    places = [pathlib.Path(name), *([home / name, home.parent / name] if home else [])]
    for place in places:
        if place.is_file():
            return place.resolve()
    if name in SETS:
        raise ValueError(f"the set {name} needs --pytorch PATH, the checkout that its files lie in")
    raise ValueError(f"there is no file {name} and no set of that name; sets: {', '.join(SETS)}")


def file_at(path: pathlib.Path) -> File:
    """A file, by its path under the outermost ``test`` folder that PyTorch's tests lie in (``test/distributed``)."""
    parts = path.parts
    inside = [i for i in range(len(parts) - 1) if parts[i] == "test" and parts[i + 1] == "distributed"]
    if inside:
        return File("/".join(parts[inside[-1] + 1 :]), path, pathlib.Path(*parts[: inside[-1] + 1]))
    return File(path.name, path, path.parent)
