"""Merge models that parties trained apart, without data: how accurate is the mean, by method?

    python -m simulations.merging [--seeds 0,1,2] [--parties 4]

Each party trains the small ViT of the apps (hidden 64, 4 layers) from an initialisation of its own on 15,000 images of
Fashion-MNIST that no other party has, for four epochs; then every pair is merged by every method, and all parties by
every anchor. Writes `docs/merging.json`, and prints the accuracy of each merged model as a share of its parties' mean.
"""

import itertools
import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import cross_entropy

import rotfed
from client.data import FASHION_MNIST_FOLDER, read_idx_folder
from rotfed.errors import ConvergenceWarning

ROWS, EPOCHS, BATCH, LEARNING_RATE = 15_000, 4, 64, 1e-3
RESULTS = Path(__file__).parent.parent / "docs" / "merging.json"

Params = Mapping[str, Tensor]
Merger = Callable[[Sequence[Params]], dict[str, Tensor]]


def new_model(seed: int) -> Any:
    """The small ViT from an initialisation of its own."""
    torch.manual_seed(seed)
    config: Any = transformers.AutoConfig.for_model(
        "vit",
        image_size=28,
        patch_size=7,
        num_channels=1,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
        num_labels=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.ViTForImageClassification(config)


def train(model: Any, pixels: Tensor, labels: Tensor, seed: int) -> None:
    """Four epochs of AdamW at a constant rate, in an order that `seed` fixes."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    model.train()
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(labels), generator=generator).split(BATCH):
            optimizer.zero_grad()
            cross_entropy(model(pixel_values=pixels[rows]).logits, labels[rows]).backward()
            optimizer.step()


def accuracy(model: Any, params: Params, pixels: Tensor, labels: Tensor) -> float:
    """The share of images that `model` classifies rightly with `params`."""
    model.load_state_dict(params)
    model.eval()
    with torch.no_grad():
        hits = sum(
            int((model(pixel_values=x).logits.argmax(-1) == y).sum())
            for x, y in zip(pixels.split(500), labels.split(500), strict=True)
        )
    return hits / len(labels)


def methods(model: Any) -> dict[str, Merger]:
    """How two or more models become one, by the name that the table gives it."""
    inside = rotfed.load_spec(model)
    permutations = rotfed.load_spec(model, residual="permutation")
    whole = rotfed.load_spec(model, residual=True)
    permuting = ["residual", "heads", "d_ff"]

    def by(spec: rotfed.SymmetrySpec, anchor: str, groups: list[str] | None = None) -> Merger:
        return lambda models: rotfed.merge(models, spec, anchor=anchor, groups=groups)

    return {
        "plain mean": lambda models: rotfed.weighted_mean(models),
        "rotations and FFN (the paper)": by(inside, "medoid", ["qk", "vo", "d_ff"]),
        "permutations (Git Re-Basin)": by(permutations, "medoid", permuting),
        "rotfed, without residual stream": by(inside, "medoid"),
        "rotfed, medoid": by(whole, "medoid"),
        "rotfed, consensus": by(whole, "consensus"),
        "rotfed, progressive": by(whole, "progressive"),
        "rotfed, tree": by(whole, "tree"),
    }


def main(
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0,1,2",
    parties: Annotated[int, typer.Option(help="Parties for each seed.")] = 4,
    folder: Annotated[Path, typer.Option(help="Folder of Fashion-MNIST's gzipped IDX files.")] = FASHION_MNIST_FOLDER,
    output: Annotated[Path, typer.Option(help="Where the results go.")] = RESULTS,
) -> None:
    """Train parties apart, merge them by every method, and write down the accuracies."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", ConvergenceWarning)
    console = Console()
    corpus = read_idx_folder(folder)
    images, labels = corpus.read(corpus.train), torch.as_tensor(corpus.labels[corpus.train])
    held_out, truth = corpus.read(corpus.test), torch.as_tensor(corpus.labels[corpus.test])
    assert isinstance(images, Tensor) and isinstance(held_out, Tensor)
    pixels, test = images / 127.5 - 1, held_out / 127.5 - 1
    model = new_model(0)
    results: list[dict[str, Any]] = []
    for seed in map(int, seeds.split(",")):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        models, own = [], []
        for party in range(parties):
            rows = order[party * ROWS : (party + 1) * ROWS]
            trained = new_model(1000 * seed + party)
            train(trained, pixels[rows], labels[rows], 1000 * seed + party)
            models.append({name: tensor.clone() for name, tensor in trained.state_dict().items()})
            own.append(accuracy(model, models[-1], test, truth))
            console.print(f"seed {seed}, party {party}: {own[-1]:.1%}")
        pairs = list(itertools.combinations(range(parties), 2))
        for name, merger in methods(model).items():
            if name not in ("rotfed, consensus", "rotfed, progressive", "rotfed, tree"):
                for pair in pairs:
                    results.append(_merged(model, name, merger, seed, pair, models, own, test, truth))
            results.append(_merged(model, name, merger, seed, tuple(range(parties)), models, own, test, truth))
        versions = {"rotfed": rotfed.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
        output.write_text(json.dumps({"versions": versions, "results": results}, indent=1) + "\n")
    console.print(_table(results))


def _merged(
    model: Any,
    method: str,
    merger: Merger,
    seed: int,
    members: tuple[int, ...],
    models: Sequence[Params],
    own: Sequence[float],
    pixels: Tensor,
    labels: Tensor,
) -> dict[str, Any]:
    start = time.perf_counter()
    merged = merger([models[member] for member in members])
    seconds = time.perf_counter() - start
    mean = sum(own[member] for member in members) / len(members)
    found = accuracy(model, merged, pixels, labels)
    return {
        "seed": seed,
        "members": list(members),
        "method": method,
        "parties": mean,
        "accuracy": found,
        "share": found / mean,
        "seconds": round(seconds, 2),
    }


def _table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Accuracy as a share of the parties' own: mean, least and largest, for pairs and for all parties at once."""
    table = Table("method", "two parties", "all parties", title="Accuracy of the merged model over its parties' mean")
    for method in dict.fromkeys(result["method"] for result in results):
        cells = []
        for pairs in (True, False):
            shares = [r["share"] for r in results if r["method"] == method and (len(r["members"]) == 2) == pairs]
            cells.append(
                f"{sum(shares) / len(shares):.2f} ({min(shares):.2f} to {max(shares):.2f}, n={len(shares)})"
                if shares
                else ""
            )
        table.add_row(method, *cells)
    return table


if __name__ == "__main__":
    typer.run(main)
