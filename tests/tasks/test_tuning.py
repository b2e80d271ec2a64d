"""A tuning on real models: public rows alone, the recipe's lines as they are pasted, and what MLflow keeps."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from accounting.errors import InvalidInput
from infra.settings import StackDown
from tasks.data import Rows, Splits
from tasks.mlflow_server import mlflow_client
from tasks.models import build, initial_state
from tasks.public_twins import split_public
from tasks.recipes import Recipe, parse_recipe
from tasks.tuning.bench import Bench, noise_for, own_epsilon
from tasks.tuning.runs import CHOSEN_TAG, STAGE_TAG, logged
from tasks.tuning.trials import Setting, TuningFailed
from tasks.tuning.tuning import Tuning, document, prepare, snippet, tune_candidate, verdict
from tests.tasks.conftest import RECIPE

TEXT = RECIPE.replace("n_max: 50", "n_max: 400").replace(
    "expected_batch_size: 40",
    "expected_batch_size: 100\n    sampling_probability: 0.25\n    momentum: 0.5\n    weight_decay: 0.0",
)


def learnable(seed: int, count: int) -> Rows:
    """Three clusters of rows with five features."""
    numbers = np.random.default_rng(seed)
    labels = numbers.integers(3, size=count)
    features = numbers.normal(size=(count, 5)) * 0.5 + 2 * np.eye(5)[labels]
    return Rows(features=features.astype(np.float32), labels=labels)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the command does: these models are small, and threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def asked(users_loader: Callable[[Callable[..., Any]], None]) -> list[bool]:
    """Offers 90 public-train rows; lists what each call of the loader asked for, and has no private rows to give."""
    calls: list[bool] = []

    def loader(*, with_private: bool) -> Splits:
        calls.append(with_private)
        assert not with_private
        return Splits(
            private=None,
            public_train=learnable(2, 90),
            public_gate=learnable(3, 20),
            classes=3,
            split_rule="two different seeds",
        )

    users_loader(loader)
    return calls


def recipe(**changes: Any) -> Recipe:
    text = TEXT
    for name, value in changes.items():
        old = next(line for line in TEXT.splitlines() if line.strip().startswith(f"{name}:"))
        text = text.replace(old, f"{old.split(':')[0]}: {value}")
    return parse_recipe(text, "small.yaml")


def tuned(found: Recipe, budget: int | None = 8, **changes: Any) -> Tuning:
    arguments = {"candidate": None, "epsilon": 8.0, "seeds": 2, "budget_trials": budget}
    return tune_candidate(prepare(found, **{**arguments, **changes}))


def own_setting(found: Recipe, **changes: Any) -> Setting:
    own = found.candidate("only")
    values = {name: getattr(own, name) for name in ("max_grad_norm", "learning_rate", "sampling_probability")}
    return Setting(**{**values, "epsilon": 8.0, "noise_multiplier": own.noise_multiplier, **changes})


def test_no_private_row_is_asked_for(asked: list[bool]) -> None:
    found = tuned(recipe())
    assert asked
    assert not any(asked)
    assert found.prepared.bench.splits.private is None
    assert found.found.chosen.accuracy > 0.8


def test_the_same_recipe_gives_the_same_result(asked: list[bool]) -> None:
    assert document(tuned(recipe())) == document(tuned(recipe()))


def test_fitted_and_scored_rows_are_apart_and_the_gate_rows_are_neither(asked: list[bool]) -> None:
    bench = Bench.of(recipe(), recipe().candidate("only"), 1)
    fitting, scoring = split_public(bench.splits.public_train)
    assert (len(fitting), len(scoring)) == (60, 30)
    assert (bench.fitting.content(), bench.scoring.content()) == (fitting.content(), scoring.content())


def test_seeds_differ_and_without_noise_and_sampling_one_model_is_enough(asked: list[bool]) -> None:
    found = recipe(noise_multiplier=40)
    bench = Bench.of(found, found.candidate("only"), 3)
    noisy = bench.try_out(own_setting(found))
    assert noisy.right.shape == (3, 30)
    assert len({row.tobytes() for row in noisy.right}) == 3
    shares: list[float] = []
    quiet = bench.try_out(
        own_setting(found, epsilon=None, noise_multiplier=1e-9, sampling_probability=1.0), shares.append
    )
    assert quiet.right.shape == (1, 30)
    assert shares == [step / 12 for step in range(1, 13)]


def test_the_noise_hurts_as_much_as_on_the_private_rows(asked: list[bool]) -> None:
    """Divided by the batch, its standard deviation is the private run's; the batch is q times the rows."""
    found = recipe()
    bench = Bench.of(found, found.candidate("only"), 1)
    private = bench.as_recipe(own_setting(found, sampling_probability=0.5, noise_multiplier=6.0))
    assert private.expected_batch_size == 200.0  # of the 400 rows that 100 / 0.25 stands for
    assert private.momentum == 0.5
    assert private.steps == 12
    assert private.noise_multiplier == 6.0


