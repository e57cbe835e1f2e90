"""The demo's parallel model does what the whole model on one process does: same loss, same gradient of every weight."""

import contextlib
import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import _redistribute
from torch.testing._internal.distributed.fake_pg import FakeStore

import forks
import torch_overlay
from torch_overlay.demo.counters import count_collectives
from torch_overlay.demo.model import build_model, byte_loss
from torch_overlay.demo.train import Config
from torch_overlay.demo.training import Text, Trainer, build_meshes, whole
from width import sample

# float64, so that a token near the border of two experts goes the same way, and a wrong factor can't hide in rounding.
_SMALL = {"width": 16, "heads": 4, "seq": 8, "batch": 8, "text_bytes": 20_000, "dtype": "float64"}
CONFIGS = {
    "default": Config(**_SMALL, dp_replicate=2),
    "ep over a replica": Config(**_SMALL, dp_replicate=2, ep=4),
    "ep across tp": Config(**_SMALL, dp_replicate=1, dp_shard=4, tp=2, ep=4),
    "no tp": Config(**_SMALL, dp_replicate=2, dp_shard=4, tp=1, ep=2),
    "no replicas, no ep": Config(**_SMALL, dp_replicate=1, dp_shard=2, tp=4, ep=1, layers=4, top_k=1),
}
TRAINED = ["default", *sample([*CONFIGS][1:], 2, 1)]


def _one_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), 8)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=8)
    answers = {}
    for name in TRAINED:
        config = CONFIGS[name]
        trainer = Trainer(config, build_meshes(config))
        loss = trainer.backward(step=0)
        grads = {key: whole(weight.grad) for key, weight in trainer.model.named_parameters()}
        trainer.clip()
        clipped = {key: whole(weight.grad) for key, weight in trainer.model.named_parameters()}
        answers[name] = (loss, grads, clipped)
    torch.save(answers, os.path.join(folder, f"rank{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


def _counts(overlay: bool, flatten: bool) -> tuple[int, int]:
    """Collectives of clipping and of a full save, of the demo's own configuration, in a world of the fake backend."""
    # Torch keeps results of equal meshes, with the mesh that came first and its groups.
    torch._C._clear_DTensor_sharding_propagator_cache()
    with torch_overlay.enabled() if overlay else contextlib.nullcontext():
        config = CONFIGS["default"]
        meshes = build_meshes(config)
        for axes in [("fsdp", "tp"), ("efsdp", "ep")] if flatten else []:  # the axes that cut a weight get a group
            meshes[axes]._flatten("_".join(axes))
        trainer = Trainer(config, meshes)
        for weight in trainer.model.parameters():  # a step would send numbers of tokens, and here nothing arrives
            weight.grad = torch.ones_like(weight)
        return tuple(sum(count_collectives(call)[1].values()) for call in (trainer.clip, trainer.full_state))


@pytest.fixture
def fake_world():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> list[dict]:
    """What each of 8 ranks computed for every config, in one spawn."""
    folder = str(tmp_path_factory.mktemp("gradients"))
    processes = [forks.context().Process(target=_one_rank, args=(rank, folder), daemon=True) for rank in range(8)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(200)
        assert [process.exitcode for process in processes] == [0] * 8
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    return [torch.load(os.path.join(folder, f"rank{rank}.pt")) for rank in range(8)]


def _reference(config: Config) -> tuple[torch.Tensor, dict[str, torch.Tensor], float]:
    """(loss, gradients, their norm) of the whole model on the whole batch, on this process."""
    model = build_model(config)
    loss = byte_loss(model, *Text(config.text_bytes, least=100).batch(0, config.batch, config.seq, config.seed))
    loss.backward()
    grads = {name: weight.grad for name, weight in model.named_parameters()}
    norm = float(torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads.values()])))
    return loss.detach(), grads, norm


@pytest.mark.parametrize("name", TRAINED)
def test_gradients_of_parallel_model_are_those_of_whole_model(answers, name):
    loss, grads, norm = _reference(CONFIGS[name])
    assert norm > CONFIGS[name].clip, "the gradient must be long enough to be clipped, or clipping isn't tested"
    for rank in range(8):
        their_loss, their_grads, clipped = answers[rank][name]
        torch.testing.assert_close(their_loss, loss, rtol=1e-12, atol=0)
        assert their_grads.keys() == grads.keys()
        for key, grad in grads.items():
            torch.testing.assert_close(their_grads[key], grad, rtol=1e-9, atol=1e-12, msg=lambda m, k=key: f"{k}: {m}")
            torch.testing.assert_close(clipped[key], grad * CONFIGS[name].clip / norm, rtol=1e-5, atol=1e-12)


MERGED = 2 if hasattr(_redistribute, "NestedRedistribute") else 4  # before 2.12, stock merges no norms


@pytest.mark.parametrize(
    "overlay, flatten, counts",
    [(False, False, (4, 34)), (False, True, (MERGED, 34)), (True, False, (4, 29)), (True, True, (2, 3))],
)
def test_flattening_saves_an_all_reduce_and_the_overlay_gathers_a_mesh_at_once(fake_world, overlay, flatten, counts):
    """What the demo's table says of a step's collectives and of a full save's, with flattened meshes and without."""
    assert _counts(overlay, flatten) == counts


def test_every_expert_is_asked():
    """Else a gradient of zero would agree with anything."""
    for config in CONFIGS.values():
        grads = _reference(config)[1]
        experts = [grad for name, grad in grads.items() if name.endswith("experts.up")]
        assert experts and all(bool((grad.abs().amax((1, 2)) > 0).all()) for grad in experts)
