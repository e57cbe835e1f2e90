"""Which test files: known sets by name, paths in a checkout, or files by themselves."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

_FSDP = "_composable/fsdp/test_fully_shard_"
# By set, a folder or beginning of paths under PyTorch's test/distributed, and what follows it. A release lacks some:
# what is missing is said and left out.
_NAMES = {
    "mesh": {"test_": "device_mesh"},
    "redistribute": {"tensor/test_": "redistribute"},
    "tensor": {
        "tensor/test_": """
            api attention common_rules convolution_ops dtensor dtensor_ops dtensor_testbase dynamic embedding_ops
            experimental_ops init math_ops matrix_ops op_schema op_strategy optimizers placement_types pointwise_ops
            random_ops redistribute tensor_ops utils view_ops xla_integration
        """,
        "tensor/debug/test_": "comm_mode comm_mode_features debug_mode",
        "tensor/experimental/test_": "local_map register_sharding tp_transform",
        "tensor/parallel/test_": "parallelize_api tp_examples tp_random_state tp_style",
    },
    "fsdp": {
        _FSDP: """
            autograd clip_grad_norm_ comm extensions frozen grad_scaler ignore_params init logging memory
            mixed_precision overlap state state_dict training
        """,
        "_composable/test_": "replicate_training composability/test_2d_composability",
        "tensor/parallel/test_": "fsdp_2d_parallel",
    },
    "checkpoint": {
        "checkpoint/test_": """
            checkpoint dtensor_checkpoint dtensor_resharding file_system_checkpoint_cpu fsdp_model_state
            fsdp_optim_state hsdp_checkpoint planner save_load_api state_dict state_dict_utils tp_checkpoint utils
        """,
        "checkpoint/e2e/test_": "e2e_save_and_load",
    },
    "compile": {
        "tensor/test_": "dtensor_compile dtensor_export",
        "tensor/parallel/test_": "micro_pipeline_tp",
        _FSDP: "compile",
        "test_": "dynamo_distributed functional_api",
    },
}
SETS = {
    name: tuple(f"distributed/{start}{end}.py" for start, ends in some.items() for end in ends.split())
    for name, some in _NAMES.items()
}


@dataclasses.dataclass(frozen=True)
class File:
    """One test file. ``name`` is what results and expectations call it: its path under test/, or its bare name."""

    name: str
    path: pathlib.Path
    folder: pathlib.Path  # where its process starts: test/ as in PyTorch's own runs, never a root with torch/


def resolve(wanted: Sequence[str], checkout: str | None) -> tuple[list[File], list[str]]:
    """(the files, what a set names and the checkout lacks); ValueError for a name that is neither set nor file."""
    home = None if checkout is None else pathlib.Path(checkout).resolve() / "test"
    if home is not None and not home.is_dir():
        raise ValueError(f"{checkout} has no folder test: --pytorch names a checkout of PyTorch")
    if home is None and not wanted:
        raise ValueError(f"name test files, or --pytorch PATH and sets of them: {', '.join(SETS)}")
    chosen: dict[pathlib.Path, File] = {}
    missing = []
    for name in wanted or list(SETS):
        if name in SETS and home is not None:
            missing += [path for path in SETS[name] if not (home / path).is_file()]
            files = [file_at(home / path) for path in SETS[name] if (home / path).is_file()]
        else:
            files = [file_at(_path(name, home))]
        chosen |= {file.path: file for file in files}
    return list(chosen.values()), missing


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
