"""Parties: their data, their models, and how they train them."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from client.data import read_idx_folder

EPOCHS, BATCH, LEARNING_RATE = 4, 64, 1e-3

Params = Mapping[str, Tensor]
Batch = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Images:
    """Fashion-MNIST: `pixels` and `test_pixels` float32 `(n, 1, 28, 28)` in [-1, 1], `labels` int64 `(n,)`."""

    pixels: Tensor
    labels: Tensor
    test_pixels: Tensor
    test_labels: Tensor

    @classmethod
    def read(cls, folder: Path) -> "Images":
        """Read the folder of gzipped IDX files."""
        corpus = read_idx_folder(folder)
        train, test = corpus.read(corpus.train), corpus.read(corpus.test)
        assert isinstance(train, Tensor) and isinstance(test, Tensor)
        labels = torch.as_tensor(corpus.labels)
        return cls(train / 127.5 - 1, labels[corpus.train], test / 127.5 - 1, labels[corpus.test])

    def batches(self, rows: Tensor, seed: int) -> Iterator[Batch]:
        """Batches of the rows without end, in an order that `seed` fixes."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            for some in rows[torch.randperm(len(rows), generator=generator)].split(BATCH):
                yield {"pixel_values": self.pixels[some], "labels": self.labels[some]}

    def counts(self, rows: Tensor) -> Tensor:
        """How many examples of each class the rows hold."""
        return torch.bincount(self.labels[rows], minlength=10)


@dataclass(frozen=True, eq=False)
class Party:
    """A party's own model, the rows that it was trained on, its accuracy on the test set, and the CPU seconds."""

    params: Params
    rows: Tensor
    accuracy: float
    seconds: float


def new_vit(seed: int, width: int = 64, heads: int = 4) -> Any:
    """The small ViT of the apps (139,000 parameters), or one of another size, from an initialisation of its own."""
    torch.manual_seed(seed)
    config: Any = transformers.AutoConfig.for_model(
        "vit",
        image_size=28,
        patch_size=7,
        num_channels=1,
        hidden_size=width,
        num_hidden_layers=4,
        num_attention_heads=heads,
        intermediate_size=2 * width,
        num_labels=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.ViTForImageClassification(config).eval()


def descend(model: Any, loss: Callable[[Batch], Tensor], batches: Iterator[Batch], steps: int, rate: float) -> None:
    """So many steps of AdamW at a constant rate, in training mode."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    model.train()
    for batch, _ in zip(batches, range(steps), strict=False):
        optimizer.zero_grad()
        loss(batch).backward()
        optimizer.step()
    model.eval()


def train(
    model: Any, images: Images, rows: Tensor, seed: int, steps: int | None = None, rate: float = LEARNING_RATE
) -> None:
    """Train on the rows' images: four epochs, or so many steps, in an order that `seed` fixes."""

    def loss(batch: Batch) -> Tensor:
        return cross_entropy(model(pixel_values=batch["pixel_values"]).logits, batch["labels"])

    total = steps if steps is not None else EPOCHS * -(-len(rows) // BATCH)
    descend(model, loss, images.batches(rows, seed), total, rate)


def accuracy(model: Any, params: Params, images: Images) -> float:
    """The share of the test images that `model` classifies rightly with `params`."""
    model.load_state_dict(params)
    with torch.no_grad():
        hits = sum(
            int((model(pixel_values=x).logits.argmax(-1) == y).sum())
            for x, y in zip(images.test_pixels.split(500), images.test_labels.split(500), strict=True)
        )
    return hits / len(images.test_labels)


def train_parties(images: Images, seed: int, rows: Sequence[Tensor], kept: Path) -> list[Party]:
    """The parties of a seed, each from an initialisation of its own; from the folder `kept` where they are there."""
    return [_party(images, 1000 * seed + number, own, kept) for number, own in enumerate(rows)]


def _party(images: Images, seed: int, rows: Tensor, kept: Path) -> Party:
    path = kept / f"vit-{seed}-{len(rows)}-{int(rows.sum())}.safetensors"
    model = new_vit(seed)
    if not path.exists():
        start = time.process_time()
        train(model, images, rows, seed)
        seconds = time.process_time() - start
        found = accuracy(model, model.state_dict(), images)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(model.state_dict(), path, {"accuracy": str(found), "seconds": str(seconds)})
    params, metadata = load_kept(path)
    return Party(params, rows, float(metadata["accuracy"]), float(metadata["seconds"]))


def load_kept(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The parameters and the metadata of a safetensors file."""
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118, no mapping
