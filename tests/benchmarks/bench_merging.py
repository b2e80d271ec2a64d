"""How fast files are merged, and in how much memory. Not part of `make test`.

    make bench-merging                            # eight float32 models of 500 MB: 5 GB of disk, half a minute or more
    make bench-merging ARGS="--size 50"           # smaller models
    make bench-merging ARGS="--mergekit PATH"     # beside mergekit, PATH being its command mergekit-yaml
    make bench-merging ARGS=--markdown            # the table, as kept in docs/performance.md

Every repetition runs `cat` of all models, ours and mergekit one after the other, each in a process of its own; the
files stay in the page cache. The table shows medians of the elapsed and CPU times and of the ratios within each
repetition, and the ratio of the fastest repetition of each, which other users of the machine disturb least; the target
is judged by that. Memory is the peak of RssAnon in /proc/PID/status, looked at every 2 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table

from infra.tensor_file import TensorPlace, new_layout

LAYERS = 24
MEGABYTE = 2**20
TIMES, MEMORY = 4.0, 100.0  # targets: elapsed time over cat's, MB

OURS = """
import sys, time
from pathlib import Path
from tasks.merging import merge_files
paths = {path.name: path / "model.safetensors" for path in sorted(Path(sys.argv[1]).iterdir())}
before, cpu = time.perf_counter(), time.process_time()
merge_files(paths, {name: 1 / len(paths) for name in paths}, Path(sys.argv[2]))
print(time.perf_counter() - before, time.process_time() - cpu)
"""
# The same call that its command makes, timed without the command's imports.
MERGEKIT = """
import sys, time
import yaml
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
config = MergeConfiguration.model_validate(yaml.safe_load(open(sys.argv[1])))
before, cpu = time.perf_counter(), time.process_time()
run_merge(config, sys.argv[2], MergeOptions(copy_tokenizer=False, quiet=True))
print(time.perf_counter() - before, time.process_time() - cpu)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    elapsed: float  # seconds
    cpu: float  # seconds, user and system
    anonymous: float = 0.0  # MB, the peak


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", type=int, default=500, help="MB (2**20 bytes) of each model")
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, help="where the models are made and removed; default a temporary one"
    )
    parser.add_argument(
        "--mergekit", type=Path, help="its command mergekit-yaml, in an environment of its own"
    )
    parser.add_argument("--markdown", action="store_true")
    asked = parser.parse_args(arguments)
    console = Console(stderr=asked.markdown)
    with tempfile.TemporaryDirectory(prefix="remerge-bench-", dir=asked.folder) as name:
        folder = Path(name)
        needed = (asked.models + 2) * asked.size * MEGABYTE
        if shutil.disk_usage(folder).free < 2 * needed:
            console.print(
                f"{folder} has no room for {needed / 1e9:.1f} GB twice over: name another --folder."
            )
            return 1
        with console.status(f"Making {asked.models} models of {asked.size} MB ..."):
            models = make_models(folder / "models", asked.models, asked.size)
        runs = measure(folder, models, asked, console)
    show(runs, asked.markdown)
    met = fastest(runs) <= TIMES and peak(runs) < MEMORY
    console.print(
        f"The targets, {TIMES:g} times cat and {MEMORY:g} MB, are {'met' if met else 'MISSED'}. "
        f"{os.cpu_count()} cores; load average over the last minute {os.getloadavg()[0]:.1f}."
    )
    return 0


