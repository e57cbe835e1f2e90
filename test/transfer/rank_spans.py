"""A transfer as its users see it from outside: spans in a profile, lines in the log, the description of its group."""

import logging

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.profiler import ProfilerActivity, profile

import torch_overlay
from mesh_ranks import WORLD, make_root
from rank_changes import cut

R, S = Replicate(), Shard


class SpanCases:
    """Cases for ``EightRanks``."""

    def spans(self, act):
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            act()
        names = [event.name for event in seen.events() if event.name.startswith("torch_overlay::")]
        return [name.removeprefix("torch_overlay::") for name in names]

    def test_spans_of_a_transfer(self):
        mesh = make_root(range(WORLD), (8,), ("dp",))
        source, target = cut(torch.ones(1 << 16), mesh, [S(0)]), cut(torch.zeros(1 << 16), mesh, [R])
        with torch_overlay.Transfer({"w": source}, {"w": target}, budget=1 << 17) as transfer:
            count = transfer.exchanges
            self.assertGreater(count, 1)
            found = self.spans(transfer.run)
        self.assertEqual(found[0], "Transfer of 1 tensor")
        wanted = [
            f"exchange {n} of {count}, {what}" for n in range(1, count + 1) for what in ("pack", "unpack", "wait")
        ]
        self.assertEqual(sorted(found[1:]), sorted(wanted))

    def test_spans_of_a_tree(self):
        mesh, other = make_root(range(WORLD), (8,), ("dp",)), make_root(range(WORLD), (4, 2), ("dp", "tp"))
        tree = [cut(torch.ones(16), mesh, [S(0)]) for _ in range(3)]
        for how in ({}, {"device_mesh": other}):
            found = self.spans(lambda how=how: torch_overlay.redistribute(tree, placements=R, **how))
            self.assertEqual(found[0], "redistribute 3 tensors")
            self.assertIn("exchange 1 of 1, wait", found)

    def test_a_transfer_in_the_log(self):
        mesh = make_root(range(WORLD), (8,), ("dp",))
        source, target = cut(torch.ones(16), mesh, [S(0)]), cut(torch.zeros(16), mesh, [R])
        with (
            self.assertLogs("torch_overlay", logging.DEBUG) as seen,
            torch_overlay.Transfer([source], [target]) as made,
        ):
            self.assertEqual(made._route._team.group.group_desc, "torch_overlay_transfer")
            lines = "\n".join(seen.output)
        self.assertIn("made torch_overlay_transfer, the process group ", lines)
        self.assertIn("of ranks 0-7", lines)
        self.assertIn("planned 1 tensors from ranks 0-7 to ranks 0-7, budget 256.0 MiB\n1 exchanges", lines)
