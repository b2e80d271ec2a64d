"""What an interrupted training is told by, and which of its checkpoints is used."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
import torch

from accounting.errors import InvalidInput
from infra.settings import StackDown
from tasks.data import data_record
from tasks.mlflow_server import RegistryRefused, experiment
from tasks.recipes import Execution
from tasks.services import Services, open_services
from tasks.stored_checkpoints import put_checkpoint
from tasks.training import Checkpoint, TrainingFailed
from tasks.unfinished import (
    Unfinished,
    find_unfinished,
    newest_checkpoint,
    training_key,
    was_interrupted,
)

ENDED = datetime(2026, 11, 30, 21, 5, 9, tzinfo=UTC)


@pytest.fixture
def services(stack: Any) -> Services:
    return open_services(stack.settings)


def checkpoint(step: int, key: str = "k") -> Checkpoint:
    return Checkpoint(
        key=key,
        candidate="only",
        step=step,
        steps=(),
        stretches=(),
        parameters={"weight": torch.full((3,), float(step))},
        optimizer={},
        metrics=(),
    )


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            Unfinished(training="t", ended_at=ENDED, finished={"only": "r"}),
            "that ended at 2026-11-30 21:05:09 UTC: 1 of 1 candidates is done;",
        ),
        (
            Unfinished(training="t", ended_at=None, checkpoints={"only": ("r", 120)}),
            "of before: 0 of 1 candidates are done, 1 goes on from step 120;",
        ),
        (
            Unfinished(training="t", ended_at=None, twins={"only": ("r", 0.5)}),
            "of before: 0 of 1 candidates are done, 1 starts anew;",
        ),
    ],
)
def test_people_are_told_what_goes_on(
    small_portfolio: Callable[..., Any], found: Unfinished, words: str
) -> None:
    sentence = found.sentence(small_portfolio().recipe)
    assert sentence == f"Resuming the training of small {words} `remerge train --fresh` trains all anew."


def test_several_steps_are_listed(small_portfolio: Callable[..., Any]) -> None:
    recipe = small_portfolio().recipe
    names = ("a", "b", "c", "d", "e", "f")
    six = recipe.model_copy(
        update={"candidates": tuple(recipe.candidates[0].model_copy(update={"name": name}) for name in names)}
    )
    found = Unfinished(
        training="t",
        ended_at=ENDED,
        finished={"a": "1", "b": "2"},
        checkpoints={"c": ("3", 120), "d": ("4", 80), "e": ("5", 7)},
    )
    assert "2 of 6 candidates are done, 3 go on from steps 120, 80 and 7, 1 starts anew;" in found.sentence(
        six
    )


def test_the_key_is_of_what_is_trained_and_not_of_how(small_portfolio: Callable[..., Any]) -> None:
    small = small_portfolio()
    data = data_record(small.recipe.data, small.splits, b"key")
    key = training_key(small.recipe, data, {"only": "a"})
    hurried = small.recipe.model_copy(update={"execution": Execution(parallel_candidates=1)})
    assert training_key(hurried, data, {"only": "a"}) == key
    others = [
        training_key(small.recipe.model_copy(update={"delta": 1e-6}), data, {"only": "a"}),
        training_key(small.recipe, data_record(small.recipe.data, small.splits, b"another"), {"only": "a"}),
        training_key(small.recipe, data, {"only": "b"}),
    ]
    assert len({key, *others}) == 4


@pytest.mark.parametrize(
    ("error", "interrupted"),
    [
        (StackDown("MLflow stopped answering."), True),
        (KeyboardInterrupt(), True),
        (SystemExit(1), True),
        (TrainingFailed("Candidate only diverged."), False),
        (InvalidInput("The network does not fit."), False),
        (RegistryRefused("MLflow refused to log a run."), False),
        (ZeroDivisionError("a row of zeros"), False),
        (MemoryError(), False),
    ],
)
def test_only_what_comes_from_outside_is_an_interruption(error: BaseException, interrupted: bool) -> None:
    assert was_interrupted(error) is interrupted


@pytest.mark.system
def test_the_newest_whole_checkpoint_of_the_right_key_is_used(services: Services) -> None:
    client = services.mlflow
    run_id = client.create_run(experiment(client, f"left-{uuid.uuid4().hex[:8]}")).info.run_id
    assert newest_checkpoint(client, run_id, "k") is None
    put_checkpoint(client, run_id, 20, checkpoint(20).to_bytes())
    put_checkpoint(client, run_id, 40, checkpoint(40).to_bytes()[:-1] + b"?")  # damaged
    found = newest_checkpoint(client, run_id, "k")
    assert found is not None
    assert found.step == 20
    assert found.parameters["weight"].tolist() == [20.0, 20.0, 20.0]
    assert newest_checkpoint(client, run_id, "another") is None
    put_checkpoint(client, run_id, 60, checkpoint(40).to_bytes())  # of another step than its name says
    assert newest_checkpoint(client, run_id, "k") is None  # only the newest two are there


@pytest.mark.system
def test_where_nothing_was_trained_there_is_nothing_to_go_on_with(
    services: Services, small_portfolio: Callable[..., Any]
) -> None:
    recipe = small_portfolio().recipe.model_copy(update={"name": f"new-{uuid.uuid4().hex[:8]}"})
    assert find_unfinished(services, recipe, "key") is None
    assert services.orchestrator.find_flow_run(str(uuid.uuid4())) is None
