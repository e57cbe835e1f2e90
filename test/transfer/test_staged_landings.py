"""Models that are loaded in one layout and served in another: what comes in stages equals what the loader and the step
make of whole tensors."""

import random

import torch
from torch.testing._internal.common_utils import TestCase, run_tests

import torch_overlay
from forks import free_port
from way import needs_package
from width import NIGHTLY


class Layer(torch.nn.Module):
    """A weight in the loader's layout, of which a step makes what is served."""

    def __init__(self, rng):
        super().__init__()
        self.rows, self.columns = 2 * rng.randint(1, 4), 4 * rng.randint(1, 3)
        self.step = rng.choice([*STEPS])
        pad = rng.choice((0, 2))
        self.parts = rng.choice((("w",), ("q", "k"), ("gate", "up", "more")))
        self.weight = torch.nn.Parameter(torch.empty(self.rows * len(self.parts) + pad, self.columns))
        self.weight.label = "as the loader wants it"
        self.bias = torch.nn.Parameter(torch.empty(self.rows * len(self.parts))) if rng.random() < 0.5 else None
        self.calculates = rng.random() < 0.2
        self.register_buffer("scale", torch.empty(()) if rng.random() < 0.3 else None)

    def load(self, part, tensor):
        assert self.weight.label == "as the loader wants it" and isinstance(self.weight, torch.nn.Parameter)
        if part == "scale":
            self.scale.copy_(tensor)
        elif part == "bias":
            self.bias.data.copy_(tensor[: len(self.bias)])
        else:
            at, mine = self.parts.index(part), tensor[self.rows : 2 * self.rows]  # of the second of two ranks
            self.weight.data[at * self.rows : (at + 1) * self.rows].copy_(mine * 2 if self.calculates else mine)
            self.weight.data[self.rows * len(self.parts) :].fill_(0)

    def shapes(self):
        found = dict.fromkeys(self.parts, (2 * self.rows, self.columns))
        found |= {} if self.bias is None else {"bias": (2 * len(self.bias),)}
        return found | ({} if self.scale is None else {"scale": ()})


def blocks(weight):
    scales = weight.unflatten(1, (-1, 4)).abs().amax(-1)
    return (weight / scales.repeat_interleave(4, 1).clamp(min=1e-6) * 127).round().to(torch.int8), scales


STEPS = {
    "none": lambda w: (w.clone(),),
    "permute": lambda w: (w[torch.arange(len(w)).flip(0)],),
    "pad": lambda w: (torch.nn.functional.pad(w, (0, 3, 0, 1)),),
    "interleave": lambda w: (torch.stack(w.chunk(2), 1).flatten(0, 1),),
    "transpose": lambda w: (w.T.contiguous(),),
    "blocks": blocks,
    "split": lambda w: tuple(each.clone() for each in w.chunk(2)),
}


class Model(torch.nn.Module):
    def __init__(self, seed):
        super().__init__()
        rng = random.Random(seed)
        self.layers = torch.nn.ModuleList(Layer(rng) for _ in range(rng.randint(1, 4)))
        if len(self.layers) > 2 and rng.random() < 0.3:  # tied
            self.layers[2].weight, self.layers[2].parts = self.layers[0].weight, ()
            self.layers[2].step, self.layers[2].bias = "none", None
        self.norm = torch.nn.Parameter(torch.empty(5))

    def shapes(self):
        found = {f"{n}.{part}": shape for n, layer in enumerate(self.layers) for part, shape in layer.shapes().items()}
        return found | {"norm": (5,)}

    def load(self, weights):
        for name, tensor in weights:
            if name == "norm":
                self.norm.data.copy_(tensor)
            else:
                number, part = name.split(".")
                self.layers[int(number)].load(part, tensor)


def serve(served):
    """A step that makes what is served of a module's weights."""

    def finish(name, module):
        made = [*STEPS[module.step](module.weight.data)]
        made += [each.detach().clone() for each in (module.bias, module.scale) if each is not None]
        assert all(each.device.type == "cpu" for each in made)
        served.setdefault(name, []).append(made)

    return finish


