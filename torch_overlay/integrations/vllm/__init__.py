"""vLLM's door: the weight transfer engine `torch_overlay`, for vLLM's workers and for trainers.

vLLM calls `register` in each of its processes, by the entry point `vllm.general_plugins`; a trainer calls it once.
"""

from __future__ import annotations

BACKEND = "torch_overlay"


def register() -> None:
    """Make the engine known to vLLM's factories. Again does nothing; what is registered is imported when it is used."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    for factory, room, name in (
        (WeightTransferEngineFactory, "worker", "WorkerEngine"),
        (WeightTransferTrainerFactory, "trainer", "TrainerEngine"),
    ):
        if BACKEND not in factory._registry:
            factory.register_engine(BACKEND, f"{__name__}.{room}", name)
