"""One trajectory: the model speaks, and an environment may answer, until it is done. Observations are never trained.

An agent is a function from what the model said to the environment's answer, or to None when the answer is final:

    @AGENTS.register("my_tool")
    def my_tool() -> Agent:
        async def respond(prompt: Prompt, said: str) -> str | None: ...
        return respond
"""

import ast
import operator
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from megatron_dapo.algorithms.registry import Registry
from megatron_dapo.data.types import Prompt, Trajectory
from megatron_dapo.rollout.requests import Generation, GenerationRequest, Sampling, added

Agent = Callable[[Prompt, str], Awaitable[str | None]]
Generate = Callable[[GenerationRequest], Awaitable[Generation]]
AGENTS: Registry[Callable[[], Agent]] = Registry("agent loop")


class ToolError(RuntimeError):
    """An environment failed; the trajectory cannot go on."""


class Text(Protocol):
    """What of a tokenizer a conversation needs."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True)
class Conversation:
    """How trajectories come about in a run. `sampling.max_tokens` bounds a whole response, observations included."""

    agent: Agent
    tokenizer: Text
    sampling: Sampling
    max_turns: int = 1

    async def trajectory(self, prompt: Prompt, sample: int, seed: int, generate: Generate) -> Trajectory:
        """Raises ToolError, and what `generate` raises."""
        state = Trajectory(prompt.uid, sample, (), (), "abort", (), (), turns=0)
        for turn in range(self.max_turns):
            room = self.sampling.max_tokens - len(state.response_ids)
            request = GenerationRequest(
                request_id=f"{prompt.uid}/{sample}/{turn}",
                prompt_ids=prompt.token_ids + state.response_ids,
                seed=seed + turn,
                sampling=replace(self.sampling, max_tokens=room),
            )
            said = await generate(request)
            state = _spoken(state, said)
            if said.finish_reason == "length" or turn + 1 == self.max_turns:
                break
            observed = await self._answer(prompt, said)
            if observed is None:
                break
            state = replace(state, tool_calls=state.tool_calls + 1)
            if len(observed) >= room - len(said.token_ids):
                state = replace(state, finish_reason="length")  # no token would be left to react to it
                break
            state = _observed(state, observed)
        return state

    async def _answer(self, prompt: Prompt, said: Generation) -> tuple[int, ...] | None:
        text = self.tokenizer.decode(said.token_ids, skip_special_tokens=True)
        try:
            answer = await self.agent(prompt, text)
        except Exception as error:  # whatever a user's tool raises ends this trajectory, not the run
            raise ToolError(f"the agent failed on {text[-200:]!r}: {type(error).__name__}: {error}") from error
        return None if answer is None else tuple(self.tokenizer.encode(answer, add_special_tokens=False))


def _spoken(state: Trajectory, said: Generation) -> Trajectory:
    return replace(
        state,
        response_ids=state.response_ids + said.token_ids,
        rollout_log_probs=state.rollout_log_probs + said.logprobs,
        weight_versions=state.weight_versions + said.weight_versions,
        response_mask=(state.response_mask or ()) + (1,) * len(said.token_ids),
        finish_reason=said.finish_reason,
        routed_experts=said.routed_experts,
        speculation=added(state.speculation, said.speculation),
        turns=state.turns + 1,
    )


def _observed(state: Trajectory, ids: tuple[int, ...]) -> Trajectory:
    """Tokens that nobody sampled: mask 0, log-prob 0, and the version of the turn that they answer."""
    return replace(
        state,
        response_ids=state.response_ids + ids,
        rollout_log_probs=state.rollout_log_probs + (0.0,) * len(ids),
        weight_versions=state.weight_versions + state.weight_versions[-1:] * len(ids),
        response_mask=(state.response_mask or ()) + (0,) * len(ids),
    )


@AGENTS.register("single_turn")
def single_turn() -> Agent:
    """The first answer is the last."""

    async def respond(prompt: Prompt, said: str) -> str | None:
        return None

    return respond


@AGENTS.register("calculator")
def calculator() -> Agent:
    """Text that ends in `calc(12+30)` is continued with ` = 42`. rollout.stop=[")"] lets a call end the turn."""
    call = re.compile(r"calc\(([-+*/ 0-9.()]+)\)\s*$")

    async def respond(prompt: Prompt, said: str) -> str | None:
        found = call.search(said)
        return None if found is None else f" = {evaluate(found[1])}\n"

    return respond


_OPERATIONS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def evaluate(expression: str) -> str:
    """The value of sums, differences, products and quotients, or "error"."""

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](value(node.left), value(node.right))
        raise ValueError(expression)

    try:
        return f"{value(ast.parse(expression.strip(), mode='eval').body):g}"
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError):
        return "error"
