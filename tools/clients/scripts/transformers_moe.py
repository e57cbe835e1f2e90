"""transformers: a Qwen3 mixture of experts with random weights is loaded, trained, saved and loaded again."""

from __future__ import annotations

import torch
import torch.distributed as dist
from clients.inside import REPEATS, Session
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer
from transformers.distributed import (
    DistributedConfig,
    gather_full_state_dict,
    load_optimizer_distributed,
    save_optimizer_distributed,
)

STEPS = 3
CONFIG = Qwen3MoeConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    moe_intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
)


def main() -> None:
    session = Session()
    dist.init_process_group("gloo")
    random, shards, state = (str(session.folder / name) for name in ("random", "shards", "optimizer"))
    if session.rank == 0:
        Qwen3MoeForCausalLM(CONFIG).save_pretrained(random)
    dist.barrier()

    def load(folder: str) -> Qwen3MoeForCausalLM:
        degrees = DistributedConfig(fsdp_size=4, tp_size=2, ep_size=4)
        return Qwen3MoeForCausalLM.from_pretrained(folder, distributed_config=degrees, dtype=torch.float32)

    model = session.phase("from_pretrained", lambda: load(random))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    train(session, model, optimizer, clip=False)
    session.keep("weights", model.state_dict())
    session.phase(
        "save_pretrained, distributed", lambda: model.save_pretrained(shards, distributed_checkpoint=True), REPEATS
    )
    session.phase("save_optimizer_distributed", lambda: save_optimizer_distributed(model, optimizer, state), REPEATS)
    session.phase("load_optimizer_distributed", lambda: load_optimizer_distributed(model, optimizer, state), REPEATS)
    session.keep("whole model", session.phase("gather_full_state_dict", lambda: gather_full_state_dict(model), REPEATS))
    session.keep("optimizer", moments(optimizer))
    again = session.phase("from_pretrained, distributed", lambda: load(shards))
    session.keep("weights after loading", again.state_dict())
    train(session, model, optimizer, clip=True)
    session.keep("weights after clipping", model.state_dict())
    session.close()


def train(session: Session, model: Qwen3MoeForCausalLM, optimizer: torch.optim.Optimizer, clip: bool) -> None:
    """Some steps; with clipping as transformers' Trainer does it over the meshes of the dense part and the experts."""
    for batch in torch.randint(CONFIG.vocab_size, (STEPS, 4, 2, 16))[:, session.rank // 2]:  # one batch for a tp group
        loss = session.phase("forward and backward", lambda batch=batch: gradients(model, batch))
        session.loss(loss)
        if clip:
            norm = session.phase(
                "clip the norm of the gradient", lambda: Trainer._mixed_mesh_grad_norm(None, model, max_norm=0.1)
            )
            session.loss(norm)
        session.phase("optimizer's step", optimizer.step)
        optimizer.zero_grad()


def gradients(model: Qwen3MoeForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    return loss


def moments(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """What the optimizer remembers, by number and name."""
    return {
        f"{number}.{name}": value
        for number, state in enumerate(optimizer.state.values())
        for name, value in state.items()
    }


if __name__ == "__main__":
    main()
