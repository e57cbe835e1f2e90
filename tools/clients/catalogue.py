"""The clients: what each is, which script runs it on how many ranks, and which packages it needs."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import pathlib

SCRIPTS = pathlib.Path(__file__).parent / "scripts"
EARLIER = SCRIPTS / "earlier"


@dataclasses.dataclass(frozen=True)
class Client:
    """One program.

    Attributes:
        name: of its script, without the ending.
        title: as the table says it.
        needs: names on PyPI of what must be installed beside torch, in the order that matters to a reader.
    """

    name: str
    title: str
    needs: tuple[str, ...] = ()
    ranks: int = 8
    folder: pathlib.Path = SCRIPTS

    @property
    def script(self) -> pathlib.Path:
        return self.folder / f"{self.name}.py"

    def versions(self) -> dict[str, str]:
        """The release of each package that it needs. Raises Missing, naming all that aren't installed."""
        found, missing = {}, []
        for name in self.needs:
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                missing.append(name)
        if missing:
            raise Missing(f"{' and '.join(missing)} not installed here")
        return found


class Missing(Exception):
    """A client can't run here for want of a package: a skip, whose reason this is."""


CLIENTS = (
    Client("transformers_moe", "transformers: Qwen3-MoE, fsdp 4, tp 2, ep 4", ("transformers", "accelerate")),
    Client("accelerate_mesh", "accelerate's ParallelismConfig, dp_shard 4, tp 2", ("accelerate",)),
    Client("torchtitan_meshes", "torchtitan's ParallelDims, dp_shard 2, cp 2, tp 2, ep 4", ("torchtitan",)),
    Client(
        "torchtitan_spmd",
        "torchtitan on spmd_types, dp_replicate 2, dp_shard 2, tp 4, ep 4",
        ("torchtitan", "spmd_types"),
        ranks=16,
    ),
    Client("nemo_meshes", "NeMo Automodel's meshes", ("nemo-automodel",)),
    Client("megatron_fsdp_index", "Megatron-FSDP's index of meshes", ("megatron-fsdp",)),
    Client("torch_dcp", "torch.distributed.checkpoint, FSDP2 4, TP 2"),
    Client("torch_muon", "torch.optim.Muon, FSDP2 4, TP 2"),
)

# On torch before 2.13, with libraries of that time.
OF_THEIR_TIME = (
    Client("accelerate_mesh", "accelerate's ParallelismConfig, dp_shard 4, tp 2", ("accelerate",)),
    Client(
        "torchtitan_0_2", "torchtitan's ParallelDims, dp_shard 2, cp 2, tp 2, ep 4", ("torchtitan",), folder=EARLIER
    ),
    Client("nemo_0_2", "NeMo Automodel's FSDP2Manager", ("nemo-automodel",), folder=EARLIER),
    Client("nemo_0_3", "NeMo Automodel's meshes, after its own patches of torch", ("nemo-automodel",), folder=EARLIER),
    Client("nemo_meshes", "NeMo Automodel's meshes", ("nemo-automodel",)),
)
