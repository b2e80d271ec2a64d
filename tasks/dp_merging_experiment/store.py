"""Results by key, in the cache folder: each is there whole or not at all, so a killed experiment goes on.

The models of runs lie beside their results. They are private models; here their rows are published ones, but the
folder is readable by its owner alone, like the other private parts of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.canonical import canonical_json, sha256_hex, strict_json
from tasks.data.image_cache import CacheUnusable, cache_folder
from tasks.whole_file import write_whole

FOLDER = "dp-merging"


@dataclass(frozen=True, slots=True)
class Store:
    """A folder of results."""

    folder: Path

    @classmethod
    def in_cache(cls) -> Store:
        return cls(cache_folder() / FOLDER)

    def result(self, kind: str, key: str) -> dict[str, Any] | None:
        """What was kept; None where nothing was, or it is damaged, or the model that belongs to it is not there."""
        try:
            document = strict_json(self._file(kind, key, "json").read_bytes())
            found: dict[str, Any] = document["result"]
            if (
                document["model_sha256"] is not None
                and self._model(kind, key, document["model_sha256"]) is None
            ):
                return None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return found

    def model(self, kind: str, key: str) -> bytes | None:
        """The model that was kept with a result; None as for `result`."""
        try:
            document = strict_json(self._file(kind, key, "json").read_bytes())
            return self._model(kind, key, document["model_sha256"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(
        self, kind: str, key: str, setting: Any, result: dict[str, Any], model: bytes | None = None
    ) -> None:
        """Keep a result with its setting, for people who look, and perhaps a model.

        Raises:
            CacheUnusable: the folder cannot be made or written.
        """
        document = {
            "setting": setting,
            "result": result,
            "model_sha256": None if model is None else sha256_hex(model),
        }
        try:
            if model is not None:
                self._place(self._file(kind, key, "safetensors"), model)
            self._place(self._file(kind, key, "json"), canonical_json(document))
        except OSError as error:
            raise CacheUnusable.of(self.folder, error) from None

    def _model(self, kind: str, key: str, digest: str) -> bytes | None:
        content = self._file(kind, key, "safetensors").read_bytes()
        return content if sha256_hex(content) == digest else None

    def _file(self, kind: str, key: str, end: str) -> Path:
        return self.folder / kind / f"{key}.{end}"

    def _place(self, path: Path, content: bytes) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.parent.mkdir(exist_ok=True, mode=0o700)
        write_whole(path, content)
