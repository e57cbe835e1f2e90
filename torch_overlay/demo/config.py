"""What a run of the demo is: sizes of the model, degrees of parallelism, steps. Pure values, checked at birth."""

from __future__ import annotations

from dataclasses import dataclass

_DEGREES = ("ranks", "dp_replicate", "dp_shard", "tp", "ep")
_SIZES = ("width", "heads", "layers", "experts", "seq", "batch")


@dataclass(frozen=True)
class Config:
    """Everything that a worker must know, the same on every rank and in both runs.

    Degrees count ranks: `dp_replicate * dp_shard * tp == ranks`, and experts spread over `ep` of the `dp_shard * tp`
    ranks of one replica. Sizes count elements, `batch` sequences of a global step, `seq` tokens.

    Raises ValueError with what was needed and what came if the sizes don't fit the degrees.
    """

    ranks: int = 8
    dp_replicate: int = 2
    dp_shard: int = 2
    tp: int = 2
    ep: int = 2
    width: int = 64
    heads: int = 4
    layers: int = 2
    experts: int = 4
    top_k: int = 2
    seq: int = 64
    batch: int = 16
    steps: int = 24
    warmup: int = 2
    rate: float = 3e-3
    clip: float = 1.0
    seed: int = 0
    text_bytes: int = 1_000_000
    dtype: str = "float32"
    device: str = "cpu"
    flatten: bool = False  # make the groups that the norms and whole weights lack: see `joined`

    def __post_init__(self) -> None:
        for name in (*_DEGREES, *_SIZES):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        product = self.dp_replicate * self.dp_shard * self.tp
        if product != self.ranks:
            raise ValueError(
                f"dp_replicate * dp_shard * tp must be the number of ranks, got "
                f"{self.dp_replicate} * {self.dp_shard} * {self.tp} = {product} for {self.ranks} ranks"
            )
        self._check_multiple("dp_shard * tp", self.dp_shard * self.tp, "ep", self.ep)
        self._check_multiple("experts", self.experts, "ep", self.ep)
        self._check_multiple("heads", self.heads, "tp", self.tp)
        self._check_multiple("width", self.width, "2 * heads", 2 * self.heads)
        self._check_multiple("width", self.width, "efsdp", self.efsdp)
        self._check_multiple("seq", self.seq, "tp", self.tp)
        self._check_multiple("batch", self.batch, "dp_replicate * dp_shard", self.dp)
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top_k must be between 1 and experts ({self.experts}), got {self.top_k}")
        if self.warmup < 1 or self.steps < self.warmup + 2:
            raise ValueError(
                f"steps must be at least warmup + 2 (a step to time, a step to count), with warmup at least 1; "
                f"got {self.steps} steps and warmup {self.warmup}"
            )
        if self.text_bytes <= self.seq:
            raise ValueError(f"text_bytes must be more than seq ({self.seq}), got {self.text_bytes}")

    def _check_multiple(self, name: str, value: int, divisor_name: str, divisor: int) -> None:
        if value % divisor:
            raise ValueError(f"{name} must be a multiple of {divisor_name}, got {value} and {divisor}")

    @property
    def dp(self) -> int:
        """Ranks that read different data: the size of the batch axis."""
        return self.dp_replicate * self.dp_shard

    @property
    def efsdp(self) -> int:
        """Ranks over which one expert's weights are sharded."""
        return self.dp_shard * self.tp // self.ep

    @property
    def joined(self) -> list[tuple[str, str]]:
        """The two axes that cut a dense weight, and those that cut an expert's, where both have several ranks.

        A norm of such weights is a sum over both axes, and a whole one is gathered from both.
        """
        pairs = {("fsdp", "tp"): (self.dp_shard, self.tp), ("efsdp", "ep"): (self.efsdp, self.ep)}
        return [axes for axes, sizes in pairs.items() if min(sizes) > 1]

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.seq
