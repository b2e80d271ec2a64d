"""What a private step costs, beside the same step without privacy and beside plain Opacus. Not part of `make test`.

    make bench-training                            # a few minutes, one torch thread
    make bench-training ARGS=--markdown            # the table, as kept in docs/performance.md
    make bench-training ARGS="--rounds 5 --only softmax"

Each row trains one network on one batch. All ways take a step in turn, A B C D A B C D ..., in one process with one
thread; the table shows medians, and medians of the ratios within each round. "Non-private" is torch's own forward,
backward and SGD step on the same rows. "Ours" is what `train_candidate` does in a step: the mode that the trial
chooses, noise from the cryptographic generator, the monitor's bookkeeping. The rows are synthetic, of the data
sets' shapes; the memory is the peak of a process of its own that trains on MNIST (fetched, if it is not there).
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console

REGRESSION, OTHERS, MEMORY = 1.2, 1.05, 1536.0  # targets: over non-private, over Opacus's best mode, MiB

TRAIN_ON_MNIST = """
import json, re, sys
from pathlib import Path
import torch
from tasks.data import load_splits
from tasks.models import initial_state
from tasks.recipes import parse_recipe
from tasks.training import train_candidate
torch.set_num_threads(1)
recipe = parse_recipe(sys.argv[1], "benchmark")
splits = load_splits(recipe.data, feature_radius=recipe.feature_radius, n_max=recipe.n_max,
                     neighboring_relation=recipe.neighboring_relation)
trained = train_candidate(recipe.candidates[0], recipe=recipe, splits=splits,
                          initial=initial_state(recipe.network, 1), run_id="benchmark", data_digest="0" * 64)
peak = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])  # kB
print(json.dumps({"peak": peak / 1024,
                  "mode": trained.trajectory.notes["grad_sample_mode"]}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A network and the rows of a step."""

    title: str
    factory: str
    arguments: dict[str, Any]
    shape: tuple[int, ...]  # of a row
    batch: int
    full_batch: bool
    rounds: int


CASES = (
    Case(
        title="softmax regression, 60,000 rows of MNIST's shape, full batch",
        factory="tasks.models:softmax_regression",
        arguments={"features": 785, "classes": 10},
        shape=(785,),
        batch=60_000,
        full_batch=True,
        rounds=7,
    ),
    Case(
        title="small CNN, batch 512",
        factory="tasks.models:small_cnn",
        arguments={"channels": 1, "size": 28, "classes": 10},
        shape=(1, 28, 28),
        batch=512,
        full_batch=False,
        rounds=9,
    ),
    Case(
        title="ResNet-18 with GroupNorm, 32 x 32, batch 32",
        factory="tasks.models:resnet18",
        arguments={"channels": 3, "classes": 10},
        shape=(3, 32, 32),
        batch=32,
        full_batch=False,
        rounds=5,
    ),
)

MNIST = """
name: benchmark
lineage: benchmark
data: {{loader: tasks.data:mnist, arguments: {{flatten: {flat}, bias: {flat}}}}}
network: {{factory: {factory}, arguments: {arguments}}}
feature_radius: {radius}
n_max: 60000
initialisation_seed: 1
delta: 1.0e-6
candidates:
  only: {{steps: 8, noise_multiplier: 10, max_grad_norm: 1.0, learning_rate: 0.1, {sampling}}}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, help="of each row; default 5 to 9")
    parser.add_argument("--only", default="", help="rows whose title holds this text")
    parser.add_argument("--markdown", action="store_true")
    asked = parser.parse_args(arguments)
    console = Console(stderr=asked.markdown)
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Secure RNG turned off")
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    rows = []
    for case in CASES:
        if asked.only in case.title:
            rows.append(measure(case, asked.rounds or case.rounds, console))
    memory = [] if asked.only else peaks(console)
    show(rows, memory, asked.markdown)
    console.print(f"{os.cpu_count()} cores; load average over the last minute {os.getloadavg()[0]:.1f}.")
    return 0


def measure(case: Case, rounds: int, console: Console) -> list[str]:
    """One row of the table."""
    import torch

    from infra.documents import NetworkRecord
    from tasks.models import build

    numbers = torch.Generator().manual_seed(0)
    features = torch.rand((case.batch, *case.shape), generator=numbers) / case.batch**0.5
    labels = torch.randint(10, (case.batch,), generator=numbers)
    record = NetworkRecord(factory=case.factory, arguments=case.arguments)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = build(record)
    with console.status(f"{case.title}: a trial of the modes ..."):
        mode, ours = our_step(case, record, copy.deepcopy(module))
    ways = {"non-private": plain_step(copy.deepcopy(module)), "ours": ours}
    ways |= {name: opacus_step(copy.deepcopy(module), name) for name in ("hooks", "ghost")}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, step in ways.items():
            with console.status(f"{case.title}: round {turn} of {rounds}, {name} ..."):
                begun = time.perf_counter()
                step(features, labels)
                if turn:  # the first round warms up
                    times[name].append(time.perf_counter() - begun)

    def ratio(one: str, other: str) -> float:
        return median(a / b for a, b in zip(times[one], times[other], strict=True))

    best = min(("hooks", "ghost"), key=lambda name: median(times[name]))
    over_plain, over_best = ratio("ours", "non-private"), ratio("ours", best)
    met = over_plain <= REGRESSION if mode == "closed_form" else over_best <= OTHERS
    return [
        case.title,
        f"{median(times['non-private']) * 1000:.0f} ms",
        f"{ratio('hooks', 'non-private'):.2f}",
        f"{ratio('ghost', 'non-private'):.2f}",
        f"{over_plain:.2f} ({mode})",
        f"{over_best:.2f}",
        f"{REGRESSION:g} x non-private" if mode == "closed_form" else f"{OTHERS:g} x Opacus's best",
        "yes" if met else "NO",
    ]


Step = Callable[[Any, Any], None]


def plain_step(module: Any) -> Step:
    import torch

    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)

    def step(features: Any, labels: Any) -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(features), labels).backward()
        optimizer.step()

    return step


