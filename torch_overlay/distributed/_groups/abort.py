"""Abort: end all groups of a mesh at once, for ranks whose peers died."""

from __future__ import annotations

from threading import Thread
from typing import TYPE_CHECKING

from torch.distributed import distributed_c10d

from .._mesh.caches import forget_shardings, forget_views
from .._mesh.state import group_names, shared_state
from .table import find_group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def abort_groups(mesh: DeviceMesh) -> None:
    """Abort every group that a root mesh and its views own, each once, and take them out of c10d's books.

    The default group stays, and so do groups that other universes use, too: they aren't this mesh's to end.
    """
    groups = _owned(mesh)
    try:
        failed = _aborted_together(groups)
    finally:
        for group in groups:
            distributed_c10d._cleanup_process_group_global_state(group)
        shared = shared_state(mesh)
        shared.registry.clear()
        shared.flattened.clear()  # whose groups are gone
        forget_views(shared)
        forget_shardings()  # their meshes hold the groups that are gone
        # What is made from now on is made anew, for a loaded mesh as well.
        shared.universe = shared.saved_number = None
    if failed:
        raise failed[0]


def _aborted_together(groups: Sequence[ProcessGroup]) -> list[BaseException]:
    """Abort all of them at the same time, each in a thread of its own; returns what failed.

    The abort of one communicator may wait for work that only the abort of another one ends. A group call of the caller
    (ncclGroupStart) doesn't help: it is of its thread, and ProcessGroupNCCL aborts in another one.
    """
    failed: list[BaseException] = []

    def abort(group: ProcessGroup) -> None:
        try:
            group.abort()
        except BaseException as error:
            failed.append(error)

    threads = [Thread(target=abort, args=(group,)) for group in groups]  # no pool: it ends before exit handlers run
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failed


def _owned(mesh: DeviceMesh) -> list[ProcessGroup]:
    shared = shared_state(mesh)
    names = dict.fromkeys((*(group_names(mesh) or ()), *shared.registry))
    if shared.universe is not None:
        names |= dict.fromkeys(entry.group_name for entry in shared.universe.table.entries.values())
    found = [find_group(name) for name in names if name]
    default = distributed_c10d._get_default_group() if distributed_c10d.is_initialized() else None
    return [group for group in found if group is not None and group is not default]
