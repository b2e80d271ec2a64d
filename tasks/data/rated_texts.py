"""Loader of the rated texts: positive or negative, each text as what a frozen sentence encoder makes of it."""

from __future__ import annotations

import hmac
import math

import numpy as np

from accounting.errors import InvalidInput
from tasks.data.feature_cache import remembered
from tasks.data.image_cache import cache_folder
from tasks.data.rated_text_files import RATED_SETS, SPLIT_RULE, part_of, read_rated
from tasks.data.rows import Rows, Splits
from tasks.data.sentence_encoder import FEATURES, SentenceEncoder, encoder_digest

_LOADER = "tasks.data.rated_texts:rated_texts"
_SCALE = math.sqrt(FEATURES)  # the encoder's rows have length 1; these have entries of about 1


def rated_texts(*, with_private: bool = True, of: str) -> Splits:
    """One of VADER's four sets of rated texts: rows of 384 features, their usual length 19.6; two classes.

    Args:
        of: "tweets", "amazon", "movies" or "news".

    Raises:
        InvalidInput: there is no such set, or the package with the encoder is not installed.
        FetchFailed: the texts are not in the cache and cannot be fetched.
    """
    if of not in RATED_SETS:
        raise InvalidInput(
            f"The argument of of {_LOADER} must be one of {', '.join(RATED_SETS)}, but {of!r} was given."
        )
    one = RATED_SETS[of]
    found = read_rated(one, cache_folder())
    encoder: list[SentenceEncoder] = []  # loaded once, and only where features are not in the cache

    def rows(part: str) -> Rows:
        chosen = [row for row, text in enumerate(found.texts) if part_of(text) == part]
        texts = [found.texts[row] for row in chosen]

        def compute() -> np.ndarray:
            if not encoder:
                encoder.append(SentenceEncoder())
            return encoder[0].features(texts)

        def digest(key: bytes) -> str:
            running = hmac.new(key, digestmod="sha256")
            for text in texts:
                running.update(len(text.encode("utf-8")).to_bytes(8) + text.encode("utf-8"))
            return running.hexdigest()

        features = remembered(digest, encoder_digest(), compute) * np.float32(_SCALE)
        labels = np.array([found.labels[row] for row in chosen], dtype=np.int64)
        return Rows(features=features.astype(np.float32), labels=labels, handed_over=True)

    public_train, public_gate = rows("public_train"), rows("public_gate")
    return Splits(
        private=rows("private") if with_private else None,
        public_train=public_train,
        public_gate=public_gate,
        classes=2,
        split_rule=f"VADER's {one.title}, {SPLIT_RULE}; features by all-MiniLM-L6-v2",
    )
