"""One evaluation from beginning to end: read the problems, have them answered, judge the answers, write it all down."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_dapo.config.evaluation import EvalConfig
from megatron_dapo.data.tokenizer import load_tokenizer
from megatron_dapo.errors import UserError
from megatron_dapo.evaluation.answers import Answer, Journal, Question, Source
from megatron_dapo.evaluation.embedded import EmbeddedSource, max_positions
from megatron_dapo.evaluation.problems import Problem, read_problems
from megatron_dapo.evaluation.server import ServerSource
from megatron_dapo.evaluation.summary import Judged, summarize, table, write_generations
from megatron_dapo.rewards import RewardManager
from megatron_dapo.rewards.routing import quick
from megatron_dapo.rollout.requests import Sampling, sample_seed

GENERATIONS, SUMMARY = "generations.parquet", "summary.json"
STEP = -1  # in-training validation samples under this number; the same seed then gives the same samples
TELL_SECONDS = 10.0
NO_ANSWER_CHANGES = {"reward", "engine", "server"}  # keys that may differ when an evaluation is continued


def evaluate(config: EvalConfig, output: Path, server: str | None = None) -> dict[str, Any]:
    """Evaluates into `output`, going on where an interrupted evaluation of the same settings stopped.

    Returns the summary that it also writes. Raises UserError for what the user can mend.
    """
    tokenizer = load_tokenizer(config.model) if config.model and Path(config.model).is_dir() else None
    problems = read_problems(config, tokenizer)
    _check_verifiers(config, problems)
    output.mkdir(parents=True, exist_ok=True)
    settings = config.model_dump(mode="json", exclude=NO_ANSWER_CHANGES) | {"server": server is not None}
    with closing(Journal(output, settings)) as journal:
        remaining = sum(p.samples for p in problems) - len(journal.answers)
        if remaining:
            _have_answered(config, problems, tokenizer, journal, server)
        answers = journal.answers
    judged = judge(config, problems, [answers[key] for key in sorted(answers)])
    write_generations(judged, output / GENERATIONS)
    summary = {"model": config.model, **summarize(judged, seed=config.seed), "config": config.model_dump(mode="json")}
    (output / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")
    print(table(summary))
    return summary


def _check_verifiers(config: EvalConfig, problems: Sequence[Problem]) -> None:
    """A source that nobody can judge is an error before hours of sampling, not after."""
    if config.reward.custom_function.path is None:
        for prompt in {problem.prompt.data_source: problem.prompt for problem in problems}.values():
            quick(prompt.data_source, "", prompt.ground_truth, prompt.extra_info, strict=config.reward.strict)


def _have_answered(
    config: EvalConfig,
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase | None,
    journal: Journal,
    server: str | None,
) -> None:
    source: EmbeddedSource | ServerSource
    positions: int | None
    if server is not None:
        source = ServerSource(server, config.server, tokenizer)
        positions = source.max_model_len
    else:
        assert tokenizer is not None, "checked with the configuration"
        positions = max_positions(config.model)
        longest = max(len(problem.prompt.token_ids) for problem in problems)
        source = EmbeddedSource.start(config, tokenizer, min(positions, longest + config.max_tokens))
    with closing(source):
        missing = [q for q in questions(config, problems, positions) if (q.problem, q.sample) not in journal.answers]
        for answers in _told(source, missing):
            journal.add(answers)


def questions(config: EvalConfig, problems: Sequence[Problem], positions: int | None) -> Iterator[Question]:
    """Every sample of every problem. `positions` bounds prompt and answer together; None: nobody says."""
    for problem in problems:
        prompt = problem.prompt
        room = config.max_tokens if positions is None else min(config.max_tokens, positions - len(prompt.token_ids))
        if room < 1:
            raise UserError(
                f"problem {problem.index} has {len(prompt.token_ids)} tokens and leaves no room for an answer: the "
                f"model ends at {positions}"
            )
        sampling = Sampling(config.temperature, config.top_p, config.top_k, room, tuple(config.stop))
        for sample in range(problem.samples):
            seed = sample_seed(config.seed, STEP, prompt.uid, sample)
            yield Question(problem.index, sample, prompt, seed, sampling)


def judge(config: EvalConfig, problems: Sequence[Problem], answers: Sequence[Answer]) -> list[Judged]:
    """Every answer with its score, by the verifiers that training uses."""
    prompts = [problems[answer.problem].prompt for answer in answers]
    with RewardManager(config.reward, None, config.max_tokens) as reward:
        scores = reward.score_texts(prompts, [a.text for a in answers], [a.tokens for a in answers])
    return [Judged(*row) for row in zip(prompts, answers, scores, strict=True)]


def _told(source: Source, missing: Sequence[Question]) -> Iterator[list[Answer]]:
    """The answers of `source`, and now and then a line about how far it is."""
    began = told = time.monotonic()
    count = 0
    for answers in source.answers(missing):
        count += len(answers)
        now = time.monotonic()
        if now - told > TELL_SECONDS or count == len(missing):
            told = now
            print(f"{count} of {len(missing)} answers, {count / (now - began):.1f}/s", file=sys.stderr, flush=True)
        yield answers
