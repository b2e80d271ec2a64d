"""The uncased WordPiece tokenizer of BERT, as far as English needs it: texts to numbers of pieces.

Source: Devlin et al., arXiv 1810.04805; the rules are those of the reference implementation: control characters go,
letters lose their case and accents, punctuation stands alone, and each word is cut greedily into the longest known
pieces, of which all but the first begin with "##".
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from functools import lru_cache

UNKNOWN, START, END = "[UNK]", "[CLS]", "[SEP]"
_ASCII_WORDS = re.compile(r"[a-z0-9]+|[^a-z0-9\s]")
_ASCII_CONTROLS = {number: None for number in (*range(32), 127) if chr(number) not in "\t\n\r"}
_LONGEST_WORD = 100  # characters; a longer word is unknown


class WordPieces:
    """A tokenizer with its vocabulary."""

    def __init__(self, vocabulary: Mapping[str, int]) -> None:
        self.vocabulary = vocabulary
        self._pieces = lru_cache(maxsize=100_000)(self._cut)

    @classmethod
    def of(cls, content: str) -> WordPieces:
        """From the text of a vocabulary file: a piece each line."""
        return cls({piece: number for number, piece in enumerate(content.split("\n")) if piece})

    def numbers(self, text: str, most: int) -> list[int]:
        """The numbers of a text's pieces between those of START and END, at most `most` together."""
        found = [number for word in words(text) for number in self._pieces(word)]
        return [self.vocabulary[START], *found[: most - 2], self.vocabulary[END]]

    def _cut(self, word: str) -> tuple[int, ...]:
        unknown = (self.vocabulary[UNKNOWN],)
        if len(word) > _LONGEST_WORD:
            return unknown
        found, start = [], 0
        while start < len(word):
            prefix = "##" if start else ""
            for end in range(len(word), start, -1):
                number = self.vocabulary.get(prefix + word[start:end])
                if number is not None:
                    found.append(number)
                    start = end
                    break
            else:
                return unknown
        return tuple(found)


def words(text: str) -> Iterator[str]:
    """Words and single punctuation marks, lower-case and without accents."""
    if text.isascii():  # most texts, and much quicker
        yield from _ASCII_WORDS.findall(text.translate(_ASCII_CONTROLS).lower())
        return
    plain = unicodedata.normalize("NFD", _cleaned(text).lower())
    word = ""
    for character in plain:
        if unicodedata.category(character) == "Mn":
            continue
        if character == " " or _stands_alone(character):
            if word:
                yield word
                word = ""
            if character != " ":
                yield character
        else:
            word += character
    if word:
        yield word


def _cleaned(text: str) -> str:
    """Without control characters; all white space is a space."""
    kept = []
    for character in text:
        if character in "\t\n\r" or unicodedata.category(character) == "Zs":
            kept.append(" ")
        elif character not in "\0�" and not unicodedata.category(character).startswith("C"):
            kept.append(character)
    return "".join(kept)


def _stands_alone(character: str) -> bool:
    """Punctuation, everything printable in ASCII that is neither a letter nor a digit, and Chinese characters."""
    ascii_mark = character.isascii() and character.isprintable() and not character.isalnum()
    ideograph = any(first <= ord(character) <= last for first, last in _IDEOGRAPHS)
    return ascii_mark or ideograph or unicodedata.category(character).startswith("P")


_IDEOGRAPHS = (
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2CEAF),
    (0x2F800, 0x2FA1F),
)
