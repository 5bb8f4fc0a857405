"""The agent loop: turns, observations that are never trained, versions per turn, bounds. The model is scripted."""

import asyncio

import pytest

from megatron_dapo.data.types import Prompt
from megatron_dapo.rollout.agent import AGENTS, Conversation, ToolError, evaluate
from megatron_dapo.rollout.requests import Generation, GenerationRequest, Sampling

PROMPT = Prompt("0-1-0", 0, 1, 0, (1, 2, 3), ({"role": "user", "content": "?"},), "math", "4")


class Characters:
    """A token per character."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids, *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))


def talk(
    said: list[str], *, agent: str = "calculator", max_turns: int = 4, max_tokens: int = 100, reason: str = "stop"
):
    """The trajectory of a model that says this, and the requests it was asked with."""
    asked: list[GenerationRequest] = []

    async def generate(request: GenerationRequest) -> Generation:
        ids = tuple(map(ord, said[len(asked)]))
        asked.append(request)
        return Generation(request.request_id, ids, (-1.0,) * len(ids), reason, None, (len(asked),) * len(ids))

    conversation = Conversation(AGENTS.find(agent)(), Characters(), Sampling(max_tokens=max_tokens), max_turns)
    return asyncio.run(conversation.trajectory(PROMPT, 0, 7, generate)), asked


def test_a_tool_answers_and_its_tokens_are_masked():
    made, asked = talk(["calc(12+30)", "so 42."])
    text = "calc(12+30) = 42\nso 42."
    assert "".join(map(chr, made.response_ids)) == text
    spoken = "11111111111" + "000000" + "111111"
    assert "".join(map(str, made.response_mask)) == spoken
    assert made.rollout_log_probs == tuple(-1.0 * int(c) for c in spoken)
    assert made.weight_versions == (1,) * 17 + (2,) * 6  # per turn; an observation has that of what it answers
    assert made.finish_reason == "stop" and (made.turns, made.tool_calls) == (2, 1)
    assert asked[1].prompt_ids == PROMPT.token_ids + made.response_ids[:17]
    assert [request.sampling.max_tokens for request in asked] == [100, 83]
    assert asked[0].seed != asked[1].seed and asked[0].request_id != asked[1].request_id


def test_one_turn_is_one_generation():
    made, asked = talk(["calc(1+1)"], agent="single_turn", max_turns=1)
    assert len(asked) == 1 and made.response_mask == (1,) * 9 and (made.turns, made.tool_calls) == (1, 0)


@pytest.mark.parametrize(
    ("turns", "tokens", "reason", "calls"), [(2, 100, "stop", 2), (9, 12, "stop", 1), (9, 100, "length", 1)]
)
def test_a_conversation_is_bounded_by_turns_and_by_tokens(turns, tokens, reason, calls):
    made, asked = talk(["calc(1+1)"] * 9, max_turns=turns, max_tokens=tokens, reason=reason)
    assert len(asked) == calls
    assert len(made.response_ids) <= tokens
    assert made.response_mask[-1] == 1  # it never ends with an observation that nothing reacts to


def failing():
    async def respond(prompt, said):
        raise KeyError("no such tool")

    return respond


def test_an_agent_of_a_users_own_and_its_failure():
    with pytest.raises(ToolError, match="no such tool"):
        talk(["hm"], agent=f"{__name__}:failing")
    with pytest.raises(ValueError, match="agent loop 'nowhere:agent' cannot be imported"):
        AGENTS.find("nowhere:agent")


@pytest.mark.parametrize(
    ("text", "value"), [("12+30", "42"), ("-2*(3-5)/4", "1"), ("1/0", "error"), ("2**9", "error"), ("((", "error")]
)
def test_the_calculator(text, value):
    assert evaluate(text) == value
