"""Answers from an OpenAI-compatible server: many requests in flight, dropped and refused ones tried again."""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import httpx
from transformers import PreTrainedTokenizerBase

from megatron_dapo.config.evaluation import EvalServerConfig
from megatron_dapo.errors import UserError
from megatron_dapo.evaluation.answers import Answer, Question

BUSY = 429
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0


class Unanswered(Exception):
    """A request that could not be had after all tries; the text is the last reason."""


class ServerSource:
    """One server and one of its models. vLLM is recognised by its model list and told what other servers refuse."""

    def __init__(self, url: str, config: EvalServerConfig, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Asks for the model list. Raises UserError where nothing answers or the model is not there."""
        self.config, self.tokenizer = config, tokenizer
        base = url.rstrip("/").removesuffix("/v1")
        limits = httpx.Limits(max_connections=config.concurrency, max_keepalive_connections=config.concurrency)
        self._http = httpx.Client(base_url=f"{base}/v1/", timeout=config.timeout_s, limits=limits)
        listed = self._listed_models(url)
        model = next((m for m in listed if config.name in (None, m["id"])), None)
        if model is None:
            names = ", ".join(m["id"] for m in listed)
            raise UserError(f"server.name={config.name}: {url} has no such model; it has {names or 'none'}")
        self.model: str = model["id"]
        self.is_vllm = model.get("owned_by") == "vllm"
        self.max_model_len: int | None = model.get("max_model_len")  # vLLM tells

    def answers(self, questions: Sequence[Question]) -> Iterator[list[Answer]]:
        """In order of completion; `concurrency` requests at a time.

        One request that fails for good does not stop the others; in the end UserError says how many are missing.
        """
        failures: list[str] = []
        with ThreadPoolExecutor(self.config.concurrency) as threads:
            running: set[Future[Answer]] = {threads.submit(self._ask, question) for question in questions}
            try:
                while running:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    failed = [error for future in done if (error := future.exception()) is not None]
                    unexpected = [error for error in failed if not isinstance(error, Unanswered)]
                    if unexpected:
                        raise unexpected[0]
                    failures += map(str, failed)
                    yield [future.result() for future in done if future.exception() is None]
            finally:
                threads.shutdown(cancel_futures=True)
        if failures:
            raise UserError(
                f"{len(failures)} of {len(questions)} answers could not be had ({failures[-1]}). The others are kept: "
                "run the same command again to ask for the rest"
            )

    def close(self) -> None:
        self._http.close()

    def _ask(self, question: Question) -> Answer:
        chat = self.config.api == "chat"
        reply = self._post("chat/completions" if chat else "completions", self._body(question))
        choice = reply["choices"][0]
        text = choice["message"]["content"] if chat else choice["text"]
        ids = choice.get("token_ids")
        if ids is not None and self.tokenizer is not None:  # what was sampled, decoded as in training
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
        tokens = reply["usage"]["completion_tokens"]
        return Answer(question.problem, question.sample, text or "", tokens, choice["finish_reason"])

    def _body(self, question: Question) -> dict[str, Any]:
        sampling = question.sampling
        body: dict[str, Any] = {
            "model": self.model,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
            "seed": question.seed,
        }
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if self.config.api == "chat":
            body["messages"] = list(question.prompt.messages)
        else:
            body["prompt"] = list(question.prompt.token_ids)
        if self.is_vllm:  # also against what the model's generation_config.json would put in
            body |= {"top_k": sampling.top_k, "min_p": 0.0, "repetition_penalty": 1.0, "return_token_ids": True}
        return body

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        pause = FIRST_WAIT_S
        for attempt in range(self.config.retries + 1):
            try:
                response = self._http.post(path, json=body)
            except httpx.TransportError as error:
                reason = f"{type(error).__name__}: {error}"
            else:
                if response.is_success:
                    return response.json()
                reason = f"HTTP {response.status_code}: {response.text[:300]}"
                if response.status_code != BUSY and response.is_client_error:
                    raise UserError(f"{self._http.base_url}{path} refuses the request: {reason}")
                pause = _retry_after(response, pause)
            if attempt < self.config.retries:
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_WAIT_S)
        raise Unanswered(reason)

    def _listed_models(self, url: str) -> list[dict[str, Any]]:
        try:
            response = self._http.get("models")
            response.raise_for_status()
            return list(response.json()["data"])
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise UserError(
                f"--server {url}: no OpenAI-compatible server answers there ({type(error).__name__}: {error}); "
                "give its address as http://HOST:PORT"
            ) from error


def _retry_after(response: httpx.Response, otherwise: float) -> float:
    """The pause that the server asks for, in seconds, where it does."""
    text = response.headers.get("retry-after", "")
    return min(float(text), LONGEST_WAIT_S) if text.isdigit() else otherwise
