"""What a type checker must take and what it must refuse; it is checked, by lint and in test_typing.py, and never run.

A line that must be refused has the error's code in its `ignore`; one that is taken nevertheless is an unused `ignore`,
which mypy reports here.
"""

from torch.distributed.tensor import DTensor
from torch.nn import Module

import torch_overlay
from torch_overlay.choices import Choices
from torch_overlay.loading.landings import Landings
from torch_overlay.parallel_dims import ParallelDims
from torch_overlay.report import Status
from torch_overlay.show.drawing import Drawing
from torch_overlay.show.explanation import Explanation
from torch_overlay.typing import Options, OverlayMesh


def right(tensor: DTensor, mesh: OverlayMesh) -> None:
    status: Status = torch_overlay.enable(flatten="existing", share_groups="ranks", check_mesh=True, strict=False)
    chosen: Options = {"create": "world", "leave_out": ["cross_mesh"]}
    with torch_overlay.enabled(**chosen) as inside, torch_overlay.private_groups():
        status = inside
    chosen_now: Choices = torch_overlay.options()
    explanation: Explanation = torch_overlay.explain(tensor, "R,S1")
    explanation = torch_overlay.explain(tensor, "R,S1", out="plans.png")
    drawing: Drawing = torch_overlay.draw(mesh, out="mesh.png", gpus_per_host=4)
    other: OverlayMesh = mesh.permute(("tp", "dp"))["tp"].flatten("all").unflatten("all", (2,), ("tp",))
    dims: ParallelDims = torch_overlay.parallel_dims.ParallelDims(tp=2)
    torch_overlay.prepare(other)
    found: Landings = torch_overlay.landings(print, Module(), {"w": tensor}, depends_on=[1])
    print(found.stale(), found.target(), found.as_data()["direct"])
    torch_overlay.disable(force=True)
    print(status, chosen_now.flatten, explanation.plan.collectives, drawing, dims.tp)


def wrong(tensor: DTensor, mesh: OverlayMesh) -> None:
    torch_overlay.enable(flaten="whole")  # type: ignore[call-arg]
    torch_overlay.enable(flatten="any")  # type: ignore[arg-type]
    torch_overlay.enable(share_groups=True)  # type: ignore[arg-type]
    torch_overlay.enabled(check_mesh="maybe")  # type: ignore[arg-type]
    torch_overlay.private_groups(mesh)  # type: ignore[call-arg]
    torch_overlay.landings(Module(), {"w": tensor})  # type: ignore[call-arg]
    torch_overlay.explain()  # type: ignore[call-overload]
    torch_overlay.explain(1, 3)  # type: ignore[call-overload]
    torch_overlay.draw(mesh, file="mesh.png")  # type: ignore[call-arg]
    mesh.permute(3)  # type: ignore[arg-type]
    mesh.submesh_at("tp")  # type: ignore[call-arg]
    torch_overlay.explian(tensor, "R")  # type: ignore[attr-defined]
