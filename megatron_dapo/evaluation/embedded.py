"""Answers from a vLLM engine of our own, token ids in and out as in training."""

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from transformers import AutoConfig, PreTrainedTokenizerBase

from megatron_dapo.config.evaluation import EvalConfig
from megatron_dapo.evaluation.answers import Answer, Question
from megatron_dapo.rollout.engine import RolloutEngine
from megatron_dapo.rollout.requests import Generation, GenerationRequest
from megatron_dapo.rollout.spec import EngineSpec

WINDOW = 4096  # requests that the engine knows of at once: enough to be busy, few enough to hold
START_SECONDS = 1800.0


class EmbeddedSource:
    """A running engine. Use it as a context manager, or `close` it."""

    def __init__(self, engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase) -> None:
        self.engine, self.tokenizer = engine, tokenizer

    @classmethod
    def start(cls, config: EvalConfig, tokenizer: PreTrainedTokenizerBase, max_model_len: int) -> "EmbeddedSource":
        """Starts the engine and waits until it can generate. `max_model_len` is prompt and answer together."""
        engine = RolloutEngine.start(
            EngineSpec(
                model=config.model,
                dtype=config.engine.dtype or checkpoint_dtype(config.model),
                tensor_parallel_size=config.engine.tensor_parallel_size,
                max_model_len=max_model_len,
                max_num_seqs=config.engine.max_num_seqs,
                gpu_memory_utilization=config.engine.gpu_memory_utilization,
                kv_cache_gb=config.engine.kv_cache_gb,
                seed=config.seed,
                name="eval",
                engine_kwargs=config.engine.engine_kwargs,
            )
        )
        try:
            engine.wait_ready(START_SECONDS)
        except BaseException:
            engine.close()
            raise
        return cls(engine, tokenizer)

    def answers(self, questions: Sequence[Question]) -> Iterator[list[Answer]]:
        """In order of completion."""
        running: dict[Future[Generation], Question] = {}
        waiting = list(reversed(questions))
        while waiting or running:
            fresh = [waiting.pop() for _ in range(min(len(waiting), WINDOW - len(running)))]
            running |= dict(zip(self.engine.submit([_request(q) for q in fresh]), fresh, strict=True))
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            yield [self._answer(running.pop(future), future.result()) for future in done]

    def _answer(self, question: Question, generation: Generation) -> Answer:
        ids = list(generation.token_ids)
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return Answer(question.problem, question.sample, text, len(ids), generation.finish_reason)

    def close(self) -> None:
        self.engine.close()


def checkpoint_dtype(model: str) -> str:
    """The precision in which a checkpoint says it was saved."""
    dtype = AutoConfig.from_pretrained(model).get_text_config().dtype
    return "bfloat16" if dtype is None else str(dtype).removeprefix("torch.")


def max_positions(model: str) -> int:
    """Where a model's positions end, as transformers reads it: this project need not be able to train the model."""
    return int(AutoConfig.from_pretrained(model).get_text_config().max_position_embeddings)


def _request(question: Question) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"{question.problem}/{question.sample}",
        prompt_ids=question.prompt.token_ids,
        seed=question.seed,
        sampling=question.sampling,
    )
