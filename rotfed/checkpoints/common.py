"""Which parameters several model directories share, by names, shapes and types alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rotfed.checkpoints.folder import Checkpoint
from rotfed.checkpoints.weights import Renamed, without_data
from rotfed.errors import AlignmentError
from rotfed.layout import lay_out

# Settings that change no function, or only that of a task head.
_HARMLESS = {
    "architectures",
    "dtype",
    "finetuning_task",
    "gradient_checkpointing",
    "id2label",
    "label2id",
    "num_labels",
    "problem_type",
    "task_specific_params",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}

# Models that look up a position's row and use the length of the table for nothing else, so that the first rows of a
# longer table mean what those of a shorter one do. An image's rows do not: their grid changes with its size.
_POSITIONS_BY_ROW = {"bert", "camembert", "distilbert", "electra", "gpt2", "roberta", "xlm-roberta"}


@dataclass(frozen=True)
class Common:
    """The parameters that several models share: one mapping a model, all under the first one's names, unread.

    Shapes are equal but for `uneven`, tables of which another model has the first rows only. `kept` are the first
    model's parameters that another has not, or in another shape; `left_out` those that only another model has. All
    three say by name how the models differ.
    """

    models: list[Renamed]
    kept: Mapping[str, str]
    left_out: Mapping[str, str]
    uneven: Mapping[str, str]


def common_parameters(checkpoints: Sequence[Checkpoint]) -> Common:
    """Match the parameters of several models, which may be named as different versions of transformers name them.

    Reads names, shapes and types alone. Task heads may differ, and so may other parameters on which no group acts and
    which a model may be without; so may the lengths of tables whose rows mean the same, the first model's being the
    longest. Raises AlignmentError for models that differ anywhere else, SpecError for one that its own spec does not
    fit.
    """
    first, *others = checkpoints
    ours = without_data(first.params)
    resolved = lay_out(ours, first.spec)
    optional = {name for entry in first.spec.entries if entry.optional for name in first.spec.names_of(entry)}
    loose = {*resolved.unmatched, *(resolved.names[name] for name in optional if name in resolved.names)}
    kept: dict[str, str] = {}
    left_out: dict[str, str] = {}
    uneven: dict[str, str] = {}
    tables = [{name: name for name in ours}]
    for other in others:
        _check_alike(first, other)
        found = without_data(other.params)
        theirs = lay_out(found, other.spec)
        table = {name: resolved.names.get(spec_name, name) for spec_name, name in theirs.names.items()}
        stored = {table.get(name, name): name for name in found}
        for name, expected in ours.items():
            tensor = found[stored[name]] if name in stored else None
            if tensor is not None and tensor.shape == expected.shape:
                continue
            shape = "none" if tensor is None else str(tuple(tensor.shape))
            remedy = "one version of transformers"
            if tensor is not None:
                remedy = _rows_apart(first, other, name, (expected, tensor), name in loose)
            if remedy and name not in loose:
                raise AlignmentError(
                    f"{name}: expected shape {tuple(expected.shape)} as in {first.path}, found {shape} in "
                    f"{other.path}; merge models of {remedy}"
                )
            differing = kept if remedy else uneven
            differing.setdefault(name, f"{tuple(expected.shape)}, {shape} in {other.path}")
        loose_there = {*theirs.unmatched, *(table[theirs.names[name]] for name in optional if name in theirs.names)}
        for name in stored:
            if name in ours:
                continue
            if name not in loose_there:
                raise AlignmentError(
                    f"{name}: expected in {first.path} as in {other.path}, found none; merge models of one version of "
                    "transformers"
                )
            left_out.setdefault(name, f"{tuple(found[stored[name]].shape)} in {other.path}")
        tables.append(stored)
    shared = [name for name in ours if name not in kept]
    models = [
        Renamed(checkpoint.params, {name: stored[name] for name in shared})
        for checkpoint, stored in zip(checkpoints, tables, strict=True)
    ]
    return Common(models, kept, left_out, uneven)


def differences(checkpoints: Sequence[Checkpoint], common: Common) -> list[str]:
    """Say in which settings and parameters several models differ, one sentence each."""
    first, *others = checkpoints
    said = [
        f"note: {other.path} has {'; '.join(settings)}; the configuration of {first.path} is used"
        for other in others
        if (settings := _other_settings(first, other))
    ]
    for title, names in [
        (f"kept from {first.path}, not merged", common.kept),
        ("left out", common.left_out),
        ("merged row by row, each over the models that have it", common.uneven),
    ]:
        if names:
            said.append(f"{title}: {', '.join(f'{name} ({how})' for name, how in names.items())}")
    return said


def _rows_apart(first: Checkpoint, other: Checkpoint, name: str, tensors: tuple[Tensor, Tensor], loose: bool) -> str:
    """Return which models to merge instead, empty where the other model's tensor is the first rows of the first one's.

    That is sure of tables of positions in the architectures above, and of the rows of a vocabulary (of embeddings and
    of heads) where the two tokenizers give a token to each row that both have; `_check_alike` has seen that it is the
    same. A `loose` parameter may be the head of a classifier, which has as many rows as there are labels.
    """
    (expected, found), two = tensors, (first, other)
    apart = expected.ndim == 0 or found.ndim == 0 or found.shape[1:] != expected.shape[1:]
    if "position" in name or name.endswith("wpe.weight"):
        # RoBERTa counts positions from the row after the padding's.
        paddings = {getattr(checkpoint.config, "pad_token_id", None) for checkpoint in two}
        if apart or first.spec.model_type not in _POSITIONS_BY_ROW or len(paddings) > 1:
            return f"one length, for rows of these tables are not sure to mean the same ({first.spec.model_type})"
    elif (
        apart
        or (lengths := [len(expected), len(found)]) != [getattr(c.config, "vocab_size", None) for c in two]
        or (loose and lengths == [c.config.num_labels for c in two])
    ):
        return "one architecture and vocabulary"
    elif not all(c.tokens.keys() >= set(range(min(lengths))) for c in two):
        return f"one vocabulary, for no tokenizer.json of each gives all first {min(lengths)} rows the same tokens"
    return "" if len(expected) > len(found) else f"such lengths with {other.path} first, which has the longer table"


def _check_alike(first: Checkpoint, other: Checkpoint) -> None:
    """Raise AlignmentError that names the setting in which two models cannot be averaged."""
    for name, expected in _facts(first).items():
        if (found := _facts(other).get(name)) != expected:
            raise AlignmentError(
                f"{other.path}: expected {name} {expected} as in {first.path}, found {found}; merge models of one "
                "architecture"
            )
    labels, found = ({name: row for row, name in (c.config.id2label or {}).items()} for c in (first, other))
    if odd := [name for name, row in labels.items() if len(found) == len(labels) and found.get(name, row) != row]:
        raise AlignmentError(
            f"{other.path}: expected label {odd[0]!r} at {labels[odd[0]]} as in {first.path}, found it at "
            f"{found[odd[0]]}; merge classifiers that number their labels alike"
        )
    for row, token in other.tokens.items():
        if (expected := first.tokens.get(row, token)) != token:
            raise AlignmentError(
                f"{other.path}: expected token {row} {expected!r} as in {first.path}, found {token!r}; merge models of "
                "one vocabulary"
            )
    if other.spec != first.spec:
        settings = "; ".join(_other_settings(first, other)) or "unequal files"
        raise AlignmentError(
            f"{other.path}: expected a model of the same parameters as {first.path}, found {settings}; merge models of "
            "one architecture"
        )


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    spec = checkpoint.spec
    layers = {f"layers{f' of the {stack}' if stack else ''}": count for stack, count in spec.layers.items()}
    tied = getattr(checkpoint.config, "tie_word_embeddings", None)
    return {"model_type": spec.model_type, "tie_word_embeddings": tied, **layers, **spec.sizes}


def _other_settings(first: Checkpoint, other: Checkpoint) -> list[str]:
    """Return the settings in which two configurations differ and which can change the outputs of a model."""
    one, two = first.config.to_dict(), other.config.to_dict()
    return [
        f"{key} {two.get(key)!r} instead of {one.get(key)!r}"
        for key in sorted(one.keys() | two.keys())
        if one.get(key) != two.get(key)
        and not (key in _HARMLESS or key.startswith(("_", "output_", "return_dict")) or "drop" in key)
    ]
