"""Policies and portfolio manifests: append-only documents in the production bucket."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from infra.documents import Policy, PortfolioManifest
from infra.numbered import Numbered, NumberedDocuments, parse_reference
from infra.object_store import Missing, ObjectStore


class PolicyStore:
    """policies/<region>/<serial>.json. A region exists by its first policy."""

    def __init__(self, store: ObjectStore) -> None:
        self.documents = NumberedDocuments(store, Policy, root="policies", series_field="region")

    def regions(self) -> list[str]:
        """Every region that has a policy, sorted."""
        return self.documents.series()

    def newest(self, region: str) -> Policy | None:
        """The policy with the highest serial, or None for an unknown region."""
        newest = self.documents.newest(region)
        return newest.document if newest else None

    def in_effect(self, region: str, now: datetime) -> Policy | None:
        """The policy that holds in a region at a time: the newest of those whose `effective_at` has come.

        A newer policy cancels older ones that were still to come, from the moment that it takes effect itself.
        None for an unknown region, and before its first policy takes effect.
        """
        for serial in range(self.documents.last_serial(region), 0, -1):
            policy = self.read(region, serial)
            if policy.effective_at <= now:
                return policy
        return None

    def next_to_come(self, region: str, now: datetime) -> Policy | None:
        """The policy that takes effect next: the earliest one still to come that no newer one cancels before."""
        current = self.in_effect(region, now)
        first = current.serial + 1 if current is not None else 1
        later = [self.read(region, n) for n in range(first, self.documents.last_serial(region) + 1)]
        return min(later, key=lambda policy: (policy.effective_at, -policy.serial), default=None)

    def read(self, region: str, serial: int) -> Policy:
        """Read one policy.

        Raises:
            Missing: there is no such policy.
            InvalidInput, Corrupted: what is stored is not a policy, or not this one.
        """
        try:
            return self.documents.read(region, serial).document
        except Missing:
            raise Missing(
                f"There is no policy {serial} of region {region}; `remerge policy show {region}` shows the current one."
            ) from None

    def append(self, fields: Mapping[str, Any], *, new: bool = False) -> Policy:
        """Store a policy under the region's next serial.

        Args:
            fields: those of a policy without `serial`; `effective_at` is now when it is left out.
            new: add a document even if the region's newest policy has the same terms (which is returned
                unchanged otherwise: the same policy again is the same release).

        Raises:
            InvalidInput: the first field at fault; nothing was stored.
        """

        def build(serial: int, newest: Numbered[Policy] | None) -> Policy:
            # "Now" is after `newest` was stored: two who set the same terms at once get one document.
            now = datetime.now(UTC).isoformat()
            policy = Policy.from_fields({"effective_at": now, **fields, "serial": serial}, "policy")
            same = newest and newest.document.terms() == policy.terms()
            if newest and same and not new and _holds_then(newest.document, policy, "effective_at" in fields):
                return newest.document
            return policy

        return self.documents.append(build(1, None).region, build)


def _holds_then(newest: Policy, asked: Policy, at_a_time: bool) -> bool:
    """Whether the newest policy does what is asked, so that no document of the same terms is needed: it holds by then.

    One that is still to come does not, if it is asked for at another time: it is moved.
    """
    if at_a_time and newest.effective_at > datetime.now(UTC):
        return newest.effective_at == asked.effective_at
    return newest.effective_at <= asked.effective_at


class ManifestStore:
    """portfolios/<name>/<serial>.json: each document is a portfolio version."""

    def __init__(self, store: ObjectStore) -> None:
        self.documents = NumberedDocuments(store, PortfolioManifest, root="portfolios", series_field="name")

    def names(self) -> list[str]:
        """Every portfolio that has a version, sorted."""
        return self.documents.series()

    def newest(self, name: str) -> PortfolioManifest | None:
        """The newest version, or None for an unknown portfolio."""
        newest = self.documents.newest(name)
        return newest.document if newest else None

    def read(self, name: str, serial: int) -> PortfolioManifest:
        """Read one version.

        Raises:
            Missing: there is no such version.
            InvalidInput, Corrupted: what is stored is not a manifest, or not this one.
        """
        try:
            return self.documents.read(name, serial).document
        except Missing:
            raise Missing(
                f"There is no portfolio version {name}@{serial}: train one with `remerge train`."
            ) from None

    def resolve(self, reference: str) -> PortfolioManifest:
        """Read `name@number`, or the newest of `name@latest`.

        Raises:
            InvalidInput: the reference is written otherwise.
            Missing: there is no such version, or no version at all.
        """
        name, serial = parse_reference(reference, "portfolio")
        if serial is not None:
            return self.read(name, serial)
        newest = self.newest(name)
        if newest is None:
            raise Missing(f"There is no portfolio {name} yet: train one with `remerge train`.")
        return newest

    def of_flow_run(self, name: str, flow_run_id: str) -> PortfolioManifest | None:
        """The version that a train_portfolio run wrote, or None."""
        for serial in range(self.documents.last_serial(name), 0, -1):
            manifest = self.read(name, serial)
            if manifest.flow_run_id == flow_run_id:
                return manifest
        return None

    def append(self, fields: Mapping[str, Any]) -> PortfolioManifest:
        """Store a portfolio version under the portfolio's next serial.

        Args:
            fields: those of a manifest without `serial`.

        Raises:
            InvalidInput: the first field at fault; nothing was stored.
        """

        def build(serial: int, newest: Numbered[PortfolioManifest] | None) -> PortfolioManifest:
            del newest
            return PortfolioManifest.from_fields({**fields, "serial": serial}, "portfolio manifest")

        return self.documents.append(build(1, None).name, build)