def opacus_step(module: Any, mode: str) -> Step:
    """Opacus as its documentation has it."""
    import torch
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.zeros(1, 1), torch.zeros(1)), batch_size=1)
    made = PrivacyEngine().make_private(
        module=module,
        optimizer=optimizer,
        criterion=torch.nn.CrossEntropyLoss(),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    network, private = made[0], made[1]
    criterion = made[2] if mode == "ghost" else torch.nn.CrossEntropyLoss()
    private.attach_step_hook(lambda optimizer: None)  # the accountant's bookkeeping is not timed

    def step(features: Any, labels: Any) -> None:
        private.zero_grad()
        criterion(network(features), labels).backward()
        private.step()

    return step


def our_step(case: Case, record: Any, module: Any) -> tuple[str, Step]:
    """The step of `train_candidate`, in the mode that it chooses."""
    import torch

    from tasks.objective import CROSS_ENTROPY
    from tasks.recipes import CandidateRecipe, Execution
    from tasks.training.clippers import clipper
    from tasks.training.mode_choice import choose_mode
    from tasks.training.noise import SecureNoise
    from tasks.training.recording import StepRecorder

    candidate = CandidateRecipe(
        name="only",
        steps=1000,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        learning_rate=0.01,
        expected_batch_size=float(case.batch),
        sampling_probability=1.0 if case.full_batch else 0.01,
    )
    mode, _ = choose_mode(
        module,
        candidate,
        Execution(),
        CROSS_ENTROPY,
        network_digest=record.sha256(),
        public_rows=torch.rand((8, *case.shape)).numpy(),
        classes=10,
        what=case.title,
    )
    made = clipper(mode, module, candidate, CROSS_ENTROPY, noise=SecureNoise())
    made.network.train()
    made.optimizer.attach_step_hook(StepRecorder())

    def step(features: Any, labels: Any) -> None:
        made.optimizer.zero_grad()
        made.backward(features, labels)
        made.optimizer.step()

    return mode, step


def peaks(console: Console) -> list[list[str]]:
    """Peak memory of whole trainings on MNIST, each in a process of its own."""
    found = []
    for title, recipe in (
        (
            "softmax regression on MNIST, full batch",
            MNIST.format(
                flat="true",
                factory="tasks.models:softmax_regression",
                arguments="{features: 785, classes: 10}",
                radius=1.0,
                sampling="expected_batch_size: 55000",
            ),
        ),
        (
            "small CNN on MNIST, expected batch size 512",
            MNIST.format(
                flat="false",
                factory="tasks.models:small_cnn",
                arguments="{channels: 1, size: 28, classes: 10}",
                radius="null",
                sampling="expected_batch_size: 512, sampling_probability: 0.0093",
            ),
        ),
    ):
        with console.status(f"{title}: memory ..."):
            done = subprocess.run(
                [sys.executable, "-c", TRAIN_ON_MNIST, recipe], capture_output=True, text=True, check=False
            )
        if done.returncode:
            console.print(f"{title}: {done.stderr.strip().splitlines()[-1]}")
            continue
        answer = json.loads(done.stdout.splitlines()[-1])
        met = "yes" if answer["peak"] <= MEMORY else "NO"
        found.append([title, answer["mode"], f"{answer['peak']:.0f} MiB", f"{MEMORY:g} MiB", met])
    return found


def show(rows: list[list[str]], memory: list[list[str]], markdown: bool) -> None:
    columns = [
        "a step of",
        "non-private",
        "Opacus, hooks, over it",
        "Opacus, ghost, over it",
        "ours over it",
        "ours over Opacus's best",
        "target",
        "met",
    ]
    tables = [(columns, rows), (["a whole training", "mode", "peak memory", "target", "met"], memory)]
    for names, lines in tables:
        if not lines:
            continue
        if markdown:
            print("| " + " | ".join(names) + " |")
            print("| " + " | ".join("---" for _ in names) + " |")
            for line in lines:
                print("| " + " | ".join(line) + " |")
            print()
        else:
            for line in lines:
                print(
                    "\n".join(f"{name}: {entry}" for name, entry in zip(names, line, strict=True)), end="\n\n"
                )


if __name__ == "__main__":
    sys.exit(main())
