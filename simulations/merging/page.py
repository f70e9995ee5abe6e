"""The page of results: `docs/merging-results.md`, written from `docs/merging.json` alone."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any

from simulations.markdown import table_row
from simulations.merging import language, skewed, vision
from simulations.merging.parties import new_vit

Result = Mapping[str, Any]


def page(document: Mapping[str, Any]) -> str:
    """Markdown tables of what was measured; a part without results is left out."""
    versions, results = document["versions"], document["results"]
    lines = [
        "# What merging gives, measured",
        "",
        f"By `make merging` with rotfed {versions['rotfed']}, torch {versions['torch']} and transformers "
        f"{versions['transformers']}, on one CPU thread; all figures, run by run, are in [merging.json](merging.json).",
        "How to merge is told in [merging.md](merging.md) and [multi-party.md](multi-party.md).",
    ]
    for part, section in (("vision", _vision), ("skewed", _skewed), ("language", _language)):
        found = [result for result in results if result["part"] == part]
        if found:
            lines += ["", *section(found)]
    return "\n".join(lines) + "\n"


def _vision(results: Sequence[Result]) -> list[str]:
    seeds = _distinct(results, "seed")
    sizes = sorted({len(result["members"]) for result in results})

    def cell(method: str, size: int) -> str:
        return _spread([r["share"] for r in results if r["method"] == method and len(r["members"]) == size])

    def cost(method: str) -> str:
        costs = [r["cost"] for r in results if r["method"] == method and len(r["members"]) == sizes[0]]
        return f"{mean(costs):.1%}" if costs else ""

    own = [accuracy for result in results for accuracy in result["parties"]]
    return [
        "## Parties whose data are alike",
        "",
        f"Small ViTs on Fashion-MNIST, {vision.ROWS:,} images and four epochs a party, each from an initialisation of "
        f"its own; seeds {', '.join(map(str, seeds))}. Single models reach {min(own):.1%} to {max(own):.1%}. The "
        "table gives the accuracy of the merged model over the mean of its parties: mean (lowest to highest, number). "
        "rotfed without an anchor's name aligns all to the medoid, by weights alone, as do the three rows above it. "
        "Two parties: all pairs of the first four. Eight parties share 60,000 images, so that each image is held by "
        "two of them. The cost is the CPU time of merging two, as a share of one party's training.",
        "",
        table_row(["method", *(f"{size} parties" for size in sizes), "cost"]),
        table_row(["---"] * (len(sizes) + 2)),
        *(
            table_row([method, *(cell(method, size) for size in sizes), cost(method)])
            for method in _distinct(results, "method")
        ),
    ]


def _skewed(results: Sequence[Result]) -> list[str]:
    seeds = _distinct(results, "seed")
    best = {seed: max(next(r["parties"] for r in results if r["seed"] == seed)) for seed in seeds}
    one_shot = [r for r in results if "rounds" not in r]
    size = sum(tensor.nbytes for tensor in new_vit(0).state_dict().values())
    keys = list(dict.fromkeys((r["method"], r["labelled"]) for r in one_shot))
    keys.sort(key=lambda key: ((key[1] is not None and -key[1]) or -1e9, 0))

    def row(method: str, labelled: int | None) -> str:
        found = {r["seed"]: r for r in one_shot if (r["method"], r["labelled"]) == (method, labelled)}
        gains = [r["accuracy"] - best[seed] for seed, r in found.items()]
        bytes_ = [r["bytes"] / size for r in found.values() if "bytes" in r]
        return table_row(
            [
                method,
                "all" if labelled is None else str(labelled),
                *(f"{found[seed]['accuracy']:.1%}" if seed in found else "" for seed in seeds),
                f"{100 * mean(gains):+.1f}",
                f"{mean(bytes_):.1f}" if bytes_ else "",
            ]
        )

    rows = [count for r in results for count in r["rows"]]
    federated = [r for r in results if "rounds" in r]
    lines = [
        "## Parties that know different classes",
        "",
        f"Four parties, every class of the 60,000 images dealt out by Dirichlet({skewed.ALPHA}), models and training "
        "as above; means are weighted by examples. Single models reach "
        + "; ".join(
            ", ".join(f"{accuracy:.1%}" for accuracy in next(r["parties"] for r in results if r["seed"] == seed))
            + f" (seed {seed})"
            for seed in seeds
        )
        + ". Accuracy of the merged model by seed, points above the best party, and traffic in models' worth of "
        f"bytes (one is {size / 1e6:.2f} MB; where none is given, each party sends its model once). Labelled: the "
        f"images that a party still has to learn from. Together: {skewed.ROUNDS} rounds of {skewed.LABELLED[None]} "
        f"steps a party on all of its images and of {skewed.LABELLED[64]} on few, at a rate that falls from "
        f"{skewed.LEARNING_RATE}; a party's own training took {min(rows) * 4 // 64:,} to {max(rows) * 4 // 64:,} "
        "steps.",
        "",
        table_row(["method", "labelled", *(f"seed {seed}" for seed in seeds), "above the best party", "traffic"]),
        table_row(["---"] * (len(seeds) + 4)),
        *(row(method, labelled) for method, labelled in keys),
    ]
    if federated:
        lines += [
            "",
            "Then ordinary rounds on all data, plain FedAvg, from the best party's model or from the merged one "
            f"(learned together); {2 * skewed.PARTIES} models' worth of bytes a round. Mean accuracy over the seeds.",
            "",
            table_row(["start", "local steps", "before", *(f"round {n + 1}" for n in range(skewed.FEDERATED_ROUNDS))]),
            table_row(["---"] * (skewed.FEDERATED_ROUNDS + 3)),
            *(
                table_row(
                    [
                        method,
                        str(steps),
                        *(f"{mean(r['rounds'][n] for r in found):.1%}" for n in range(skewed.FEDERATED_ROUNDS + 1)),
                    ]
                )
                for method, steps in dict.fromkeys((r["method"], r["steps"]) for r in federated)
                for found in [[r for r in federated if (r["method"], r["steps"]) == (method, steps)]]
            ),
        ]
    return lines


def _language(results: Sequence[Result]) -> list[str]:
    ends = [loss for result in results for loss in (result["losses"][0], result["losses"][-1])]
    return [
        "## Between two language models",
        "",
        f"{language.MODELS} small Llamas (three layers of width 64, four query heads on two key heads) on "
        f"Shakespeare's plays, by characters, {language.STEPS:,} steps each from an initialisation of its own; "
        f"losses on held-out text are {min(ends):.3f} to {max(ends):.3f} nats. The barrier is how far the loss rises "
        "above the straight line between two models, in nats: mean over the pairs (lowest to highest, number). The "
        "cost is CPU time as a share of one model's training.",
        "",
        table_row(["method", "barrier", "loss half-way", "cost"]),
        table_row(["---"] * 4),
        *(
            table_row(
                [
                    method,
                    _spread([r["barrier"] for r in found]),
                    f"{mean(r['losses'][len(r['losses']) // 2] for r in found):.3f}",
                    f"{mean(r['cost'] for r in found):.1%}",
                ]
            )
            for method in _distinct(results, "method")
            for found in [[r for r in results if r["method"] == method]]
        ),
    ]


def _distinct(results: Iterable[Result], key: str) -> list[Any]:
    return list(dict.fromkeys(result[key] for result in results))


def _spread(values: Sequence[float]) -> str:
    return f"{mean(values):.3f} ({min(values):.3f} to {max(values):.3f}, {len(values)})" if values else ""
