"""One public start, and one private training from it: by the product's own pre-training and DP-SGD."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from accounting.errors import RemergeError
from infra.canonical import sha256_hex
from tasks.data import Rows
from tasks.dp_merging_experiment.calibration import noise_multiplier
from tasks.dp_merging_experiment.plan import Run, Start
from tasks.dp_merging_experiment.rows import N_MAX, family_network, task_network, task_rows
from tasks.dp_merging_experiment.setting import RELATION
from tasks.dp_merging_experiment.store import Store
from tasks.recipes import CandidateRecipe, DataRecipe, DpMerging, Execution, Recipe

STARTS, RUNS = "starts", "runs"
SHARPNESS_RADIUS = 0.5  # L2 of all parameters together
SHARPNESS_ROWS = 500  # test rows that the sharpness is measured on


class Unfinished(RemergeError):
    """Something that a run needs is not in the store yet."""


def make_start(start: Start, store: Store) -> None:
    """Pre-train a public start, and keep it."""
    from tasks.models import state_bytes
    from tasks.task_groups.recipes import Pretrain
    from tasks.task_groups.recipes import Start as GroupStart
    from tasks.task_groups.rows import joined_splits
    from tasks.task_groups.starts import public_start

    family = start.family
    rows = {task.name: task_rows(family, task, test_rows=1, with_private=False) for task in family.tasks}
    joined = joined_splits(
        {name: replace(one.splits, public_train=one.pretraining) for name, one in rows.items()}
    )
    began = time.perf_counter()
    state = public_start(
        GroupStart(pretrain=Pretrain(**family.pretraining, seed=start.seed)),
        family_network(family),
        joined.public_train,
    )
    result: dict[str, Any] = {
        "seconds": time.perf_counter() - began,
        "parameters": sum(tensor.numel() for tensor in state.values()),
        "trunk_parameters": sum(t.numel() for name, t in state.items() if name.startswith("trunk.")),
    }
    store.keep(STARTS, start.key, start.depends_on(), result, state_bytes(state))


def start_model(start: Start, task: str, store: Store) -> bytes:
    """The start of a task's network, from the store.

    Raises:
        Unfinished: it is not there.
    """
    from tasks.models import state_bytes, state_from_bytes
    from tasks.task_groups.starts import start_of

    content = store.model(STARTS, start.key)
    if content is None:
        raise Unfinished("A public start is missing in the cache folder; run the command again.")
    return state_bytes(start_of(task, state_from_bytes(content)))


def make_run(run: Run, store: Store) -> None:
    """Train one model privately, with noise that nobody can make again, measure it, and keep both."""
    from tasks.diagnostics import drift, score, sharpness, task_vector
    from tasks.models import network_with, state_from_bytes
    from tasks.training import train_candidate

    family, task, method = run.family, run.task, run.method
    rows = task_rows(family, task, test_rows=run.test_rows)
    initial = state_from_bytes(start_model(run.start, task.name, store))
    network = task_network(family, task)
    merging = method.dp_merging()
    candidate = CandidateRecipe(
        name="candidate",
        steps=family.steps,
        noise_multiplier=noise_multiplier(family, method, epsilon=run.epsilon, delta=run.delta),
        max_grad_norm=family.max_grad_norm,
        learning_rate=method.learning_rate,
        expected_batch_size=family.sampling_probability * task.nominal_rows,
        sampling_probability=family.sampling_probability,
        dp_merging=None if merging is None else DpMerging(**merging),
    )
    recipe = Recipe(
        name=f"{family.name}-{task.name}",
        lineage=f"{family.name}-{task.name}",
        neighboring_relation=RELATION,
        data=DataRecipe(loader=task.loader, arguments=dict(task.arguments)),
        network=network,
        feature_radius=None,
        n_max=N_MAX,
        initialisation_seed=run.seed,
        delta=run.delta,
        execution=Execution(grad_sample_mode="hooks", monitor_every=family.steps, processes=1),
        candidates=(candidate,),
    )
    began = time.perf_counter()
    trained = train_candidate(
        candidate,
        recipe=recipe,
        splits=rows.splits,
        initial=initial,
        run_id=run.key[:32],
        data_digest=sha256_hex(b"published rows: " + run.start.key.encode()),
    )
    seconds = time.perf_counter() - began
    state = state_from_bytes(trained.model)
    module = network_with(network, state)
    own, looked_at = score(module, rows.test), score(module, rows.looked_at)
    few = Rows(features=rows.test.features[:SHARPNESS_ROWS], labels=rows.test.labels[:SHARPNESS_ROWS])
    result = {
        "seconds": seconds,
        "noise_multiplier": candidate.noise_multiplier,
        "epsilon": trained.metrics[-1]["epsilon_so_far"],
        "accuracy": own.accuracy,
        "loss": own.loss,
        "looked_at": {"accuracy": looked_at.accuracy, "loss": looked_at.loss},
        "drift": drift(task_vector(state, initial, "trunk.")),
        "sharpness": sharpness(module, few, SHARPNESS_RADIUS),
    }
    store.keep(RUNS, run.key, run.depends_on(), result, trained.model)
