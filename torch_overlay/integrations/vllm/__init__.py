"""vLLM's door: the weight transfer engine `torch_overlay`, for vLLM's workers and for trainers.

vLLM calls `register` in each of its processes, by the entry point `vllm.general_plugins`; a trainer calls it once.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging

BACKEND = "torch_overlay"
logger = logging.getLogger("torch_overlay")

_BASE = "vllm.distributed.weight_transfer.base"
# By side: the oldest vLLM whose base classes ours derive from, and a name in `_BASE` that older ones lack. 0.27 brought
# the start and the finish of an update with the trainer's class; 0.33 says how a source is cut.
_NEEDS = {"worker": ("0.27", "TrainerWeightTransferEngine"), "trainer": ("0.33", "Shard")}


def register() -> None:
    """Make the engine known to vLLM's factories, those that this vLLM has. Again does nothing.

    Never raises: vLLM calls plugins without a guard, in processes of people who never ask for this engine. Up to 0.24
    it has no factory for trainers, and an ImportError here ended each of its processes. What is registered is imported
    when somebody asks for it by name, and says then which vLLM it needs.
    """
    factories, lacking = _imported("vllm.distributed.weight_transfer.factory")[0], []
    for factory, side, name in (
        ("WeightTransferEngineFactory", "worker", "WorkerEngine"),
        ("WeightTransferTrainerFactory", "trainer", "TrainerEngine"),
    ):
        registry = getattr(factories, factory, None)
        if registry is None:
            lacking.append(side)
        elif BACKEND not in registry._registry:
            registry.register_engine(BACKEND, f"{__name__}.{side}", name)
    if lacking:
        logger.info("the engine %r is not registered for every side: %s", BACKEND, _need(*lacking))


def require(side: str) -> None:
    """ImportError if the vLLM that is installed can't have this side's engine; says which one can."""
    base, error = _imported(_BASE)
    if not hasattr(base, _NEEDS[side][1]):
        raise ImportError(f"The engine {BACKEND!r} can't be used here: {_need(side)}.") from error


def _need(*sides: str) -> str:
    needs = " and ".join(f"a {side} needs vLLM {_NEEDS[side][0]} or newer" for side in sides)
    try:
        return f"{needs}, and {importlib.metadata.version('vllm')} is installed"
    except importlib.metadata.PackageNotFoundError:
        return f"{needs}, and none is installed"


def _imported(name: str) -> tuple[object, ImportError | None]:
    """A module of vLLM's; or None and why, if this vLLM doesn't have it."""
    try:
        return importlib.import_module(name), None
    except ImportError as error:
        return None, error
