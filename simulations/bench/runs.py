"""One run: the apps' own ServerApp and ClientApp in this process, and what came out as plain data."""

import hashlib
import json
import os
import shutil
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import client.app
import server.app
from client.app import IDENTITY
from rotfed.flower import to_record, to_state_dict
from server.grid import RoundFailedError, error_text
from simulations.bench.cells import METHODS, Cell, Value
from simulations.grid import InProcessGrid
from simulations.merging.parties import new_vit

_PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
DEFAULTS: dict[str, Value] = tomllib.loads(_PYPROJECT.read_text())["tool"]["flwr"]["app"]["config"]

# What a client's training does not depend on: how the server makes one model of all.
_SERVER_KEYS = {
    "num-server-rounds", "strategy", "proximal-mu", "server-learning-rate", "align", "anchor", "groups", "layers",
    "reflections", "strength", "min-gain", "next-round-from", "residual", "aggregation", "fraction-train",
    "fraction-evaluate", "min-nodes", "evaluate-clients", "results", "save-model", "learned",
}  # fmt: skip


@dataclass(frozen=True)
class Places:
    """Where things lie on this machine: data sets and models by the names that cells give them, and kept replies."""

    paths: Mapping[str, str]
    kept: Path

    def resolve(self, config: Mapping[str, Value]) -> dict[str, Value]:
        """A run config with the paths of this machine in place of names; a model that has none is made and kept."""
        resolved = {key: self.paths.get(str(value), value) for key, value in config.items()}
        name = str(config["model"])
        if name.startswith("vit-") and name != DEFAULTS["model"]:
            resolved["model"] = str(self._new_vit(name, int(config["seed"])))
        return resolved

    def _new_vit(self, name: str, seed: int) -> Path:
        """A new ViT of the width and heads that its name gives, as wide in the middle as the built-in one."""
        folder = self.kept / f"{name}-{seed}"
        if not folder.exists():
            width, heads = map(int, name.split("-")[1:])
            # Whole or not at all: a run may be killed here, and another cell may be at the same model.
            temporary = folder.with_name(f"{folder.name}.{os.getpid()}.part")
            new_vit(seed, width, heads).save_pretrained(temporary)
            try:
                temporary.replace(folder)
            except OSError:
                shutil.rmtree(temporary)
        return folder


class KeptReplies:
    """A ClientApp that keeps what its clients trained: what is asked of it twice is trained once.

    Training is deterministic in the model received, the client's data and the seeds of round and client. All methods
    of a cell so share their first round, and all rounds up to where their averages part.
    """

    def __init__(self, app: ClientApp, folder: Path) -> None:
        self._app = app
        self._folder = folder

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer from what is kept, else train and keep it."""
        if not message.metadata.message_type.startswith("train"):
            return self._app(message, context)
        path = self._folder / f"{_digest(message, context)}.safetensors"
        # A machine that goes down can leave half a file.
        with suppress(FileNotFoundError, SafetensorError), safe_open(path, "pt") as file:
            # In the order of a fresh reply, which the file does not keep and the next round's digest depends on.
            params = {name: file.get_tensor(name) for name in message.content.array_records["arrays"]}
            kept = json.loads(file.metadata()["reply"])
            content = RecordDict({"arrays": to_record(params), "metrics": MetricRecord(kept["metrics"])})
            content[IDENTITY] = ConfigRecord(kept["identity"])
            return Message(content, reply_to=message)
        reply = self._app(message, context)
        if not reply.has_error():
            records = {"metrics": dict(reply.content["metrics"]), "identity": dict(reply.content[IDENTITY])}
            self._folder.mkdir(parents=True, exist_ok=True)
            # Cells share replies, and two processes may be at the same one.
            temporary = path.with_suffix(f".{os.getpid()}.part")
            save_file(to_state_dict(reply.content.array_records["arrays"]), temporary, {"reply": json.dumps(records)})
            temporary.replace(path)
        return reply


def _digest(message: Message, context: Context) -> str:
    """Everything that a reply depends on; the message's config holds the code's fingerprint."""
    config = message.content.config_records["config"]
    own = {key: value for key, value in context.run_config.items() if key not in _SERVER_KEYS}
    node = [context.node_config[key] for key in ("partition-id", "num-partitions")]
    digest = hashlib.sha256(json.dumps([sorted(config.items()), sorted(own.items()), node, torch.__version__]).encode())
    for name, array in message.content.array_records["arrays"].items():
        digest.update(name.encode())
        digest.update(array.data)
    return digest.hexdigest()[:32]


def config_of(cell: Cell, method: str, seed: int) -> dict[str, Value]:
    """The run config of one run, with names in place of paths."""
    return {**DEFAULTS, **cell.config, **METHODS[method], "seed": seed}


def changed(config: Mapping[str, Value]) -> dict[str, Value]:
    """What a run config has other than the defaults: what decides a run, also once the apps have new keys."""
    return {key: value for key, value in config.items() if value != DEFAULTS.get(key)}


class AllAnswer(InProcessGrid):
    """A grid that ends the run where a client fails: FedAvg would go on without it, and average something else."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """As in an `InProcessGrid`. Raises RoundFailedError, with what the client said."""
        for reply in super().pull_messages(message_ids):
            if reply.has_error():
                raise RoundFailedError(f"a client failed: {error_text(reply.error.reason or '')}")
            yield reply
            del reply


def grid_of(cell: Cell, places: Places, config: Mapping[str, Value]) -> InProcessGrid:
    """The cell's clients in this process."""
    app: Any = KeptReplies(client.app.app, places.kept / "replies")
    return AllAnswer(app, cell.clients, config)


def run(cell: Cell, method: str, seed: int, places: Places) -> dict[str, Any]:
    """One federation from start to end: its accuracies, losses, gains over noise, and seconds."""
    config = config_of(cell, method, seed)
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        resolved = {**places.resolve(config), "results": str(results)}
        server.app.main(grid_of(cell, places, resolved), Context(0, 1, {}, RecordDict(), resolved))
        found = json.loads(results.read_text())
    after = found["rounds"][1:]
    aligned = [entry["alignment"] for entry in after if "alignment" in entry]
    return {
        "cell": cell.name,
        "method": method,
        "seed": seed,
        "config": changed(config),
        **{key: found[key] for key in ("status", "code", "versions", "hardware", "model", "data")},
        "accuracy": [entry["accuracy"] for entry in found["rounds"]],
        "loss": [entry["loss"] for entry in found["rounds"]],
        "gain": [entry["gain"] for entry in aligned],
        "groups": [entry["groups"] for entry in aligned],
        "aligning_seconds": [entry["seconds"] for entry in aligned],
        # A mean over clients; they trained one after another.
        "training_seconds": [entry["train"]["train-seconds"] * cell.clients * cell.participation for entry in after],
    }
