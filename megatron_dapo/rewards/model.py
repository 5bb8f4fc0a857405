"""A reward model as a further source of reward: a Hugging Face sequence classifier, or a pooling server over HTTP."""

import json
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from transformers import AutoModelForSequenceClassification

from megatron_dapo.config.sampling import RewardModelConfig
from megatron_dapo.data.tokenizer import load_tokenizer
from megatron_dapo.rewards.errors import RewardError

BATCH = 16
HTTP_TIMEOUT_S = 600.0
HTTP_CONCURRENCY = 16
HTTP_TRIES = 3

Messages = Sequence[Mapping[str, str]]


class RewardModel(Protocol):
    """Anything that gives each (conversation, response) a number."""

    def score(self, conversations: Sequence[Messages], responses: Sequence[str]) -> Sequence[float | str]:
        """A number for each response, or the reason why there is none."""
        ...


def open_reward_model(config: RewardModelConfig) -> RewardModel | None:
    """The model that the configuration names, or None when it is off.

    `path` is a Hugging Face directory, or the `http://` address of a server (`vllm serve MODEL --runner pooling`).
    Raises RewardError for a directory without a classifier, and for a server whose memory is asked to be offloaded.
    """
    if not config.enable:
        return None
    if config.path.startswith(("http://", "https://")):
        if config.offload_param:
            raise RewardError(
                f"reward.reward_model.offload_param=true moves a model of this process; {config.path} is none"
            )
        return PoolingServer(config.path)
    return Classifier(config.path, offload=config.offload_param)


class Classifier:
    """A sequence classifier with one output, in this process: on the GPU where there is one.

    With `offload` it is there only while it scores, and in host memory between.
    """

    def __init__(self, path: str, *, offload: bool = False) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self._rests_at = "cpu" if offload else self.device
        self._lock = threading.Lock()  # threads share the manager, and one must not move the model under another
        try:
            model = AutoModelForSequenceClassification.from_pretrained(path, dtype="auto")
        except (OSError, ValueError) as error:
            raise RewardError(f"reward.reward_model.path={path!r} is no sequence classifier: {error}") from error
        if model.config.num_labels != 1:
            raise RewardError(f"the reward model {path!r} has {model.config.num_labels} outputs; one is needed")
        self.model = model.to(self._rests_at).eval()
        self.tokenizer = load_tokenizer(path)
        self.tokenizer.padding_side = "right"
        self.model.config.pad_token_id = self.tokenizer.pad_token_id

    @torch.inference_mode()
    def score(self, conversations: Sequence[Messages], responses: Sequence[str]) -> list[float]:
        """The logit of each conversation ended by its response; batches of similar lengths."""
        texts = [self._text(messages, response) for messages, response in zip(conversations, responses, strict=True)]
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        scores = [0.0] * len(texts)
        with self._present():
            for start in range(0, len(order), BATCH):
                chosen = order[start : start + BATCH]
                batch = self.tokenizer(
                    [texts[i] for i in chosen], return_tensors="pt", padding=True, add_special_tokens=False
                ).to(self.device)
                logits = self.model(**batch).logits[:, 0].float().tolist()
                for i, value in zip(chosen, logits, strict=True):
                    scores[i] = value
        return scores

    @contextmanager
    def _present(self) -> Iterator[None]:
        """The model on its device, and afterwards back where it rests, with the memory given to others."""
        with self._lock:
            self.model.to(self.device)
            try:
                yield
            finally:
                if self._rests_at != self.device:  # untested on GPU
                    self.model.to(self._rests_at)
                    torch.cuda.empty_cache()

    def _text(self, messages: Messages, response: str) -> str:
        full = [*messages, {"role": "assistant", "content": response}]
        return str(self.tokenizer.apply_chat_template(full, tokenize=False))


class PoolingServer:
    """A reward model behind vLLM's `/classify` endpoint, which takes chat messages; its raw output is asked for."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def score(self, conversations: Sequence[Messages], responses: Sequence[str]) -> list[float | str]:
        """One request per conversation, several at a time, each tried HTTP_TRIES times."""
        bodies = [
            {"messages": [*messages, {"role": "assistant", "content": response}], "use_activation": False}
            for messages, response in zip(conversations, responses, strict=True)
        ]
        with ThreadPoolExecutor(HTTP_CONCURRENCY) as threads:
            return list(threads.map(self._ask, bodies))

    def _ask(self, body: Mapping[str, Any]) -> float | str:
        request = urllib.request.Request(
            f"{self.url}/classify", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        reason = ""
        for attempt in range(HTTP_TRIES):
            time.sleep(attempt)
            try:
                with urllib.request.urlopen(request, timeout=HTTP_TIMEOUT_S) as response:
                    return float(json.load(response)["data"][0]["probs"][-1])
            except (OSError, KeyError, IndexError, ValueError) as error:  # URLError is an OSError
                reason = f"error: the reward model at {self.url} gave no score: {error!r}"
        return reason
