"""A small byte-level BPE tokenizer with a chat template, trained on given text and saved as a Hugging Face directory.

Digits are single tokens, so that a tiny model meets numbers digit by digit.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from megatron_dapo.data.errors import DataError
from megatron_dapo.data.tables import column_names, stream

PAD, EOS = "<pad>", "<eos>"
SPECIAL_TOKENS = [PAD, EOS, "<|system|>", "<|user|>", "<|assistant|>"]
SMALLEST_VOCAB = len(SPECIAL_TOKENS) + 256  # every byte has its own token, so any text can be encoded

# One token opens a turn; the end-of-sequence token closes the assistant's.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '" + EOS + "' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], output: Path, *, vocab_size: int = 300) -> PreTrainedTokenizerBase:
    """Train on `texts` and save under `output`. Ids are the same on every run for the same text.

    Raises DataError when `vocab_size` cannot hold the 256 bytes and the special tokens.
    """
    if vocab_size < SMALLEST_VOCAB:
        raise DataError(f"tokenizer: vocab_size={vocab_size} is too small; {SMALLEST_VOCAB} is the least")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        additional_special_tokens=SPECIAL_TOKENS[2:],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    output.mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(output)
    return fast


def file_texts(paths: Iterable[Path]) -> Iterator[str]:
    """Every text of prompt or SFT files, turn by turn: what `train_tokenizer` should see."""
    for path in paths:
        wanted = [name for name in ("prompt", "response") if name in column_names(path)]
        for batch in stream(path, wanted):
            for row in batch.to_pylist():
                for value in row.values():
                    yield from [value] if isinstance(value, str) else (turn["content"] for turn in value)


def load_tokenizer(path: Path | str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a Hugging Face directory, with a padding token. Raises DataError naming the directory."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"no usable tokenizer in {path}: {reason}") from error
    if tokenizer.eos_token_id is None:
        raise DataError(f"the tokenizer of {path} has no eos_token, so generation could never stop; set one")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
