"""For type checkers: the options of `enable`, and `DeviceMesh` with the methods that the overlay adds.

    from torch_overlay.typing import OverlayMesh

    mesh = typing.cast(OverlayMesh, init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp")))
    mesh.permute(("tp", "dp"))  # known, and checked

Importing this imports no torch. When a program runs, `OverlayMesh` is `DeviceMesh` itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

__all__ = ["Options", "OverlayMesh"]


class Options(TypedDict, total=False):
    """What `torch_overlay.enable` and `torch_overlay.enabled` take by name."""

    share_groups: Literal["names", "ranks", "off"]
    create: Literal["members", "world"]
    flatten: Literal["whole", "existing"]
    check_mesh: bool | Literal["on", "off"]
    leave_out: Sequence[Literal["cross_mesh", "full_state_dict", "clip_grad_norm"]] | str


if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    class OverlayMesh(DeviceMesh):
        """A `DeviceMesh` under the overlay: the class is torch's own, and these are the methods that it gains."""

        def permute(self, mesh_dim_names: Sequence[str]) -> OverlayMesh: ...

        def submesh_at(self, mesh_dim_names: str | tuple[str, ...], at: Mapping[str, int]) -> OverlayMesh: ...

        def flatten(self, mesh_dim_name: str | None = None, backend_override: Any = None) -> OverlayMesh: ...

        def unflatten(
            self,
            dim: int | str,
            mesh_sizes: tuple[int, ...],
            mesh_dim_names: tuple[str, ...],
            backend_override: dict[str, Any] | None = None,
        ) -> OverlayMesh: ...

        @staticmethod
        def concatenate(device_mesh_list: list[OverlayMesh]) -> OverlayMesh: ...

        def abort(self) -> None: ...

        def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> OverlayMesh: ...


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Return torch's `DeviceMesh` for `OverlayMesh`.

        Raises:
            AttributeError: this module has no such name.
        """
        if name == "OverlayMesh":
            from torch.distributed.device_mesh import DeviceMesh

            return DeviceMesh
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
