"""Teams: the ranks that exchange, whatever world they come from, and what they tell one another."""

from __future__ import annotations

import json
from inspect import unwrap
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup


class Team(NamedTuple):
    """A process group with who is in it.

    Attributes:
        group: None where nothing is sent.
        ranks: by their place in the group.
        rank: this one.
        name: of the group.
    """

    group: ProcessGroup | None
    ranks: tuple[int, ...]
    rank: int
    name: str = ""

    @staticmethod
    def of(group: ProcessGroup | None) -> Team:
        """The ranks of a group of torch's; those of the world, if there is none."""
        name = "" if group is None else group.group_name
        return Team(group, tuple(dist.get_process_group_ranks(group)), dist.get_rank(), name)

    @property
    def is_fake(self) -> bool:
        """Whether nothing is sent, by torch's fake backend."""
        return self.group is not None and distributed_c10d._world.pg_map.get(self.group, ("",))[0] == "fake"

    def destroy(self) -> None:
        """Destroy the group, unless c10d doesn't know it: a place's, or one whose world was destroyed before."""
        if self.group is not None and self.group in distributed_c10d._world.pg_map:
            dist.destroy_process_group(self.group)

    def gathered(self, own: torch.Tensor) -> torch.Tensor:
        """The vectors of all ranks, a row each, in the order of their places. Collective."""
        every = own.new_empty(len(self.ranks), len(own))
        self.call(dist.all_gather)([*every.unbind()], own, group=self.group)
        return every

    def call(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        """A collective of c10d's, for this group.

        Where one fails, c10d asks for the group's backend to log it, and a place's group is none that it knows: people
        read "Process group not initialized in the world group map" in place of what failed. So without that log there.
        """
        is_known = self.group is None or self.group in distributed_c10d._world.pg_map
        return collective if is_known else unwrap(collective)

    def told(self, said: Any, device: torch.device) -> dict[int, Any]:
        """What each rank says, by rank: what JSON takes. Collective; the host waits for the device twice."""
        data = torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8).to(device)
        lengths = [length for (length,) in self.gathered(torch.tensor([len(data)], device=device)).tolist()]
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
        padded[: len(data)] = data
        every = self.gathered(padded).tolist()
        texts = [bytes(each[:length]) for each, length in zip(every, lengths)]
        return {rank: json.loads(text) for rank, text in zip(self.ranks, texts)}