def make_models(folder: Path, count: int, size: int) -> list[Path]:
    """Models that both programs take for one-architecture language models: Llama's names, square matrices."""
    models = []
    for number in range(count):
        model = folder / f"m{number}"
        model.mkdir(parents=True)
        shapes = llama_shapes(size)
        head, places = new_layout(
            {
                name: TensorPlace(dtype="F32", shape=shape, start=0, length=4 * int(np.prod(shape)))
                for name, shape in shapes.items()
            }
        )
        random = np.random.default_rng(number)
        with (model / "model.safetensors").open("wb") as file:
            file.write(head)
            for place in places.values():
                file.write(random.standard_normal(place.length // 4, dtype=np.float32).tobytes())
        (model / "config.json").write_text(json.dumps(llama_config(size)))
        models.append(model)
    os.sync()
    return models


def width_of(size: int) -> int:
    """Of a Llama of `LAYERS` layers with as many parameters as float32 fits into `size` MB: 7 squares a layer and two
    vocabularies of the same width."""
    return max(64, int((size * MEGABYTE / 4 / (7 * LAYERS + 2)) ** 0.5) // 64 * 64)


def llama_shapes(size: int) -> dict[str, tuple[int, ...]]:
    width = width_of(size)
    square = (width, width)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": square,
        "lm_head.weight": square,
        "model.norm.weight": (width,),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes[f"{prefix}self_attn.{name}.weight"] = square
        for name in ("gate_proj", "up_proj", "down_proj"):
            shapes[f"{prefix}mlp.{name}.weight"] = square
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{name}.weight"] = (width,)
    return shapes


def llama_config(size: int) -> dict[str, object]:
    width = width_of(size)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": width,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": width,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def measure(
    folder: Path, models: list[Path], asked: argparse.Namespace, console: Console
) -> dict[str, list[Run]]:
    files = [str(model / "model.safetensors") for model in models]
    out = folder / "merged"
    ours = [sys.executable, "-c", OURS, str(folder / "models"), str(out)]
    commands = {"cat": ["cat", *files], "ours": ours}
    if asked.mergekit:
        config = folder / "merge.yaml"
        slices = [{"model": str(model), "parameters": {"weight": 1 / len(models)}} for model in models]
        settings = {"merge_method": "linear", "dtype": "float32", "models": slices}
        config.write_text(json.dumps(settings | {"parameters": {"normalize": False}}))  # JSON is YAML
        python = asked.mergekit.absolute().parent / "python"
        commands["mergekit, its merging alone"] = [str(python), "-c", MERGEKIT, str(config), str(out)]
        command = [str(asked.mergekit.absolute()), str(config), str(out), "--no-copy-tokenizer", "--quiet"]
        commands["mergekit, the command"] = command
    runs: dict[str, list[Run]] = {name: [] for name in commands}
    run(commands["cat"], {})  # the files are warm from here on
    for repeat in range(asked.repeats):
        for name, command in commands.items():
            with console.status(f"Repetition {repeat + 1} of {asked.repeats}: {name} ..."):
                found = run(command, os.environ | {"HF_HUB_OFFLINE": "1"})
                remove(out)
            runs[name].append(found)
    return runs


def run(command: list[str], environment: dict[str, str]) -> Run:
    """Run a command to its end. Those that print two numbers have timed their own work, imports aside."""
    before, used = time.perf_counter(), children()
    discard = command[0] == "cat"
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL if discard else subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment or None,
    ) as child:
        anonymous = 0.0
        while not discard and child.poll() is None:
            anonymous = max(anonymous, rss_anon(child.pid))
            time.sleep(0.002)
        printed, complaint = child.communicate()
    elapsed = time.perf_counter() - before
    if child.returncode:
        raise SystemExit(f"{command[0]} failed:\n{complaint[-2000:]}")
    last = (printed or "").strip().splitlines()[-1:]
    try:
        timed = [float(number) for number in last[0].split()]
        return Run(elapsed=timed[0], cpu=timed[1], anonymous=anonymous)
    except (IndexError, ValueError):
        return Run(elapsed=elapsed, cpu=children() - used, anonymous=anonymous)


def children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def rss_anon(pid: int) -> float:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    lines = [line for line in status.splitlines() if line.startswith("RssAnon:")]
    return int(lines[0].split()[1]) / 1024 if lines else 0.0


def remove(out: Path) -> None:
    if out.is_dir():
        shutil.rmtree(out)
    else:
        out.unlink(missing_ok=True)


def ratio(runs: dict[str, list[Run]], what: str, name: str) -> float:
    """To cat's: the median over the repetitions of the ratio within each."""
    pairs = zip(runs[name], runs["cat"], strict=True)
    return median(getattr(one, what) / getattr(other, what) for one, other in pairs)


def fastest(runs: dict[str, list[Run]], name: str = "ours") -> float:
    """The fastest repetition's elapsed time over cat's fastest."""
    return min(found.elapsed for found in runs[name]) / min(found.elapsed for found in runs["cat"])


def peak(runs: dict[str, list[Run]], name: str = "ours") -> float:
    return max(found.anonymous for found in runs[name])


def show(runs: dict[str, list[Run]], markdown: bool) -> None:
    columns = ("what", "elapsed", "over cat's", "fastest over cat's", "CPU", "over cat's", "anonymous memory")
    rows = [
        (
            name,
            f"{median(found.elapsed for found in several):.2f} s",
            f"{ratio(runs, 'elapsed', name):.2f}",
            f"{fastest(runs, name):.2f}",
            f"{median(found.cpu for found in several):.2f} s",
            f"{ratio(runs, 'cpu', name):.2f}",
            f"{peak(runs, name):.0f} MB" if name != "cat" else "",
        )
        for name, several in runs.items()
    ]
    if markdown:
        for row in (columns, ["---"] * len(columns), *rows):
            print(f"| {' | '.join(row)} |")
        return
    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    raise SystemExit(main())
