"""What the processes of test_vllm_fleet.py do: two trainers of one world, and servers with the stand-in of vLLM."""

import http.server
import json
import os
import types

TIMEOUT = 5.0


def values(name, shape, number):
    import zlib

    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()) + number))


class Trainer:
    """One of two ranks of a world, whose tensors are sharded over both."""

    def __init__(self, rank, address, folder, urls):
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        from torch_overlay.integrations.vllm.client import HTTPClient
        from torch_overlay.integrations.vllm.source import DTensorSource
        from torch_overlay.integrations.vllm.trainer import TrainerEngine, TrainerInfo
        from vllm_stand_in import SPARSE, Model

        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/world", 2), rank=rank, world_size=2)
        mesh, self.number = init_device_mesh("cpu", (2,)), 0
        shapes = {name: shape for name, (shape, _) in Model(SPARSE, 1, 0).checkpoint().items()}

        def weights():
            return {
                name: distribute_tensor(values(name, shape, self.number), mesh, [Shard(0)], src_data_rank=None)
                for name, shape in shapes.items()
            }

        info = TrainerInfo(rank=rank, address=address, trainers=2, workers=1, timeout=TIMEOUT, open=True)
        clients = [HTTPClient(url, timeout=30) for url in urls]
        self.engine = TrainerEngine.trainer_init(info, client=clients, source=DTensorSource(weights))

    def send(self, number):
        """Send a round. Returns who joined, and who went."""
        self.number = number
        self.engine.send_weights()
        return sorted(self.engine.transfer.joined), [gone.name for gone in self.engine.transfer.gone]

    def verify(self):
        return self.engine.verify()

    def close(self):
        self.engine.shutdown()


def serve(port):
    """A server of one worker, with vLLM's routes, and one that says whether the weights are those of a round."""
    import torch

    from vllm_stand_in import SPARSE, Model, installed

    torch.set_num_threads(1)
    with installed([]):
        from torch_overlay.integrations.vllm.worker import InitInfo, UpdateInfo, WorkerEngine

        model, wanted = Model(SPARSE, 1, 0), Model(SPARSE, 1, 0)
        ranks = types.SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
        config = types.SimpleNamespace(
            parallel_config=ranks, model_config=types.SimpleNamespace(quantization=None), quant_config=None
        )
        engine = WorkerEngine(None, config, torch.device("cpu"), model)

        def is_right(number):
            wanted.load_weights([(n, values(n, shape, number)) for n, (shape, _) in wanted.checkpoint().items()])
            return all(torch.equal(*pair) for pair in zip(model.parameters(), wanted.parameters()))

        routes = {
            "init_weight_transfer_engine": lambda init_info: engine.init_transfer_engine(InitInfo(**init_info)),
            "start_weight_update": lambda **_: engine.start_weight_update(),
            "update_weights": lambda update_info: engine.receive_weights(UpdateInfo(**update_info)),
            "finish_weight_update": lambda: engine.finish_weight_update(),
            "is_right": is_right,
        }

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                try:
                    code, said = 200, routes[self.path[1:]](**body)
                except Exception as error:
                    code, said = 500, f"{type(error).__name__}: {error}"
                self.send_response(code)
                self.end_headers()
                self.wfile.write(json.dumps(said).encode())

            def log_message(self, *_):
                pass

        http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
    os._exit(0)
