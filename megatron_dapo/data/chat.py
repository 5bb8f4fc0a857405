"""Chat messages to token ids, through the model's own chat template."""

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from megatron_dapo.data.errors import DataError

Messages = Sequence[Mapping[str, str]]
TRUNCATIONS = ("error", "drop", "left", "right", "middle")


def require_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise DataError when the tokenizer cannot turn a conversation into text."""
    if not tokenizer.chat_template:
        raise DataError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template, so messages cannot become text; use an "
            "instruct model's directory or add a chat_template.jinja file to it"
        )


def with_system_prompt(messages: Messages, system_prompt: str | None) -> tuple[dict[str, str], ...]:
    """The messages, opened by `system_prompt` unless they bring a system turn of their own."""
    own = tuple(dict(message) for message in messages)
    if system_prompt is None or (own and own[0]["role"] == "system"):
        return own
    return ({"role": "system", "content": system_prompt}, *own)


def render(tokenizer: PreTrainedTokenizerBase, messages: Messages, kwargs: Mapping[str, Any] | None = None) -> str:
    """The prompt text that the model continues: every turn and the opening of the assistant's."""
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True, **(kwargs or {})
        )
    except (jinja2.TemplateError, TypeError, KeyError) as error:
        roles = [message.get("role") for message in messages]
        raise DataError(f"the chat template cannot render a conversation with roles {roles}: {error}") from error
    return str(text)


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of rendered text. Special tokens are already in the text, so none are added."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def truncate(ids: Sequence[int], limit: int, policy: str) -> tuple[int, ...]:
    """Shorten `ids` to `limit`: "left" keeps the end, "right" the beginning, "middle" both ends.

    Raises DataError for the policies that do not shorten.
    """
    if len(ids) <= limit:
        return tuple(ids)
    if policy == "left":
        return tuple(ids[-limit:])
    if policy == "right":
        return tuple(ids[:limit])
    if policy == "middle":
        head = limit // 2
        return (*ids[:head], *ids[len(ids) - (limit - head) :])
    raise DataError(
        f"a prompt of {len(ids)} tokens is longer than max_prompt_length={limit}; raise data.max_prompt_length or set "
        f"data.truncation to drop, left, right or middle (it is {policy!r})"
    )
