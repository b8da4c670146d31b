"""A small CLIP tokenizer, its byte-pair merges learned from the names and keywords."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import CLIPTokenizer

from tools.emoji.sources import Emoji

VOCABULARY = 3000
MOST_TOKENS = 24
WORD_END = "</w>"
START, END = "<|startoftext|>", "<|endoftext|>"


def keep_tokenizer(folder: Path, entries: list[Emoji]) -> CLIPTokenizer:
    """Return the tokenizer of an earlier run in this folder; learn it, and keep it there, when there is none.

    The learner breaks ties in another order each time, so a run that continues must not number the tokens anew.
    """
    if not (folder / "tokenizer.json").is_file():
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        train_tokenizer(entries).save_pretrained(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.replace(folder)
    return CLIPTokenizer.from_pretrained(folder)


def train_tokenizer(entries: list[Emoji]) -> CLIPTokenizer:
    """Learn the merges, and number the tokens as CLIP does: bytes, bytes that end a word, merges, marks."""
    # The same way to split text into words as CLIP's: its class brings the normalizer and the splitter.
    splitter = CLIPTokenizer(vocab={START: 0, END: 1}, merges=[]).backend_tokenizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    learner = Tokenizer(models.BPE(end_of_word_suffix=WORD_END))
    learner.normalizer = splitter.normalizer
    learner.pre_tokenizer = splitter.pre_tokenizer
    # The learner counts only the word ends that it sees, so it may know up to 256 tokens fewer.
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=alphabet, end_of_word_suffix=WORD_END, show_progress=False
    )
    learner.train_from_iterator(_texts(entries), trainer)
    learned = [tuple(merge) for merge in json.loads(learner.to_str())["model"]["merges"]]

    tokens = [*alphabet, *(character + WORD_END for character in alphabet)]
    merges = learned[: VOCABULARY - len(tokens)]
    tokens += dict.fromkeys("".join(merge) for merge in merges)
    tokens += [START, END]
    return CLIPTokenizer(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=merges,
        model_max_length=MOST_TOKENS,
    )


def _texts(entries: list[Emoji]) -> list[str]:
    return [text for entry in entries for text in (entry.name, *entry.keywords)]
