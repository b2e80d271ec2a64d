"""`remerge demo`: the main job end to end on real data, in about a minute."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from accounting.errors import RemergeError
from accounting.words import rounded_up
from flows.tables import plain_table
from flows.with_stack import running_stack, timed
from infra.documents import Policy, PortfolioManifest
from infra.settings import Settings

if TYPE_CHECKING:
    from accounting.plan import Plan
    from tasks.candidates import LoadedCandidate
    from tasks.live_release import LiveRelease
    from tasks.services import Services

RECIPE = Path("infra/portfolios/digits.yaml")
DELTA = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One policy change of the demo."""

    region: str
    epsilon: float
    mechanisms: tuple[str, ...]
    reason: str


ROUNDS = (
    (
        Change(
            region="eu",
            epsilon=3.0,
            mechanisms=("linear_combination", "random_selection"),
            reason="the first rule",
        ),
        Change(
            region="us",
            epsilon=1.5,
            mechanisms=("random_selection",),
            reason="only whole candidates may be released",
        ),
    ),
    (
        Change(
            region="eu",
            epsilon=1.5,
            mechanisms=("linear_combination", "random_selection"),
            reason="the regulator halves epsilon",
        ),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A promoted release, as it was right after its promotion."""

    policy: Policy
    live: LiveRelease


def run_demo(settings: Settings, console: Console, *, keep: bool) -> None:
    """Train a portfolio, change policies of two regions, show what was promoted.

    Leaves the stack as it found it, also where it is told to stop (Ctrl-C or SIGTERM), unless `keep` is set: then
    it stays up.

    Raises:
        RunNotEnded: it was told to stop while it waited for a flow run.
    """
    from flows.views import print_addresses

    began = time.monotonic()
    with running_stack(settings, console, keep=keep, command="remerge demo"):
        _main_job(settings, console)
        if keep:
            print_addresses(console, settings)
            console.print("The stack stays up: `remerge status`, `remerge pull eu --to DIR`, `remerge down`.")
    console.print(f"Done in {time.monotonic() - began:.0f} s.", highlight=False)


def _main_job(settings: Settings, console: Console) -> None:
    from flows.commands import train_portfolio
    from tasks.services import open_services

    with timed(console, "Training a portfolio with DP-SGD on 1,200 private digits"):
        manifest = train_portfolio(settings, RECIPE, console)
    services = open_services(settings)
    shown = [
        release
        for changes in ROUNDS
        for release in _change_policies(settings, services, console, changes, manifest.reference)
    ]
    with timed(console, "Scoring single candidates, for the comparison below"):
        table = _comparison(services, manifest, shown)
    console.print(table)
    console.print(
        "The last column looks at candidates that were never released. That is allowed here because digits is public "
        "data; in real use those scores stay inside the trust boundary, and the flow that promoted never saw them.",
        style="dim",
        highlight=False,
    )
    _show_draw(services, console, shown)


def _change_policies(
    settings: Settings,
    services: Services,
    console: Console,
    changes: tuple[Change, ...],
    portfolio: str,
) -> Iterator[Shown]:
    """Set policies, emit their events, wait for the runs that Prefect starts, and read what is live."""
    from flows.commands import Asked, FlowFailed, set_policy, wait_for_policy
    from infra.events import emit_policy_changed
    from infra.orchestrator import message_of
    from tasks.live_release import read_live

    emitted = []
    for change in changes:
        fields = {
            "region": change.region,
            "epsilon": change.epsilon,
            "delta": DELTA,
            "portfolio": portfolio,
            "mechanisms": change.mechanisms,
            "author": "demo",
            "reason": change.reason,
        }
        asked = Asked(create_region=True, new=False, confirm=lambda _question: True)
        policy = set_policy(settings, fields, asked=asked, console=console)
        emitted.append((policy, emit_policy_changed(services.orchestrator, policy)))
    regions = ", ".join(policy.region for policy, _ in emitted)
    with timed(console, f"Event policy.changed -> Prefect starts policy_change for {regions}"):
        for policy, event_id in emitted:
            ended = wait_for_policy(settings, services, policy, event_id, console)
            if ended.get("state_type") != "COMPLETED":
                raise FlowFailed(message_of(ended) or f"policy_change for {policy.region} did not end well.")
            console.print(f"  {message_of(ended)}", highlight=False)
    for policy, _ in emitted:
        found = read_live(services.releases, policy.region)
        if found is None:
            raise RemergeError(f"Nothing is live in {policy.region} although its run ended well.")
        yield Shown(policy=policy, live=found[2])


def _comparison(services: Services, manifest: PortfolioManifest, shown: list[Shown]) -> Table:
    """What was promoted, beside the best single candidate under the same budget."""
    from tasks.data import load_public_gate
    from tasks.registry import load_all
    from tasks.report import weights_in_words
    from tasks.validation import accuracy

    loaded = load_all(services.mlflow, manifest)
    rows = load_public_gate(manifest)
    table = plain_table(
        "What was promoted, and the best single candidate that the same budget allows",
        "region",
        ">budget",
        ">certified",
        ">accuracy",
        "released",
        "best single",
    )
    for release in shown:
        policy, live = release.policy, release.live
        single = _best_single(policy, manifest, loaded)
        alone = accuracy(manifest.network, loaded[single].model, rows)
        table.add_row(
            f"{policy.region} (policy {policy.serial})",
            f"{policy.epsilon:g}",
            rounded_up(live.certificate.epsilon),
            f"{live.manifest.accuracy:.3f}",
            f"{live.certificate.mechanism.replace('_', ' ')}: {weights_in_words(live.certificate.weights)}",
            f"{single}: {alone:.3f}",
        )
    return table


def _best_single(policy: Policy, manifest: PortfolioManifest, loaded: dict[str, LoadedCandidate]) -> str:
    """The candidate with the least noise that satisfies the budget on its own."""
    from tasks.candidates import accountable
    from tasks.solving import solve_policy

    plan: Plan = solve_policy(policy, accountable(manifest, policy, loaded))
    weights = next(
        alternative.weights for alternative in plan.alternatives if alternative.label == "best_single"
    )
    return next(iter(weights))


def _show_draw(services: Services, console: Console, shown: list[Shown]) -> None:
    """Read back the stored draws: a random selection is drawn once, and stored before it is used."""
    for release in shown:
        draw = services.releases.read_draw(release.live.manifest.release_id)
        if draw is not None:
            console.print(
                f"draw.json of {release.policy.region}: {draw.drawn} (index {draw.drawn_index} of "
                f"{', '.join(f'{name} {weight:.4g}' for name, weight in draw.weights.items())}), "
                f"point 0x{draw.point[:12]}..., {draw.drawn_at:%Y-%m-%d %H:%M:%S} UTC, from {draw.entropy_source}.",
                highlight=False,
                soft_wrap=True,
            )
