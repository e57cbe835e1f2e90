"""A checkpoint into shards on 4 gloo ranks: a `Transfer` beside DCP's safetensors reader and transformers.

A Llama of random weights in four files, into parameters cut by tensor parallelism, and by FSDP2 x TP. All ways read the
same files in the same processes, in turns, warm (the files are in the page cache) and cold (`posix_fadvise` drops them
from it before each turn); every result is compared with the tensors in the files. A turn makes its `Transfer`, or its
reader, anew. transformers has a part only if it is installed (with accelerate), and only for tensor parallelism; it
builds its model in each turn, and the others are given theirs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import pathlib
import sys
import tempfile
from typing import TYPE_CHECKING, Any
from unittest import mock

from . import process
from .clock import seconds_of_all_ranks, summed
from .report import Report, Row, Target
from .sides import in_turns

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

OURS, DCP, TRANSFORMERS = "Transfer", "DCP", "transformers"
HIDDEN, INNER, HEADS, VOCABULARY = 1024, 2816, 16, 8192
FILES = 4
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
ROWS = ("o_proj", "down_proj")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=12, help="of 26 MB each, beside 34 MB")
    parser.add_argument("--rounds", type=int, default=3, help="of two turns, there and back through the ways")


def run(arguments: argparse.Namespace, report: Report) -> None:
    with tempfile.TemporaryDirectory() as folder:
        size = write(pathlib.Path(folder), arguments.layers)
        print(f"checkpoint: {size / 1e6:.0f} MB in {FILES} files, 4 gloo ranks", file=sys.stderr)
        results = process.ranks("checkpoint:measure", 4, folder=folder, rounds=arguments.rounds)
    for layout, caches in results["layouts"].items():
        for cache, ways in caches.items():
            where = {"layout": layout, "cache": cache}
            for way, turns in ways.items():
                if way == OURS:
                    continue
                for clock in ("wall", "cpu"):
                    least = [min(turn[clock] for turn in some) for some in (turns, ways[OURS])]
                    report.rows.append(Row(f"{clock}, {way} beside", "s", *least, where))
        report.rows.append(Row("bytes from rank to rank", "B", None, results[f"sent, {layout}"], {"layout": layout}))
    report.facts["checkpoint"] = results
    report.notes.append(
        "stock is the way that the row names, ours a Transfer from checkpoint(); the least of all turns"
    )
    report.targets.append(Target("wrong tensors", results["wrong"], 0))
    report.targets.append(Target("bytes that a Transfer reads, over those of all tensors", results["read"] / size, 1.0))


def write(folder: pathlib.Path, layers: int) -> int:
    import torch
    from safetensors.torch import save_file

    shapes = {"model.embed_tokens": (VOCABULARY, HIDDEN), "model.norm": (HIDDEN,), "lm_head": (VOCABULARY, HIDDEN)}
    for layer in range(layers):
        block = f"model.layers.{layer}"
        shapes |= {f"{block}.{name}_layernorm": (HIDDEN,) for name in ("input", "post_attention")}
        shapes |= {f"{block}.self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
        shapes |= {f"{block}.mlp.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes[f"{block}.mlp.down_proj"] = (HIDDEN, INNER)
    names = [f"{name}.weight" for name in shapes]
    tensors = [torch.randn(shape).bfloat16() for shape in shapes.values()]
    weight_map, total = {}, sum([tensor.nbytes for tensor in tensors])
    per_file = -(-len(names) // FILES)
    for number in range(FILES):
        some = range(number * per_file, min((number + 1) * per_file, len(names)))
        file = f"model-{number + 1:05}-of-{FILES:05}.safetensors"
        save_file({names[n]: tensors[n] for n in some}, folder / file, metadata={"format": "pt"})
        weight_map |= {names[n]: file for n in some}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
        "num_hidden_layers": layers, "vocab_size": VOCABULARY, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return total


# --- on every rank


def measure(rank: int, folder: str, rounds: int) -> dict[str, Any]:
    from safetensors.torch import load_file
    from torch.distributed.device_mesh import init_device_mesh

    files = sorted(pathlib.Path(folder).glob("*.safetensors"))
    whole = {name: tensor.clone() for file in files for name, tensor in load_file(file).items()}
    results = dict[str, Any](layouts={}, wrong=0)
    layouts = {
        "TP 4": init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)),
        "FSDP2 2 x TP 2": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
    }
    has_transformers = all(map(importlib.util.find_spec, ("transformers", "accelerate")))
    for layout, mesh in layouts.items():
        ways = (OURS, DCP, TRANSFORMERS) if has_transformers and mesh.ndim == 1 else (OURS, DCP)
        caches = results["layouts"][layout] = {}
        for cache in ("warm", "cold"):

            def turn(way: str, mesh: DeviceMesh = mesh, is_cold: bool = cache == "cold") -> dict[str, float]:
                if is_cold and rank == 0:
                    drop_from_cache(files)
                load = LOADS[way](folder, mesh, whole)
                figures = seconds_of_all_ranks(load)
                results["wrong"] += int(summed(wrong(load.parameters, whole)))
                return figures

            caches[cache] = in_turns(turn, rounds, ways)
    with counted() as read:
        LOADS[OURS](folder, layouts["TP 4"], whole)()
    results["read"] = summed(read[0])
    for layout, mesh in layouts.items():
        load = Ours(folder, mesh, whole)
        load()
        results[f"sent, {layout}"] = load.sent
    return results


def drop_from_cache(files: list[pathlib.Path]) -> None:
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


@contextlib.contextmanager
def counted() -> Any:
    """Count the bytes that this process reads by `os.preadv`: yields a list of one number."""
    read, preadv = [0], os.preadv

    def count(*given: Any) -> int:
        size = preadv(*given)
        read[0] += size
        return size

    with mock.patch("os.preadv", count):
        yield read


def wrong(parameters: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> int:
    return sum([not local(shard).equal(local(as_shard(shard, whole[name]))) for name, shard in parameters.items()])


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def as_shard(like: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Cut a tensor as a DTensor is cut, without sending anything."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


class Load:
    """One way of loading; a call is what is timed. `parameters` are there after it."""

    def __init__(self, folder: str, mesh: DeviceMesh, whole: dict[str, torch.Tensor]) -> None:
        import torch
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        self.folder, self.mesh = folder, mesh
        self.parameters: dict[str, torch.Tensor] = {}
        if type(self) is Transformers:
            return
        for name, tensor in whole.items():
            kind = name.split(".")[-2]
            cut = Shard(0) if kind in COLUMNS else Shard(1) if kind in ROWS else Replicate()
            placements = [Shard(0)] * (mesh.ndim - 1) + [cut]
            zeros = torch.zeros_like(tensor)
            self.parameters[name] = distribute_tensor(zeros, mesh, placements, src_data_rank=None)

    def __call__(self) -> None:
        raise NotImplementedError


class Ours(Load):
    def __call__(self) -> None:
        import torch_overlay

        with torch_overlay.Transfer(torch_overlay.checkpoint(self.folder), self.parameters) as transfer:
            transfer.run()
            self.sent = sum([sent for sent, *_ in transfer.traffic.values()])


class ByDCP(Load):
    def __call__(self) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(self.parameters, storage_reader=dcp.HuggingFaceStorageReader(self.folder))


class Transformers(Load):
    def __call__(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.distributed import DistributedConfig
        from transformers.utils import logging

        logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=torch.bfloat16, distributed_config=DistributedConfig(tp_plan="auto")
        )
        self.parameters = dict(model.named_parameters())


LOADS = {OURS: Ours, DCP: ByDCP, TRANSFORMERS: Transformers}
