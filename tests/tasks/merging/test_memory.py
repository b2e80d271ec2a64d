"""Merges of files by operators hold little of them: a child's peak of anonymous memory, sampled as it works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors

from tests.tasks.merging.merges import file_of, tensors_of

MODELS = 4
MEMORY = """
import json, re, sys, threading
from pathlib import Path
from tasks.merging import merge_model_files

def anonymous():  # MB
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text()).group(1)) / 1024

folder, operator = Path(sys.argv[1]), sys.argv[2]
paths = {path.name: path for path in sorted(folder.glob("m*"))}
before, peak, done = anonymous(), 0.0, threading.Event()

def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
weights = {name: 1 / len(paths) for name in paths}
merge_model_files(operator, paths, weights, folder / "out", base=folder / "base")
done.set()
watcher.join()
print(peak - before, "torch" in sys.modules)
"""


def grown(folder: Path, operator: str) -> float:
    """MB more than before the merge, at most."""
    command = [sys.executable, "-c", MEMORY, str(folder), operator]
    megabytes, torch = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert torch == "False"
    return float(megabytes)


@pytest.mark.parametrize("operator", ["ties", "pcb"])
def test_operators_by_element_hold_pieces_of_a_bfloat16_model(operator: str, tmp_path: Path) -> None:
    """One tensor of 1.5 million elements: whole, and in float64, five models would take 60 MB."""
    rng = np.random.default_rng(1)
    for name in ["base", *(f"m{k}" for k in range(MODELS))]:
        bits = (rng.integers(0x3C00, 0x3F80, size=1_500_000) | rng.integers(0, 2, 1_500_000) << 15).astype(
            "<u2"
        )
        spec = safetensors.TensorSpec(
            dtype="bfloat16", shape=bits.shape, data_ptr=bits.ctypes.data, data_len=bits.nbytes
        )
        (tmp_path / name).write_bytes(safetensors.serialize({"w": spec}))
    assert grown(tmp_path, operator) < 30
    ((_, merged),) = safetensors.deserialize((tmp_path / "out").read_bytes())
    assert (merged["dtype"], merged["shape"]) == ("BF16", [1_500_000])


def test_operators_by_layer_hold_one_layer_of_all_candidates(tmp_path: Path) -> None:
    """Ten layers of 130,000 elements: whole, and in float64, five models would take 52 MB."""
    rng = np.random.default_rng(2)
    for name in ["base", *(f"m{k}" for k in range(MODELS))]:
        layers = {f"layer{k:02}.weight": rng.normal(size=(2048, 64)).astype(np.float32) for k in range(10)}
        (tmp_path / name).write_bytes(file_of(layers))
    assert grown(tmp_path, "wudi") < 25
    assert len(tensors_of((tmp_path / "out").read_bytes())) == 10
