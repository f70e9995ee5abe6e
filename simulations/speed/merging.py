"""Two model directories merged from disk to disk by the command line, in a process of its own."""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from simulations.speed import subjects
from simulations.speed.measure import INTERVAL, memory
from simulations.speed.shapes import CLASSES, Shape, fresh, trained

Run = dict[str, Any]

SAME_START, UNRELATED = "one start", "unrelated"
DTYPE = torch.bfloat16


def merge(shape: Shape, case: str, repeats: int, folder: Path, limit: float) -> list[Run]:
    """Measure `rotfed merge` of two folders: seconds, and peak memory above that of a command that reads no weights.

    `case` is `SAME_START`, where the second model is the first after a little training, or `UNRELATED`. A merge that
    takes more than `limit` seconds, or fails, is a RuntimeError.
    """
    first = write_folder(folder / "first", shape, fresh(shape, seed=0))
    tensors = trained(shape, seed=0, client=0) if case == SAME_START else fresh(shape, seed=1)
    second = write_folder(folder / case.replace(" ", "-"), shape, tensors)
    idle = watch(subjects.idle_command(first), limit)
    size = sum(file.stat().st_size for file in first.glob("*.safetensors"))
    runs, out = [], folder / "merged"
    for repeat in range(repeats):
        shutil.rmtree(out, ignore_errors=True)
        found = watch(subjects.merge_command([first, second], out), limit)
        written = sum(file.stat().st_size for file in out.glob("*.safetensors"))
        if written < 0.99 * size:
            raise RuntimeError(f"merge: expected a model of {size} bytes, found {written}")
        above = {key: found[key] - idle[key] for key in ("resident", "anonymous")}
        about: Run = {"case": case, "method": "rotfed merge", "shape": shape.name, "parameters": shape.parameters}
        runs.append({**about, "repeat": repeat, "model_bytes": size, "seconds": found["seconds"], **above})
    shutil.rmtree(out)
    return runs


def write_folder(folder: Path, shape: Shape, tensors: Iterator[tuple[str, Tensor]]) -> Path:
    """Write a model directory in bfloat16, a file for each layer and none held beside it; one that is there stays."""
    if folder.exists():
        return folder
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    places: dict[str, str] = {}
    size = 0
    for number, (_, group) in enumerate(groupby(tensors, lambda entry: _layer(entry[0]))):
        shard = {name: tensor.to(DTYPE) for name, tensor in group}
        file = f"model-{number:05d}.safetensors"
        save_file(shard, part / file, {"format": "pt"})
        places |= dict.fromkeys(shard, file)
        size += sum(tensor.numel() * tensor.element_size() for tensor in shard.values())
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (part / "model.safetensors.index.json").write_text(json.dumps(index))
    config = shape.config
    config.architectures, config.dtype = [CLASSES[shape.family][1].__name__], DTYPE
    config.save_pretrained(part)
    part.rename(folder)
    return folder


def watch(command: Sequence[str], limit: float) -> dict[str, float]:
    """Run a command and return its seconds and its peak memory, both kinds of it as `measure.memory` has them."""
    found: dict[str, float] = {"resident": 0, "anonymous": 0}
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            with suppress(ProcessLookupError, FileNotFoundError):
                now = memory(process.pid)
                found = {"resident": now["peak"], "anonymous": max(found["anonymous"], now["anonymous"])}
            if time.perf_counter() - started > limit:
                process.kill()
                raise RuntimeError(f"rotfed: not done after {limit:.0f} seconds")
            time.sleep(INTERVAL)
        took = time.perf_counter() - started
        said = process.stderr.read() if process.stderr else ""
    if process.returncode:
        last = next(reversed(said.strip().splitlines()), f"exit code {process.returncode}")
        raise RuntimeError(f"rotfed: {last}")
    return {"seconds": took, **found}


def _layer(name: str) -> str:
    """The layer of a parameter, else its name."""
    words = name.split(".")
    return next((word for word in words if word.isdigit()), name)
