"""The 64-token character-level tokenizer of the generated tasks, as Hugging Face files.

One token per character, so that what the tokenizer does is plain to see; the marks of calls and results are special
tokens. The files load in `tokenizers`, in transformers' AutoTokenizer and in vLLM.
"""

from __future__ import annotations

import json
import string
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
SPECIAL_TOKENS = (PAD, BOS, EOS, UNK, "<calc>", "</calc>", "<res>", "</res>")
CHARACTERS = string.digits + "+-*=? \n()" + string.ascii_lowercase + ":.,"
VOCAB_SIZE = 64
_MAX_TOKENS = 4096


def demo_vocabulary() -> dict[str, int]:
    """Return the id of each token: special tokens, characters, then reserved tokens up to 64."""
    tokens = [*SPECIAL_TOKENS, *CHARACTERS]
    tokens += [f"<reserved_{index}>" for index in range(VOCAB_SIZE - len(tokens))]
    return {token: index for index, token in enumerate(tokens)}


def build_demo_tokenizer() -> Tokenizer:
    """Build the tokenizer; prompts start with ``<bos>``."""
    vocabulary = demo_vocabulary()
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=None, special_tokens=[(BOS, vocabulary[BOS])]
    )
    specials = [token for token in vocabulary if len(token) > 1]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return tokenizer


def write_demo_tokenizer(folder: Path) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``generation_config.json`` into `folder`."""
    vocabulary = demo_vocabulary()
    build_demo_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": _MAX_TOKENS,
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": EOS,
        "unk_token": UNK,
        "clean_up_tokenization_spaces": False,
    }
    generation = {name: vocabulary[token] for name, token in _TOKEN_IDS.items()}
    _write_json(folder / "tokenizer_config.json", config)
    _write_json(folder / "generation_config.json", generation)


_TOKEN_IDS = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}


def _write_json(path: Path, content: dict[str, object] | dict[str, int]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
