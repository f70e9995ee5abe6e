"""What `rotfed merge` and `rotfed check` do with directories of LoRA adapters."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from rotfed.adapters.folders import AdapterOptions, check_adapter_target, merge_adapters, read_adapter, write_adapter
from rotfed.adapters.spec import PLAIN_STARTS
from rotfed.checkpoints.weights import ADAPTER_CONFIG, is_adapter
from rotfed.errors import AlignmentError
from rotfed.mergers import normalised_weights


def all_adapters(models: Sequence[Path]) -> bool:
    """Whether models are adapters. Raises AlignmentError where some are and some are not."""
    kinds = {path: is_adapter(path) for path in models}
    if len(set(kinds.values())) > 1:
        adapter, whole = (next(path for path, kind in kinds.items() if kind is wanted) for wanted in (True, False))
        if not (whole / "config.json").is_file():
            raise AlignmentError(f"{whole}: expected an adapter as {adapter} is, found no {ADAPTER_CONFIG} in it")
        raise AlignmentError(
            f"{adapter}: expected a whole model as {whole} is, found an adapter; merge adapters with adapters, or "
            "merge this one into its model first (PEFT's merge_and_unload)"
        )
    return any(kinds.values())


def refuse_options(kind: str, options: Mapping[str, object]) -> None:
    """Raise AlignmentError for an option that is given and that a kind of model does not take."""
    if given := [name for name, value in options.items() if value]:
        raise AlignmentError(f"--{given[0]}: expected none for {kind}, found one; leave it out")


def merge_folders(
    console: Console,
    models: Sequence[Path],
    out: Path,
    options: AdapterOptions,
    weights: Sequence[float] | None,
    force: bool,
) -> None:
    """Make one adapter of several, and print how far it is from the mean of their updates."""
    shares = normalised_weights(len(models), weights)
    check_adapter_target(out, models, force)
    folders = [read_adapter(model) for model in models]
    found = merge_adapters(folders, options, shares)
    console.print(
        f"{len(models)} LoRA adapters of {len(found.errors)} modules, {options.method}: aggregation error "
        f"{found.error:.3g} (mean of factors {found.mean_error:.3g})"
    )
    worst = max(found.errors, key=lambda name: found.errors[name])
    console.print(f"largest in {worst}: {found.errors[worst]:.3g} (mean of factors {found.mean_errors[worst]:.3g})")
    write_adapter(out, found.params, folders[0])
    console.print(f"wrote {out}")


def check_folder(console: Console, path: Path) -> None:
    """Say what an adapter's directory holds."""
    folder = read_adapter(path)
    spec, config = folder.spec, folder.spec.config
    modules = spec.resolve(folder.params)
    ranks = Counter(module.read(folder.params).rank for module in modules)
    scales = sorted({spec.scale(module, module.read(folder.params).rank) for module in modules})
    kind = "DoRA" if config.get("use_dora") else "rsLoRA" if config.get("use_rslora") else "LoRA"
    start = config.get("init_lora_weights")
    begun = "" if start in PLAIN_STARTS else f", started by {start!r}, which changes the base weights"
    console.print(f"{kind} adapter of {config.get('base_model_name_or_path') or 'an unnamed model'}{begun}")
    console.print(
        f"{len(modules)} modules, rank {', '.join(f'{rank} ({count})' for rank, count in sorted(ranks.items()))}, "
        f"scale {', '.join(f'{scale:.4g}' for scale in scales)}"
    )
    if plain := spec.plain(folder.params):
        more = f" and {len(plain) - 1} more" if len(plain) > 1 else ""
        console.print(f"averaged as they are: {plain[0]}{more}")
    console.print("ok: every parameter has its place; see docs/lora.md for how adapters are aggregated")
