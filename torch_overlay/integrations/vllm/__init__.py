"""The weight transfer engine `torch_overlay` for vLLM: `worker` for its workers, `trainer` for trainers.

vLLM calls `register` in each of its processes, by the entry point `vllm.general_plugins`; a trainer calls it once.
`source` says which weights a trainer sends.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
import re

from torch_overlay.errors import TransferFailed
from torch_overlay.show.words import counted

BACKEND = "torch_overlay"
# A worker whose landings have changed refuses its run with these words. All ranks then plan anew, and send again.
MOVED = "its landings have changed"
logger = logging.getLogger("torch_overlay")

_BASE = "vllm.distributed.weight_transfer.base"
# The oldest vLLM that gives a worker's engine the model. In 0.24 the worker itself begins and ends vLLM's reload; since
# 0.27 the engine does, and trainers' engines have a base class and a factory. A trainer of ours needs neither.
OLDEST = "0.24"


def register() -> None:
    """Register the engine with those factories that this vLLM has; log which one lacks. A second call registers
    nothing.

    Never raises, and logs a warning instead: vLLM calls plugins without a guard, also in processes of people who never
    ask for this engine. The engine itself is imported when somebody asks for it by name; if this vLLM is too old, that
    error says which one is needed.
    """
    try:
        _register()
    except Exception:
        logger.warning("the engine %r is not registered", BACKEND, exc_info=True)


def _register() -> None:
    """As `register`, but pass on errors of a factory that isn't as we know it, or of vLLM's import."""
    factories = _try_import("vllm.distributed.weight_transfer.factory")[0]
    for factory, side, name in (
        ("WeightTransferEngineFactory", "worker", "WorkerEngine"),
        ("WeightTransferTrainerFactory", "trainer", "TrainerEngine"),
    ):
        registry = getattr(factories, factory, None)
        if registry is not None:
            if BACKEND not in registry._registry:
                registry.register_engine(BACKEND, f"{__name__}.{side}", name)
        elif side == "worker":
            logger.info("the engine %r is not registered: %s", BACKEND, _needed_vllm())
        elif factories is not None:
            logger.info("this vLLM has no factory for trainers: call %s.trainer.TrainerEngine.trainer_init", __name__)


def require_worker() -> None:
    """Check that the installed vLLM is new enough for a worker's engine."""
    base, error = _try_import(_BASE)
    engine = getattr(base, "WeightTransferEngine", None)
    if engine is None or "model" not in inspect.signature(engine.__init__).parameters:
        raise ImportError(f"The engine {BACKEND!r} can't be used here: {_needed_vllm()}.") from error


def base_class(name: str) -> type:
    """Return a base class of vLLM's; `object` if vLLM isn't installed, or is too old to have it."""
    found: type = getattr(_try_import(_BASE)[0], name, object)
    return found


def name_worker(error: Exception | None, trainers: int) -> None:
    """If an error names a rank that is a worker, append which of vLLM's workers it is: workers have the ranks after the
    `trainers`. Only the first is explained; ranks after "over", those of the whole place, are skipped. Only a
    ValueError, RuntimeError or TransferFailed itself, not of a subclass, is changed.

    >>> error = RuntimeError("rank 5 didn't come within 300 s.")
    >>> name_worker(error, trainers=4)
    >>> str(error)
    "rank 5 didn't come within 300 s. (With 4 trainers, rank 5 of the place is vLLM's worker 1.)"
    >>> error = RuntimeError("ranks 1, 3-6 didn't come within 300 s.")
    >>> name_worker(error, trainers=4)
    >>> str(error)
    "ranks 1, 3-6 didn't come within 300 s. (With 4 trainers, rank 4 of the place is vLLM's worker 0.)"
    """
    if type(error) in (ValueError, RuntimeError, TransferFailed) and "rank" in str(error):
        blamed = re.sub(r"\bover ranks [\d, -]+", "", str(error))  # not all that a Transfer has
        said = re.findall(r"\branks? (\d+(?:-\d+)?(?:, \d+(?:-\d+)?)*)", blamed)
        spans = [part.partition("-") for each in said for part in each.split(", ")]
        rank = next((max(int(first), trainers) for first, _, last in spans if int(last or first) >= trainers), None)
        if error is not None and rank is not None:
            who = f"rank {rank} of the place is vLLM's worker {rank - trainers}"
            more = f"(With {counted(trainers, 'trainer')}, {who}.)"
            error.args = (f"{error} {more}",)


def _needed_vllm() -> str:
    """Return which vLLM a worker needs, and which is installed, as a part of a sentence."""
    need = f"a worker needs vLLM {OLDEST} or newer"
    try:
        return f"{need}, and {importlib.metadata.version('vllm')} is installed"
    except importlib.metadata.PackageNotFoundError:
        return f"{need}, and none is installed"


def _try_import(name: str) -> tuple[object, ImportError | None]:
    """Import a module of vLLM's. Returns it and None; or None and the error, if this vLLM doesn't have it."""
    try:
        return importlib.import_module(name), None
    except ImportError as error:
        return None, error