def test_the_median_norm_is_that_of_single_rows(asked: list[bool]) -> None:
    found = recipe()
    bench = Bench.of(found, found.candidate("only"), 1)
    module = build(found.network)
    module.load_state_dict(initial_state(found.network, found.initialisation_seed))
    features = torch.tensor(bench.fitting.features)
    left = torch.softmax(module(features).detach(), dim=1) - torch.eye(3)[torch.tensor(bench.fitting.labels)]
    exact = left.norm(dim=1) * features.norm(dim=1)  # the gradient of softmax regression is (p - y) x
    assert bench.median_norm() == pytest.approx(float(exact.median()), rel=1e-5)


def test_the_lines_for_the_recipe_are_read_back_as_what_was_found(asked: list[bool]) -> None:
    """Also where defaults say otherwise."""
    found = tuned(recipe())
    fields = yaml.safe_load(TEXT)
    fields["defaults"] = {"steps": 5, "momentum": 0.1, "preset": "strong", "max_grad_norm": 9.0}
    fields |= yaml.safe_load(snippet(found))
    pasted = parse_recipe(yaml.safe_dump(fields), "pasted.yaml").candidate("only")
    assert pasted == found.candidate
    assert pasted.noise_multiplier == found.found.chosen.setting.noise_multiplier
    assert pasted.expected_batch_size == pytest.approx(400 * pasted.sampling_probability)


def test_a_run_that_diverges_has_no_score(asked: list[bool]) -> None:
    found = recipe(weight_decay=1.0)  # with the rate below, each step takes the parameters times -1e6
    bench = Bench.of(found, found.candidate("only"), 1)
    assert bench.try_out(own_setting(found, learning_rate=1e6)).diverged
    assert not bench.try_out(own_setting(found)).diverged


