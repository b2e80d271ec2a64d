"""What OpenMP's waiting threads cost beside other load. Not part of `make test`; a part of `make bench-training`.

Two processes at once, each taking softmax-regression steps on 1,200 x 65 rows with as many torch threads as there are
cores: once as torch does by default, where threads that wait spin, and once with the worker's environment, where they
sleep. The two take turns; the table shows steps a second of one process, medians, and their ratio.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from infra.stack_services import launch

SECONDS = 4.0
TURNS = 3
STEPS = f"""
import os, time, torch
torch.set_num_threads(os.cpu_count())
features, labels = torch.rand(1200, 65), torch.randint(10, (1200,))
model = torch.nn.Linear(65, 10, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
steps, end = 0, time.monotonic() + {SECONDS}
while time.monotonic() < end:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(features), labels).backward()
    optimizer.step()
    steps += 1
print(steps / {SECONDS})
"""
OPENMP = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--markdown", action="store_true")
    parser.parse_args(arguments)
    plain = {name: value for name, value in os.environ.items() if name not in OPENMP}
    with tempfile.TemporaryDirectory() as home:
        ours = launch("worker", Path(home), {"prefect": 1, "mlflow": 2}, {}).environment
    asleep = {**plain, **{name: ours[name] for name in OPENMP}}
    found: dict[str, list[float]] = {"spin": [], "sleep": []}
    for _ in range(TURNS):
        for name, environment in (("spin", plain), ("sleep", asleep)):
            found[name].append(steps_a_second(environment))
    ratio = median(b / a for a, b in zip(found["spin"], found["sleep"], strict=True))
    print("| waiting threads spin | they sleep | ratio |\n| --- | --- | --- |")
    print(f"| {median(found['spin']):.0f} steps/s | {median(found['sleep']):.0f} steps/s | {ratio:.1f} |")
    print(f"\n{os.cpu_count()} cores; load average {os.getloadavg()[0]:.1f}.", file=sys.stderr)
    return 0


def steps_a_second(environment: dict[str, str]) -> float:
    """Of one process beside another one."""
    running = [
        subprocess.Popen([sys.executable, "-c", STEPS], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    return median(float(process.communicate()[0]) for process in running)


if __name__ == "__main__":
    sys.exit(main())