@needs_package
class TestStagedLandings(TestCase):
    @classmethod
    def setUpClass(cls):
        cls.place = torch_overlay.meet(f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)

    @classmethod
    def tearDownClass(cls):
        cls.place.close()

    def test_random_models(self):
        """Five hundred at night."""
        kinds = {"direct": 0, "whole": 0}
        for seed in range(500 if NIGHTLY else 40):
            torch.manual_seed(seed)
            real = Model(seed)
            tensors = {name: torch.randn(shape) for name, shape in real.shapes().items()}
            real.load(tensors.items())
            wanted = {}
            for number, layer in enumerate(real.layers):
                serve(wanted)(f"layers.{number}", layer)
            shell = Model(seed)
            norm = shell.norm
            shell.layers.to("meta")
            for layer in shell.layers:
                layer.weight.label = "as the loader wants it"
            if len(real.layers) > 2 and real.layers[2].weight is real.layers[0].weight:
                shell.layers[2].weight = shell.layers[0].weight
            before = {name: id(each) for name, each in shell.named_parameters()}
            found = torch_overlay.landings(shell.load, shell, tensors)
            self.assertEqual({*found.staged}, {*tensors} - {"norm"})
            kinds["direct"] += len({*found.staged} & {*found.direct})
            kinds["whole"] += len({*found.staged} & {*found.whole})
            served = {}
            with torch_overlay.Transfer(
                tensors, found.target(), group=self.place, stages=found.stages(serve(served))
            ) as sync:
                for _ in range(2):
                    served.clear()
                    sync.run()
                    found.load_whole()
                    self.assertEqual(served, wanted, f"seed {seed}", rtol=0, atol=0)
                    self.assertEqual(norm.data, tensors["norm"])
                    self.assertEqual({name: id(each) for name, each in shell.named_parameters()}, before)
            self.assertTrue(all(each.is_meta for each in shell.layers.parameters()))
        self.assertTrue(min(kinds.values()) > 10, kinds)

    def test_a_loader_that_does_otherwise_with_a_part_gets_all_in_one_stage(self):
        """Each stage gave its loader the tensors of one module, with which it does otherwise."""
        with torch.device("meta"):
            shell = torch.nn.Sequential(*[torch.nn.Linear(4, 4, bias=False) for _ in range(2)])
        served, tensors = {}, {str(n): torch.randn(4, 4) for n in range(2)}

        def load(weights):
            for name, weight in weights:
                shell[int(name)].weight.data.copy_(weight + len(weights))

        found = torch_overlay.landings(load, shell, tensors)
        stages = found.stages(lambda name, module: served.update({name: module.weight.detach().clone()}))
        with torch_overlay.Transfer(tensors, found.target(), group=self.place, stages=stages) as sync:
            sync.run()
        self.assertEqual(served, {name: weight + 2 for name, weight in tensors.items()})

    def test_what_comes_whole_to_one_place_keeps_its_order(self):
        """Two tensors go to a layer on meta each, and then, one after the other, to a norm that has memory."""
        with torch.device("meta"):
            shell = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4, bias=False) for name in "abc"})
        shell["norm"] = torch.nn.LayerNorm(4, bias=False)
        tensors = {name: torch.randn(4, 4) for name in "cba"}

        def load(weights):
            for name, weight in weights:
                shell[name].weight.data.copy_(weight * 2)
                if name != "c":
                    shell["norm"].weight.data.copy_(weight[0] * 2)

        found = torch_overlay.landings(load, shell, tensors)
        self.assertEqual([names for names, _ in found.groups], [["c"], ["b", "a"]])
        stages = found.stages(lambda name, module: None)[::-1]
        with torch_overlay.Transfer(tensors, found.target(), group=self.place, stages=stages) as sync:
            sync.run()
        self.assertEqual(shell["norm"].weight.data, tensors["a"][0] * 2)

    def test_a_module_that_gets_constants_alone_is_finished(self):
        """As a bias that the first rank alone has; also if the loader is asked for each tensor alone."""
        for scales in (False, True):
            with torch.device("meta"):
                shell = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2, bias=False) for name in "ab"})
            served = {}

            def load(weights, shell=shell, scales=scales):
                for name, weight in weights:
                    into = shell[name].weight.data
                    into.copy_(weight if name == "a" else weight.zero_())
                    if scales and name == "a":
                        into.mul_(1)

            tensors = {name: torch.ones(2, 2) for name in "ab"}
            found = torch_overlay.landings(load, shell, tensors)
            stages = found.stages(lambda name, module, to=served: to.update({name: module.weight.detach().clone()}))
            with torch_overlay.Transfer(tensors, found.target(), group=self.place, strict=False, stages=stages) as sync:
                sync.run()
            self.assertEqual(served, {"a": torch.ones(2, 2), "b": torch.zeros(2, 2)})


if __name__ == "__main__":
    run_tests()
