"""The data of the text-to-emoji model: names, keywords, pictures, captions, tokens and figures."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from tools.emoji.budget import Budget, learning_rate
from tools.emoji.captions import draw_caption, keyword_prompts, name_prompts
from tools.emoji.denoiser import draw_times, shuffled_batch, time_shares
from tools.emoji.metrics import NearestEmoji, share_within
from tools.emoji.networks import build_scheduler
from tools.emoji.render import draw_all
from tools.emoji.sources import Emoji, MissingDataError, is_flag_or_skin_tone, load_emoji, read_labels, write_labels
from tools.emoji.tokenizer import MOST_TOKENS, train_tokenizer

SEED = 20260101


@pytest.fixture(scope="module")
def entries() -> list[Emoji]:
    return load_emoji()


@pytest.fixture
def rng() -> random.Random:
    print(f"seed {SEED}")
    return random.Random(SEED)


def test_selection_is_large_and_has_no_flags_or_skin_tones(entries: list[Emoji]) -> None:
    assert len(entries) >= 600
    assert len({entry.character for entry in entries}) == len(entries)
    assert len({entry.name for entry in entries}) == len(entries)
    assert not [entry for entry in entries if is_flag_or_skin_tone(entry.character)]
    assert is_flag_or_skin_tone("🇫🇷")
    assert is_flag_or_skin_tone("👍🏽")


def test_names_and_keywords_come_from_their_packages(entries: list[Emoji]) -> None:
    apple = next(entry for entry in entries if entry.character == "🍎")
    assert apple.name == "red apple"
    assert {"apple", "fruit", "red"} <= set(apple.keywords)
    assert all(entry.name not in entry.keywords for entry in entries)


def test_limit_spreads_over_all(entries: list[Emoji]) -> None:
    few = load_emoji(limit=7)
    assert len(few) == 7
    places = [entries.index(entry) for entry in few]
    gaps = np.diff(places)
    assert gaps.min() >= len(entries) // 7
    assert gaps.max() <= len(entries) // 7 + 1


def test_missing_files_name_the_debian_package(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match="apt-get install unicode-cldr-core"):
        load_emoji(tmp_path / "en.xml")
    with pytest.raises(MissingDataError, match="apt-get install fonts-noto-color-emoji"):
        draw_all(["🍎"], tmp_path / "font.ttf")


def test_labels_survive_writing_and_reading(tmp_path: Path) -> None:
    few = load_emoji(limit=5)
    write_labels(tmp_path / "labels.json", few)
    assert read_labels(tmp_path / "labels.json") == few


def test_pictures_are_in_colour_on_white() -> None:
    apple, heart = draw_all(["🍎", "❤️"]).astype(int)
    assert apple.shape == (64, 64, 3)
    for picture in (apple, heart):
        assert (picture[0, 0] == 255).all()
        red, green, blue = picture[32, 32]
        assert red > green + 80
        assert red > blue + 80


def test_captions_have_the_intended_shares(rng: random.Random) -> None:
    entry = Emoji("🍎", "red apple", ("apple", "fruit", "red"))
    kinds = Counter()
    for _ in range(4000):
        caption = draw_caption(entry, rng)
        words = set(caption.split(", "))
        if not caption:
            kinds["empty"] += 1
        elif caption == entry.name:
            kinds["name"] += 1
        elif entry.name in words:
            kinds["both"] += 1
        else:
            assert words <= set(entry.keywords)
            kinds["keywords"] += 1
    assert kinds["empty"] / 4000 == pytest.approx(0.1, abs=0.02)
    assert kinds["name"] / 4000 == pytest.approx(0.35, abs=0.03)
    assert kinds["both"] / 4000 == pytest.approx(0.2, abs=0.03)


def test_emoji_without_keywords_is_known_by_name(rng: random.Random) -> None:
    captions = {draw_caption(Emoji("🍎", "red apple", ()), rng) for _ in range(200)}
    assert captions == {"", "red apple"}


def test_report_prompts_are_spread_and_hide_the_name(entries: list[Emoji]) -> None:
    names = name_prompts(entries, 96)
    assert len({index for index, _ in names}) == 96
    assert all(prompt == entries[index].name for index, prompt in names)
    keywords = keyword_prompts(entries, 96, seed=0)
    assert len({index for index, _ in keywords}) == 96
    for index, prompt in keywords:
        words = prompt.split(", ")
        assert 2 <= len(words) <= 3
        assert set(words) <= set(entries[index].keywords)
        assert entries[index].name not in words
    assert keywords == keyword_prompts(entries, 96, seed=0)


def test_tokenizer_reads_any_text_as_clip_does(entries: list[Emoji]) -> None:
    tokenizer = train_tokenizer(entries)
    ids = tokenizer("Red  Apple", padding="max_length", truncation=True).input_ids
    assert len(ids) == MOST_TOKENS
    assert tokenizer.convert_ids_to_tokens(ids)[:4] == ["<|startoftext|>", "red</w>", "apple</w>", "<|endoftext|>"]
    assert set(ids[3:]) == {tokenizer.eos_token_id}
    foreign = tokenizer("żółw 漢字 🐢").input_ids
    assert foreign[0] == tokenizer.bos_token_id
    assert foreign.count(tokenizer.eos_token_id) == 1


def test_nearest_emoji_ranks_the_original_first() -> None:
    originals = draw_all(["🍎", "🍏", "🐧", "🚀"])
    nearest = NearestEmoji(originals)
    noise = np.random.default_rng(SEED).normal(0, 20, originals.shape)
    for index, original in enumerate(originals):
        noisy = np.clip(original + noise[index], 0, 255).astype(np.uint8)
        assert nearest.rank(noisy, index) == 0
        assert sorted(nearest.ranking(noisy)) == [0, 1, 2, 3]
    assert share_within([0, 4, 5, 1], 1) == 0.25
    assert share_within([0, 4, 5, 1], 5) == 0.75


def test_budget_ends_with_whatever_is_used_up_first() -> None:
    budget = Budget(minutes=2, steps=100)
    assert budget.progress(step=25, seconds=12) == 0.25
    assert budget.progress(step=25, seconds=90) == 0.75
    assert budget.progress(step=500, seconds=0) == 1.0
    assert Budget(steps=10).progress(step=5, seconds=1e9) == 0.5
    with pytest.raises(ValueError, match="minutes or steps"):
        Budget()


def test_learning_rate_rises_then_falls_to_nothing() -> None:
    assert learning_rate(1.0, step=0, progress=0.0, warmup_steps=10) == pytest.approx(0.1)
    assert learning_rate(1.0, step=50, progress=0.25, warmup_steps=10) == pytest.approx(0.75)
    assert learning_rate(1.0, step=200, progress=1.0, warmup_steps=10) == 0.0


@pytest.mark.parametrize("count", [5, 700])
def test_batches_visit_every_emoji_equally_often(count: int) -> None:
    drawn = torch.cat([shuffled_batch(count, 32, step, SEED) for step in range(count)])
    assert torch.bincount(drawn, minlength=count).tolist() == [32] * count
    assert not torch.equal(drawn[:count], drawn[count : 2 * count])


def test_almost_clean_times_are_drawn_less_often() -> None:
    signal = build_scheduler().alphas_cumprod
    shares = time_shares(signal)
    assert signal[-1] == 0
    assert shares.sum() == pytest.approx(1)
    assert shares[-1] == shares.max()
    assert shares[0] < 0.05 * shares.max()
    assert (shares.diff() >= -1e-6).all()


def test_drawn_times_follow_the_shares() -> None:
    print(f"seed {SEED}")
    generator = torch.Generator().manual_seed(SEED)
    shares = torch.tensor([0.5, 0.25, 0.125, 0.125])
    times = torch.cat([draw_times(shares, 32, generator) for _ in range(50)])
    assert torch.bincount(times).tolist() == pytest.approx([800, 400, 200, 200], abs=2)
