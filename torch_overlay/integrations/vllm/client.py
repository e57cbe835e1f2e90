"""The routes by which a vLLM server gets weights, for trainers that have no vLLM. Only the standard library is used."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import Any


class HTTPClient:
    """A client of one ``vllm serve``, to be given to `TrainerEngine.trainer_init` as ``client``.

    Each method returns when the server has answered, and raises a RuntimeError if it refuses, an OSError if nobody
    answers, or a ValueError if `url` is none.

    Args:
        url: of the server, such as ``"http://server:8000"``. It was started with ``VLLM_SERVER_DEV_MODE=1``.
        timeout: seconds that an answer may take. `update_weights` answers when all weights have come.
    """

    def __init__(self, url: str, timeout: float = 300) -> None:
        self.url, self.timeout = url.rstrip("/"), timeout

    def _post(self, route: str, **body: Any) -> None:
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        begun = time.monotonic()
        try:
            urllib.request.urlopen(
                urllib.request.Request(f"{self.url}/{route}", data, headers), timeout=self.timeout
            ).close()
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace").strip()
            raise RuntimeError(f"{self.url}/{route} answered {error.code} {error.reason}: {said}") from None
        except OSError as error:
            why, seconds = getattr(error, "reason", error), time.monotonic() - begun
            raise OSError(f"{self.url}/{route}: no answer within {seconds:.1f} s: {why}") from error

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let the server's workers meet the trainers."""
        self._post("init_weight_transfer_engine", init_info=init_info)

    def start_weight_update(self) -> None:
        """Begin a round. vLLM up to 0.26 is told not to prepare for weights of a checkpoint; newer ones ignore that."""
        self._post("start_weight_update", is_checkpoint_format=False)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Let the workers take part in a run of the transfer."""
        self._post("update_weights", update_info=update_info)

    def finish_weight_update(self) -> None:
        """End a round."""
        self._post("finish_weight_update")

    def shutdown_weight_transfer_engine(self) -> None:
        """Let the workers leave the trainers, so that they can meet them anew. vLLM 0.30 and newer."""
        self._post("shutdown_weight_transfer_engine")