def test_the_verdict_names_a_gain_or_none(asked: list[bool]) -> None:
    loud = tuned(
        recipe(max_grad_norm=400.0), budget=10
    )  # clipping never acts there, and noise is in units of it
    assert loud.found.chosen.setting.max_grad_norm < 4
    gain, error = loud.found.own.behind(loud.found.chosen)
    assert gain > error > 0
    assert verdict(loud).endswith(f"which is {gain:.3f} ± {error:.3f} more.")
    same = tuned(recipe(), budget=4)
    assert same.found.chosen.setting == same.found.own.setting
    assert verdict(same) == "The recipe's own values are the chosen ones."


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"candidate": "other"}, "The recipe small has no candidate other; it has only."),
        ({"seeds": 0}, "--seeds must be from 1 to 20, but 0 was given"),
        ({"epsilon": -1.0}, "epsilon must be a finite number above 0"),
        ({"epsilon": math.nan}, "epsilon must be a number, but NaN was given"),
        ({"budget_trials": 3}, "--budget-trials must be from 4"),
    ],
)
def test_what_cannot_be_is_one_sentence(asked: list[bool], changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        tuned(recipe(), **changes)


def test_a_candidate_without_an_epsilon_needs_a_target(asked: list[bool]) -> None:
    with pytest.raises(
        InvalidInput, match="no epsilon of its own that could be a target; give one with --epsilon"
    ):
        tuned(recipe(noise_multiplier=1e-6, sampling_probability=1.0), epsilon=None)


def test_a_network_that_does_not_fit_is_refused(asked: list[bool]) -> None:
    factory = "{factory: tasks.models:softmax_regression, arguments: {features: 6, classes: 3}}"
    with pytest.raises(InvalidInput, match=r"does not take rows of shape \(5,\) .*; correct its arguments"):
        tuned(recipe(network=factory))


def test_too_few_public_rows_are_refused(small_portfolio: Callable[..., Any]) -> None:
    small = small_portfolio()
    with pytest.raises(
        InvalidInput, match="at least 10, but the loader users_own:rows returned 20 public-train"
    ):
        tuned(small.recipe)


@pytest.mark.system
def test_mlflow_keeps_every_trial_below_its_tuning(asked: list[bool], stack: Any, tmp_path: Path) -> None:
    client = mlflow_client(stack.connections)
    found = recipe().model_copy(update={"name": f"small-{uuid.uuid4().hex[:8]}"})
    prepared = prepare(found, candidate="only", epsilon=8.0, seeds=2, budget_trials=6)
    with logged(client, prepared) as log:
        tuning = tune_candidate(prepared, (log,))
        log.finish(tuning, "the table ±\n")
    kept = client.get_experiment_by_name(f"{found.name}-tuning")
    assert kept is not None
    parent = client.get_run(log.run_id)
    assert parent.info.status == "FINISHED"
    assert parent.data.params["target_epsilon"] == "8.0"
    assert parent.data.tags["remerge.because.noise"] == tuning.found.stages[1].because
    assert {e.path for e in client.list_artifacts(log.run_id)} == {
        "tuning.txt",
        "tuning.json",
        "candidate.yaml",
    }
    folder = Path(client.download_artifacts(log.run_id, "", str(tmp_path)))
    assert (folder / "tuning.txt").read_text(encoding="utf-8") == "the table ±\n"
    assert json.loads((folder / "tuning.json").read_text()) == document(tuning)
    assert (folder / "candidate.yaml").read_text() == snippet(tuning)

    children = client.search_runs([kept.experiment_id], f"tags.mlflow.parentRunId = '{log.run_id}'")
    assert len(children) == prepared.plan.trials == 6
    assert {run.info.status for run in children} == {"FINISHED"}
    for stage in tuning.found.stages:
        mine = [run for run in children if run.data.tags[STAGE_TAG] == stage.name]
        (chosen,) = [run for run in mine if run.data.tags.get(CHOSEN_TAG) == "true"]
        assert chosen.data.metrics["mean_accuracy"] == stage.chosen.accuracy
        assert chosen.data.params["learning_rate"] == str(stage.chosen.setting.learning_rate)
        by_seed = client.get_metric_history(chosen.info.run_id, "accuracy")
        assert [seed.value for seed in by_seed] == stage.chosen.right.mean(axis=1).tolist()
    assert not any(name.startswith("private/") for run in children for name in run.data.metrics)


@pytest.mark.system
def test_a_tuning_that_fails_is_marked_in_mlflow(asked: list[bool], stack: Any) -> None:
    client = mlflow_client(stack.connections)
    wild = recipe(learning_rate=1e6, weight_decay=1.0).model_copy(
        update={"name": f"small-{uuid.uuid4().hex[:8]}"}
    )
    prepared = prepare(wild, candidate=None, epsilon=8.0, seeds=1, budget_trials=4)
    started: list[str] = []

    def whole() -> None:
        with logged(client, prepared) as log:
            started.append(log.run_id)
            tune_candidate(prepared, (log,))

    with pytest.raises(TuningFailed, match="Every trial of candidate only diverged"):
        whole()
    run = client.get_run(started[0])
    assert run.info.status == "FAILED"
    assert run.data.tags["remerge.failure"].startswith("Every trial of candidate only diverged")


def test_an_mlflow_that_is_not_there_is_said_before_anything_is_trained(asked: list[bool]) -> None:
    from mlflow import MlflowClient

    prepared = prepare(recipe(), candidate=None, epsilon=8.0, seeds=1, budget_trials=4)
    with (
        pytest.raises(StackDown, match="run `remerge up`"),
        logged(MlflowClient(tracking_uri="http://127.0.0.1:9"), prepared),
    ):
        pytest.fail("nothing may be trained")


def test_dp_merging_is_carried_and_paid_for(asked: list[bool]) -> None:
    """Two releases a step need sqrt(2) times the noise at every epsilon, in the trials as in the lines to paste."""
    how = "{ascent: same_batch, radius: 0.05, anchor: 0.01}"
    plain = recipe()
    paired = parse_recipe(
        TEXT.replace("momentum: 0.5", f"momentum: 0.5\n    dp_merging: {how}"), "small.yaml"
    )
    own, other = plain.candidate("only"), paired.candidate("only")
    for q in (0.25, 1.0):
        needed = noise_for(paired, other)(2.0, q)
        assert needed == pytest.approx(math.sqrt(2) * noise_for(plain, own)(2.0, q), rel=2e-3)
    assert own_epsilon(paired, other) > own_epsilon(plain, own)
    found = tuned(paired, budget=4, seeds=1)
    assert found.candidate.dp_merging == other.dp_merging
    lines = TEXT[: TEXT.index("candidates:")] + snippet(found)
    assert parse_recipe(lines, "small.yaml").candidate("only") == found.candidate
