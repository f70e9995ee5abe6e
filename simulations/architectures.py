"""Measure, for every architecture, how far random transforms change the outputs: `docs/architectures.md` and `.json`.

    python -m simulations.architectures [--from-json]

Every example of every spec file is built with random weights and checked bare and with task heads, in float64 and in
float32. The page is written from the JSON, so that it can be renewed without measuring again (`--from-json`).
"""

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.progress import track

import rotfed
from rotfed.examples import Example, examples

FOLDER = Path(__file__).parent.parent / "docs"


def measure(example: Example) -> dict[str, Any]:
    """The largest relative change of any output of an example, over its classes, and the groups that were moved."""
    worst = {torch.float64: 0.0, torch.float32: 0.0}
    groups: dict[str, str] = {}
    for class_name in example.classes:
        model = example.model(class_name)
        spec = rotfed.load_spec(model)
        groups |= {group.base_name: group.kind_name for group in spec.groups.values()}
        for dtype in worst:
            worst[dtype] = max(worst[dtype], rotfed.check_spec(spec, model, dtype))
    return {
        "model_type": example.model_type,
        "spec": example.family,
        "variant": example.name,
        "classes": list(example.classes),
        "groups": groups,
        "float64": worst[torch.float64],
        "float32": worst[torch.float32],
    }


def page(results: dict[str, Any]) -> str:
    """The documentation page that shows measured results: one row for each `model_type`, the worst of its variants."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for result in results["examples"]:
        rows.setdefault(result["model_type"], []).append(result)
    lines = [
        "# Architectures",
        "",
        f"What rotfed {results['rotfed']} aligns, measured with transformers {results['transformers']} and torch "
        f"{results['torch']} by `make architectures`.",
        "Each row is the worst case over the variants in its spec file (switches of the configuration), and over the",
        "bare model and its task heads: small models with random weights, norms and biases, moved by random elements",
        "of all groups at once. The error is the largest change of any output, relative to its",
        "largest value.",
        "",
        f"{len(rows)} model types, {len(results['examples'])} variants.",
        "",
        "| model_type | spec | variants | groups | float64 | float32 |",
        "|---|---|---|---|---|---|",
    ]
    for model_type, found in sorted(rows.items()):
        kinds = {name: kind for result in found for name, kind in result["groups"].items()}
        by_kind: dict[str, list[str]] = {}
        for name, kind in kinds.items():
            by_kind.setdefault(kind, []).append(name)
        groups = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in by_kind.items())
        float64, float32 = (max(result[dtype] for result in found) for dtype in ("float64", "float32"))
        spec = f"[{found[0]['spec']}](../rotfed/specs/{found[0]['spec']}.toml)"
        lines.append(f"| {model_type} | {spec} | {len(found)} | {groups} | {float64:.0e} | {float32:.0e} |")
    return "\n".join(lines) + "\n"


def main(
    from_json: Annotated[
        bool, typer.Option("--from-json", help="Write the page from the results that are there.")
    ] = False,
) -> None:
    """Measure every architecture and write the page of the documentation."""
    path = FOLDER / "architectures.json"
    if not from_json:
        torch.set_num_threads(1)
        transformers.logging.set_verbosity_error()
        results = {
            "rotfed": rotfed.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__.split("+")[0],
            "examples": [measure(example) for example in track(examples().values(), "Measuring")],
        }
        path.write_text(json.dumps(results, indent=1) + "\n")
    (FOLDER / "architectures.md").write_text(page(json.loads(path.read_text())))


if __name__ == "__main__":
    typer.run(main)
