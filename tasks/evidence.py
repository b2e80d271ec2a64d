"""Gather what a certificate is verified against: from production, from a folder, from MLflow.

A service that is down is an error, as everywhere. A document that is missing, corrupted or another one than it should
be is a check that has failed, and the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from accounting.certificate import Certificate
from accounting.checks import Check, compare, failed
from accounting.errors import InvalidInput, RemergeError
from accounting.plan import Mechanism
from infra.canonical import strict_json
from infra.documents import Draw, LedgerEntry, Policy, PortfolioManifest, ReleaseManifest
from infra.releases import CERTIFICATE, DRAW, MANIFEST, MODEL
from tasks.release_merging import Material, public_start, public_statistics
from tasks.services import Services
from tasks.verifying import Evidence

T = TypeVar("T")
Progress = Callable[[str], None]


@dataclass
class _Gathering:
    """What went wrong on the way, as failed checks."""

    faults: list[Check] = field(default_factory=list)

    def attempt(self, what: str, read: Callable[[], T]) -> T | None:
        """What was read; None, and a failed check, where the documents themselves are at fault."""
        try:
            return read()
        except RemergeError as error:
            if error.retryable:
                raise
            self.faults.append(failed(what, error.message))
            return None


@dataclass(frozen=True, kw_only=True)
class _Documents:
    """What the stack holds of one certificate."""

    policy: Policy | None = None
    portfolio: PortfolioManifest | None = None
    ledger: tuple[LedgerEntry, ...] | None = None
    trajectories: dict[str, bytes] = field(default_factory=dict)
    candidates: dict[str, bytes] = field(default_factory=dict)
    material: Material | None = None


def of_region(services: Services, region: str, progress: Progress) -> Evidence:
    """Everything about what production serves in a region, from the pointer on.

    Raises:
        InvalidInput: nothing was ever promoted there.
        StackDown: a service does not answer; trying again helps.
    """
    found = services.releases.read_pointer(region)
    if found is None:
        known = ", ".join(services.policies.regions()) or "none yet"
        raise InvalidInput(f"Region {region!r} has no release to verify (regions with a policy: {known}).")
    pointer, _ = found
    gathering = _Gathering()
    release = gathering.attempt(
        "release manifest that the pointer names",
        lambda: services.releases.read_manifest(pointer.release_id, sha256=pointer.release_manifest_digest),
    )
    files: dict[str, bytes | None] = {}
    if release is not None:
        gathering.faults += [
            compare("region of the pointer", pointer.region, release.region),
            compare("policy serial of the pointer", pointer.policy_serial, release.policy_serial),
        ]
        for name in release.files:
            progress(f"Reading {name}")
            files[name] = gathering.attempt(
                f"{name} of the release",
                lambda n=name: _file(services, release, n),  # type: ignore[misc]
            )
    content = files.get(CERTIFICATE) or b""
    documents = _of_stack(services, content, gathering, progress)
    stored_draw = files.get(DRAW)
    draw = None if stored_draw is None else gathering.attempt("draw", lambda: _draw(stored_draw))
    return _evidence(content, documents, gathering, release=release, draw=draw, model=files.get(MODEL))


def of_file(path: Path, services: Services | None, trajectories: Path | None, progress: Progress) -> Evidence:
    """A certificate's file, what lies beside it, and what the stack or a folder of trajectories knows.

    Args:
        path: of the certificate; `manifest.json`, `draw.json` and `model.safetensors` are taken from its folder.
        services: None where there is no stack, or where it shall not be asked.
        trajectories: a folder of NAME.json, by candidate; in place of MLflow.

    Raises:
        InvalidInput: the file cannot be read.
        StackDown: a service does not answer; trying again helps.
    """
    content = _read(path)
    if content is None:
        raise InvalidInput(f"There is no certificate at {path}; `remerge pull REGION --to DIR` writes one.")
    gathering = _Gathering()
    stored = {name: _read(path.parent / name) for name in (MANIFEST, DRAW, MODEL)}
    sealed, drawn = stored[MANIFEST], stored[DRAW]
    release = (
        None
        if sealed is None
        else gathering.attempt(MANIFEST, lambda: ReleaseManifest.from_content(sealed, MANIFEST))
    )
    draw = None if drawn is None else gathering.attempt(DRAW, lambda: _draw(drawn))
    documents = _Documents()
    if services is not None:
        documents = _of_stack(services, content, gathering, progress)
    if trajectories is not None:
        certificate = _parsed(content)
        for name in certificate.candidates if certificate else ():
            run = _read(trajectories / f"{name}.json") if "/" not in name else None
            if run is not None:
                documents.trajectories[name] = run
    return _evidence(content, documents, gathering, release=release, draw=draw, model=stored[MODEL])


def _evidence(
    content: bytes,
    documents: _Documents,
    gathering: _Gathering,
    *,
    release: ReleaseManifest | None,
    draw: Draw | None,
    model: bytes | None,
) -> Evidence:
    return Evidence(
        certificate=content,
        trajectories=documents.trajectories,
        policy=documents.policy,
        portfolio=documents.portfolio,
        release=release,
        draw=draw,
        model=model,
        candidates=documents.candidates,
        material=documents.material,
        ledger=documents.ledger,
        faults=tuple(gathering.faults),
    )


def _of_stack(services: Services, content: bytes, gathering: _Gathering, progress: Progress) -> _Documents:
    """The documents that a certificate names, and its candidates' files."""
    from tasks.registry import fetch_files

    certificate = _parsed(content)
    if certificate is None:
        return _Documents()
    progress("Reading the policy, the portfolio and the ledger")
    policy = gathering.attempt(
        "policy", lambda: services.policies.read(certificate.region, certificate.policy_serial)
    )
    portfolio = gathering.attempt(
        "portfolio manifest", lambda: services.manifests.resolve(certificate.portfolio)
    )
    ledger = gathering.attempt(
        "ledger, its chain whole", lambda: tuple(services.ledger.entries(certificate.lineage))
    )
    documents = _Documents(policy=policy, portfolio=portfolio, ledger=ledger)
    for record in portfolio.candidates if portfolio else ():
        if portfolio is None or record.name not in certificate.candidates:
            continue
        progress(f"Fetching candidate {record.name}")
        files = gathering.attempt(
            f"files of candidate {record.name}",
            lambda r=record: fetch_files(services.mlflow, portfolio, r),  # type: ignore[misc]
        )
        if files is not None:
            documents.candidates[record.name], documents.trajectories[record.name] = files
    if portfolio is None or not set(certificate.weights) <= set(documents.candidates):
        return documents
    progress("Gathering what the merge needs")
    material = gathering.attempt(
        "what the merge needs", lambda: _material(services, portfolio, certificate, documents.candidates)
    )
    return replace(documents, material=material)


def _material(
    services: Services, portfolio: PortfolioManifest, certificate: Certificate, models: Mapping[str, bytes]
) -> Material:
    """The public start, and statistics made again, where the certificate's operator needs them."""
    if certificate.mechanism is not Mechanism.OPERATOR:
        return Material()
    return Material(
        start=public_start(services.mlflow, portfolio, certificate.merge),
        statistics=public_statistics(portfolio, certificate, models),
    )


def _parsed(content: bytes) -> Certificate | None:
    """The certificate, where it can be read; what is wrong with it otherwise is for `verify` to say."""
    try:
        return Certificate.from_dict(strict_json(content))
    except (RemergeError, ValueError, TypeError):
        return None


def _file(services: Services, release: ReleaseManifest, name: str) -> bytes:
    return services.releases.read_file(release.release_id, name, release.files[name])


def _draw(content: bytes) -> Draw:
    return Draw.from_content(content, DRAW)


def _read(path: Path) -> bytes | None:
    """A file's content; None where there is no such file."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror or error}.") from None
