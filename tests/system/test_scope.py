"""Budgets that cover many releases, on the real stack: what is out counts, and nobody spends the same rest twice."""

from __future__ import annotations

import fcntl
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.documents import Policy, PortfolioManifest, release_id_of
from infra.orchestrator import TERMINAL
from tasks.compliance import State
from tasks.cumulative import ledger_figures
from tasks.live_release import region_compliance
from tasks.services import Services
from tests.conftest import SharedStack
from tests.system.conftest import keys_of, read_json, run_policy

pytestmark = pytest.mark.system

Remerge = Callable[..., subprocess.CompletedProcess[str]]

RECIPE = """
name: {name}
lineage: {name}
data: {{loader: tasks.data:digits}}
network: {{factory: tasks.models:softmax_regression, arguments: {{features: 65, classes: 10}}}}
feature_radius: 1.0
n_max: 1200
initialisation_seed: 1
delta: 1.0e-5
defaults: {{steps: 20, max_grad_norm: 1.4143, learning_rate: 3.9, expected_batch_size: 1200}}
candidates:
  strong: {{noise_multiplier: 40}}
  medium: {{noise_multiplier: 22}}
  weak: {{noise_multiplier: 12}}
"""


@pytest.fixture(scope="module")
def trained(
    stack: SharedStack, services: Services, remerge: Remerge, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], PortfolioManifest]:
    """A portfolio with a lineage of its own, trained once for the whole run."""

    def train(name: str) -> PortfolioManifest:
        with (stack.settings.home / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if services.manifests.newest(name) is None:
                recipe = tmp_path_factory.mktemp(name) / f"{name}.yaml"
                recipe.write_text(RECIPE.format(name=name))
                ended = remerge("train", str(recipe))
                assert ended.returncode == 0, ended.stderr
        return services.manifests.read(name, 1)

    return train


@pytest.fixture(scope="module")
def scoped(trained: Callable[[str], PortfolioManifest]) -> PortfolioManifest:
    return trained("scoped")


def figure(services: Services, lineage: str) -> float:
    found = ledger_figures(services.ledger.entries(lineage), 1e-5).everywhere
    assert found is not None
    return found


def test_two_regions_share_one_budget(
    scoped: PortfolioManifest,
    services: Services,
    remerge: Remerge,
    s3: Any,
    prefect_api: None,
    tmp_path: Path,
) -> None:
    """Both at once, both for the same lifetime budget: the ledger decides who came first."""
    common = ["--delta", "1e-5", "--portfolio", "scoped@1", "--scope", "all_regions", "--yes", "--no-wait"]
    common += ["--mechanism", "linear_combination"]
    epsilons = {"scope-a": 1.6, "scope-b": 1.3}
    for region, epsilon in epsilons.items():
        ended = remerge("policy", "set", "--region", region, "--epsilon", str(epsilon), *common)
        assert ended.returncode == 0, ended.stderr
    outcomes = {}
    for region in epsilons:
        run = services.orchestrator.wait(_run_of(services, region), timeout=120)
        assert run["state_type"] in TERMINAL
        attempt = services.releases.read_attempt(region)
        assert attempt is not None
        outcomes[region] = attempt.outcome
    assert set(outcomes.values()) <= {"promoted", "infeasible"}
    assert "promoted" in outcomes.values()
    entries = services.ledger.entries("scoped")
    intended = [entry.region for entry in entries if entry.kind == "intended"]
    last = intended[-1]
    assert figure(services, "scoped") <= epsilons[last] * (1 + 1e-9)
    assert [e.kind for e in entries if e.region == last] == ["reserved", "intended", "live"]

    release_id = read_json(s3, f"regions/{last}/current.json")["release_id"]
    certificate = read_json(s3, f"releases/{release_id}/certificate.json")
    assert certificate["cumulative"]["epsilon_all_regions"] == pytest.approx(
        figure(services, "scoped"), rel=1e-9
    )
    assert certificate["cumulative"]["releases"] == len(intended)

    # A stricter lifetime budget can never undo what is out already.
    ended = remerge("policy", "set", "--region", "scope-c", "--epsilon", "0.7", *common[:-3], "--wait")
    assert ended.returncode == 1
    assert "cannot be taken back" in " ".join(ended.stderr.split())
    assert "scope-c" not in {entry.region for entry in services.ledger.entries("scoped")}

    told = remerge("ledger", "scoped", "--json")
    assert told.returncode == 0, told.stderr
    document = json.loads(told.stdout)["scoped"]
    assert document["epsilon"] == pytest.approx(figure(services, "scoped"), rel=1e-9)
    assert set(document["by_region"]) == set(intended)
    shown = remerge("ledger", "scoped")
    assert "those of all regions (colluding)" in shown.stdout
    unknown = remerge("ledger", "nobody")
    assert unknown.returncode == 1
    assert "There is no ledger of 'nobody'" in unknown.stderr


def _run_of(services: Services, region: str) -> str:
    for _ in range(300):
        for run in services.orchestrator.runs("policy-change"):
            if (run.get("parameters") or {}).get("region") == region:
                return str(run["id"])
        time.sleep(0.2)
    raise AssertionError(f"no run for {region}")


def test_an_attempt_that_was_overtaken_exposes_nothing(
    portfolio: PortfolioManifest,
    services: Services,
    prefect_api: None,
    region: str,
    s3: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A newer policy with a budget for the whole region is promoted while the older one is about to be written down."""
    import flows.policy_change as story

    common = {"region": region, "delta": 1e-5, "portfolio": portfolio.reference, "author": "test"}
    old = services.policies.append({**common, "epsilon": 2.6, "mechanisms": ["linear_combination"]})
    merge = story.merge_models

    def overtaken(*arguments: Any) -> bytes:
        monkeypatch.setattr(story, "merge_models", merge)
        newer = services.policies.append({**common, "epsilon": 1.0, "scope": "region"})
        assert run_policy(newer).succeeded
        return merge(*arguments)

    monkeypatch.setattr(story, "merge_models", overtaken)
    ended = run_policy(old)
    assert "superseded by policy 2" in ended.sentence
    entries = [e for e in services.ledger.entries(portfolio.lineage) if e.region == region]
    assert [e.kind for e in entries] == ["reserved", "intended", "live"]
    assert keys_of(s3, f"releases/{release_id_of(old, portfolio)}/") == []
    assert region_compliance(services, region)[2].state is State.COMPLIANT

    # A rule for the whole region that what is out breaks already: the live release does not comply with it.
    spent = services.policies.append({**common, "epsilon": 0.6, "scope": "region"})
    assert not run_policy(spent).succeeded
    _, _, verdict = region_compliance(services, region)
    assert verdict.state is State.NON_COMPLIANT
    looser = services.policies.append({**common, "epsilon": 3.0, "mechanisms": ["linear_combination"]})
    assert run_policy(looser).succeeded
    services.policies.append({**common, "epsilon": 3.1, "scope": "region"})
    _, live, verdict = region_compliance(services, region)
    assert live is not None
    assert live.certificate.epsilon <= 3.1  # alone it would comply
    assert verdict.state is State.NON_COMPLIANT
    assert "All releases of the region together have epsilon" in verdict.reason


def test_what_was_released_since_a_reservation_counts(
    trained: Callable[[str], PortfolioManifest],
    services: Services,
    prefect_api: None,
    s3: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two attempts that die after their reservation and after their draw, with another region's release between."""
    import flows.policy_change as story

    held = trained("held")

    def policy(region: str, epsilon: float, **more: Any) -> Policy:
        fields = {"region": region, "epsilon": epsilon, "delta": 1e-5, "portfolio": held.reference}
        return services.policies.append({**fields, "author": "test", **more})

    def die_after(step: str, policy: Policy) -> None:
        real = getattr(story, step)

        def dying(*arguments: Any) -> Any:
            real(*arguments)
            raise RuntimeError("the process dies here")

        monkeypatch.setattr(story, step, dying)
        assert not run_policy(policy).succeeded
        monkeypatch.setattr(story, step, real)

    def kinds(region: str) -> list[str]:
        return [entry.kind for entry in services.ledger.entries("held") if entry.region == region]

    lifetime = {"scope": "all_regions", "mechanisms": ["random_selection"]}
    first = policy("held-a", 2.0, **lifetime)
    monkeypatch.setattr("tasks.drawing.secrets.token_hex", lambda size: "0" * (2 * size))
    die_after("make_draw", first)
    drawn = services.releases.read_draw(release_id_of(first, held))
    assert drawn is not None
    assert drawn.drawn == "medium"
    assert kinds("held-a") == ["reserved"]
    assert run_policy(policy("held-b", 1.0, mechanisms=["linear_combination"])).succeeded
    assert run_policy(first).succeeded  # there is room for what was drawn beside it
    assert kinds("held-a") == ["reserved", "intended", "live"]
    assert services.releases.read_draw(release_id_of(first, held)) == drawn
    certificate = read_json(s3, f"releases/{release_id_of(first, held)}/certificate.json")
    assert certificate["cumulative"]["releases"] == 2
    assert certificate["cumulative"]["epsilon_all_regions"] == pytest.approx(
        figure(services, "held"), rel=1e-9
    )
    assert region_compliance(services, "held-a")[2].state is State.COMPLIANT

    second = policy("held-c", 2.3, **lifetime)
    die_after("reserve", second)
    assert kinds("held-c") == ["reserved"]
    # Its own budget covers itself alone.
    assert run_policy(policy("held-d", 2.9, mechanisms=["linear_combination"])).succeeded
    ended = run_policy(second)
    assert not ended.succeeded
    assert "cannot be taken back" in ended.sentence
    assert kinds("held-c") == ["reserved"]
    assert keys_of(s3, f"releases/{release_id_of(second, held)}/") == []
    _, _, verdict = region_compliance(services, "held-a")
    assert verdict.state is State.NON_COMPLIANT  # a later release of another budget has used up its own
    assert "All releases of the lineage in all regions together have epsilon" in verdict.reason
