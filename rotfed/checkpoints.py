"""Model directories of transformers: what their safetensors files hold, what several have in common, a new one."""

import contextlib
import inspect
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from rotfed.checks import with_plain_experts
from rotfed.errors import AlignmentError, SpecError
from rotfed.layout import lay_out
from rotfed.library import load_spec, refusing
from rotfed.mergers import restore_type
from rotfed.spec import SymmetrySpec
from rotfed.tensors import Params, check_finite

_SAFETENSORS_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}

ADAPTER_CONFIG = "adapter_config.json"

# What a directory needs beside its weights: configurations, tokenizers, processors, chat templates.
_COPIED = {".json", ".txt", ".model", ".jinja", ".spm", ".tiktoken"}
_OF_THE_TRAINING = ("*.index.json", "trainer_state.json", "*_results.json", ADAPTER_CONFIG)
_TEMPLATES = "additional_chat_templates"

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


# ----------------------------------------------------------------------------------------------------------
# Reading


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model directory: the one file, else those of its index, else all there are."""
    if not path.is_dir():
        return []
    single = path / "model.safetensors"
    if single.is_file():
        return [single]
    index = path / "model.safetensors.index.json"
    if index.is_file():
        with refusing(f"{index}: expected an index of safetensors files"):
            return sorted({path / file for file in json.loads(index.read_text())["weight_map"].values()})
    if is_adapter(path):
        raise SpecError(
            f"{path}: expected a whole model, found an adapter; rotfed merges adapters with adapters, or merge it into "
            "its model first (PEFT's merge_and_unload)"
        )
    return sorted(path.glob("*.safetensors"))


def is_adapter(path: Path) -> bool:
    """Whether a directory is that of an adapter alone, without a model."""
    return (path / ADAPTER_CONFIG).is_file() and not (path / "config.json").is_file()


def stored_parameters(path: Path) -> dict[str, Tensor]:
    """The names, shapes and types in a directory's safetensors files, as tensors without data; empty without any."""

    def header(opened: Any, name: str) -> Tensor:
        entry = opened.get_slice(name)
        dtype = _SAFETENSORS_TYPES.get(entry.get_dtype(), torch.uint8)
        return torch.empty(entry.get_shape(), dtype=dtype, device="meta")

    return {name: tensor for file in weight_files(path) for name, tensor in _entries(file, header)}


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file. Raises SpecError for one that is missing or damaged."""
    return dict(_entries(file, lambda opened, name: opened.get_tensor(name)))


def _entries(file: Path, read: Callable[[Any, str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - safe_open is no mapping
                yield name, read(opened, name)
    except (SafetensorError, OSError) as error:
        raise SpecError(f"{file}: expected a safetensors file, found {error}; download it again") from error


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model directory that was read.

    `params` are under the names of its files, half-precision ones widened to float32, so that what is computed with
    them is rounded once; `types` are those of the files. `spec` is without the residual stream.
    """

    path: Path
    config: Any
    spec: SymmetrySpec
    params: Mapping[str, Tensor]
    types: Mapping[str, torch.dtype]

    @cached_property
    def tokens(self) -> dict[int, str]:
        """The token of each row, from the directory's tokenizer.json; empty without one."""
        file = self.path / "tokenizer.json"
        if not file.is_file():
            return {}
        with refusing(f"{file}: expected a tokenizer"):
            table = json.loads(file.read_text(encoding="utf-8"))
            vocab = table["model"]["vocab"]
            pairs = vocab.items() if isinstance(vocab, dict) else ((token, row) for row, (token, _) in enumerate(vocab))
            added = ((entry["content"], entry["id"]) for entry in table["added_tokens"])
            return {int(row): token for token, row in (*pairs, *added)}

    def restored(self, params: Mapping[str, Tensor], sources: Params | None = None) -> dict[str, Tensor]:
        """Those of `params` that the files hold, in the files' order and types.

        Raises TransformError where a type cannot hold them; `sources`, what they were made from, is for `round_to`.
        """
        cause = f"in the form in which models are averaged; save {self.path} in a wider type"
        return {
            name: restore_type(params[name], dtype, name, cause, sources[name] if sources else None)
            for name, dtype in self.types.items()
        }


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a model directory. Raises RotfedError where it has no weights, no spec, or values that are not finite."""
    files = weight_files(path)
    spec = load_spec(path)
    stored = {name: tensor for file in files for name, tensor in read_tensors(file).items()}
    if not stored:
        raise SpecError(
            f"{path}: expected a model directory with safetensors files, found none; write one with save_pretrained"
        )
    check_finite(stored, f"model {path}")
    with _loading(path):
        config = _config(path)
    types = {name: tensor.dtype for name, tensor in stored.items()}
    return Checkpoint(path, config, spec, {name: widened(tensor) for name, tensor in stored.items()}, types)


def widened(tensor: Tensor) -> Tensor:
    """Half precision as float32, anything else as it is."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


# ----------------------------------------------------------------------------------------------------------
# What several directories have in common


@dataclass(frozen=True)
class Common:
    """What several models share: one mapping a model, all under the first one's names.

    Shapes are equal but for `uneven`, tables of which another model has the first rows only. `kept` are the first
    model's parameters of which another has none, or one of another shape, and what it has; `left_out` those that only
    another model has.
    """

    models: list[dict[str, Tensor]]
    kept: Mapping[str, str]
    left_out: Mapping[str, str]
    uneven: Mapping[str, str]


def common_parameters(checkpoints: Sequence[Checkpoint]) -> Common:
    """Match the parameters of several models, which may be named as different versions of transformers name them.

    Task heads, and what else no group acts on and a model may be without, may differ, and so may the lengths of tables
    whose rows mean the same, the first model's being the longest. Raises AlignmentError for models that differ
    anywhere else, SpecError for one that its own spec does not fit.
    """
    first, *others = checkpoints
    ours = lay_out(first.params, first.spec)
    optional = {name for entry in first.spec.entries if entry.optional for name in first.spec.names_of(entry)}
    loose = {*ours.unmatched, *(ours.names[name] for name in optional if name in ours.names)}
    kept: dict[str, str] = {}
    left_out: dict[str, str] = {}
    uneven: dict[str, str] = {}
    renamed = [first.params]
    for other in others:
        _check_alike(first, other)
        theirs = lay_out(other.params, other.spec)
        table = {name: ours.names.get(spec_name, name) for spec_name, name in theirs.names.items()}
        params = {table.get(name, name): tensor for name, tensor in other.params.items()}
        for name, expected in first.params.items():
            found = str(tuple(params[name].shape)) if name in params else "none"
            if found == str(tuple(expected.shape)):
                continue
            difference = f"{tuple(expected.shape)}, {found} in {other.path}"
            refused = "one version of transformers"
            if name in params:
                refused = _rows_apart(first, other, name, params[name], name in loose)
            if not refused:
                uneven.setdefault(name, difference)
            elif name not in loose:
                raise AlignmentError(
                    f"{name}: expected shape {tuple(expected.shape)} as in {first.path}, found {found} in "
                    f"{other.path}; merge models of {refused}"
                )
            else:
                kept.setdefault(name, difference)
        loose_there = {*theirs.unmatched, *(table[theirs.names[name]] for name in optional if name in theirs.names)}
        for name in params:
            if name not in first.params:
                if name not in loose_there:
                    raise AlignmentError(
                        f"{name}: expected in {first.path} as in {other.path}, found none; merge models of one version "
                        "of transformers"
                    )
                left_out.setdefault(name, f"{tuple(params[name].shape)} in {other.path}")
        renamed.append(params)
    shared = [name for name in first.params if name not in kept]
    return Common([{name: params[name] for name in shared} for params in renamed], kept, left_out, uneven)


def _rows_apart(first: Checkpoint, other: Checkpoint, name: str, found: Tensor, loose: bool) -> str:
    """Of what to merge models instead, where a parameter of the other model is not the first rows of the first one's.

    That is sure of tables of positions in the architectures above, and of the rows of a vocabulary (of embeddings and
    of heads) where the two tokenizers give a token to each row that both have; `_check_alike` has seen that it is the
    same. A `loose` one may be the head of a classifier, which has as many rows as there are labels.
    """
    expected, two = first.params[name], (first, other)
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
        settings = "; ".join(other_settings(first, other)) or "unequal files"
        raise AlignmentError(
            f"{other.path}: expected a model of the same parameters as {first.path}, found {settings}; merge models of "
            "one architecture"
        )


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    spec = checkpoint.spec
    layers = {f"layers{f' of the {stack}' if stack else ''}": count for stack, count in spec.layers.items()}
    tied = getattr(checkpoint.config, "tie_word_embeddings", None)
    return {"model_type": spec.model_type, "tie_word_embeddings": tied, **layers, **spec.sizes}


def other_settings(first: Checkpoint, other: Checkpoint) -> list[str]:
    """The settings in which two configurations differ and which can change what a model computes."""
    one, two = first.config.to_dict(), other.config.to_dict()
    return [
        f"{key} {two.get(key)!r} instead of {one.get(key)!r}"
        for key in sorted(one.keys() | two.keys())
        if one.get(key) != two.get(key)
        and not (key in _HARMLESS or key.startswith(("_", "output_", "return_dict")) or "drop" in key)
    ]


def layer_names(spec: SymmetrySpec, params: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """The parameters of each layer (of each stack), and under `rest` those outside the layers."""
    names = lay_out(params, spec, folded=False).names
    layers: dict[str, list[str]] = {}
    for entry in spec.entries:
        for layer in entry.layers:
            alone = replace(entry, layers=(layer,))
            found = [names[name] for name in spec.names_of(alone) if name in names] if entry.layered else []
            if found:
                layers.setdefault(f"{entry.stack} {layer}" if entry.stack else str(layer), []).extend(found)
    within = {name for found in layers.values() for name in found}
    return {**layers, "rest": [name for name in params if name not in within]}


def with_tied_head(params: Mapping[str, Tensor], spec: SymmetrySpec, path: Path) -> dict[str, Tensor]:
    """The parameters with the head that is tied to others of them, which files leave out, where the spec names it."""
    heads = {entry.name for entry in spec.entries if entry.head}
    with torch.device("meta"):
        model = new_model(path)
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    completed = dict(params)
    for names in owners.values():
        # Files of a bare backbone are read into a model with a head, too.
        stored = next((n for full in names for n in (full, full.partition(".")[2]) if n in params), None)
        if stored is not None:
            completed |= {name: params[stored] for name in names if name in heads and name not in params}
    return completed


# ----------------------------------------------------------------------------------------------------------
# Running


def load_model(path: Path) -> tuple[nn.Module, list[str]]:
    """The model of a directory with its own weights, and the names of those that its files do not hold."""
    with _loading(path):
        model, found = _model_class(_config(path)).from_pretrained(
            str(path), local_files_only=True, output_loading_info=True
        )
    return model, sorted(found["missing_keys"])


def new_model(path: Path) -> nn.Module:
    """A model of a directory's configuration, or of a `config.json`, freshly initialised."""
    with _loading(path):
        config = _config(path)
        model: nn.Module = _model_class(config)._from_config(config)
    return model


def model_with(checkpoint: Checkpoint, params: Mapping[str, Tensor]) -> nn.Module:
    """A directory's model in float32, ready to be evaluated, with `params` under the names of its files."""
    with _loading(checkpoint.path):
        model, found = _model_class(checkpoint.config).from_pretrained(
            None,
            config=checkpoint.config,
            # transformers takes a mapping apart while it loads it.
            state_dict=dict(params),
            torch_dtype=torch.float32,
            output_loading_info=True,
        )
    if missing := sorted(found["missing_keys"]):
        raise SpecError(
            f"{missing[0]}: expected by {type(model).__name__}, found none in {checkpoint.path}; save the whole model"
        )
    return with_plain_experts(model.float().eval()).to(compute_device())


def compute_device() -> torch.device:
    """Where models run: on a GPU that this process sees, else on the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def names_in_memory(checkpoint: Checkpoint, model: nn.Module) -> dict[str, str]:
    """The name in a directory's files of each parameter and buffer that its model has in memory.

    Names differ between versions of transformers, and tied parameters have one name in the files. Raises SpecError
    where memory holds a parameter in other pieces than the files, as it does the experts of a mixture.
    """
    held = model.state_dict(keep_vars=True)
    stored, present = lay_out(checkpoint.params, checkpoint.spec), lay_out(held, checkpoint.spec)
    table = {present.names[name]: stored.names[name] for name in present.names if name in stored.names}
    table |= {name: name for name in present.unmatched if name in checkpoint.params}
    owners = {id(held[name]): file for name, file in table.items()}
    for name, tensor in held.items():
        if isinstance(tensor, nn.Parameter) and id(tensor) not in owners:
            raise SpecError(
                f"{name}: expected in {checkpoint.path} as in memory, found in other pieces or under another name; "
                "merge these models without --learn"
            )
    return {name: table.get(name, owners[id(tensor)]) for name, tensor in held.items() if id(tensor) in owners}


def read_examples(path: Path, model: nn.Module) -> dict[str, Tensor]:
    """Labelled examples.

    Parameters: `path`, a safetensors file of tensors named as the arguments of the model's forward pass, `labels`
    among them, whose first dimension counts the examples. Floating-point ones come back in float32. Raises SpecError
    for a file that the model cannot take.
    """
    if not path.is_file():
        raise SpecError(f"{path}: expected a safetensors file of examples, found nothing there")
    tensors = read_tensors(path)
    forward: Any = model.forward
    accepted = [p.name for p in inspect.signature(forward).parameters.values() if p.kind is not p.VAR_KEYWORD]
    taken = f"the arguments of {type(model).__name__}: {', '.join(accepted)}"
    if "labels" not in accepted:
        raise SpecError(f"labels: expected among {taken}; measure a model with a task head")
    if "labels" not in tensors:
        raise SpecError(f"labels: expected in {path}, found {', '.join(tensors) or 'no tensor'}; add them")
    if unknown := [name for name in tensors if name not in accepted]:
        raise SpecError(f"{unknown[0]}: expected in {path} are {taken}; rename it or take it out")
    counts = {name: tensor.shape[0] if tensor.ndim else 0 for name, tensor in tensors.items()}
    if len(set(counts.values())) > 1 or not counts["labels"]:
        shown = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise SpecError(f"{path}: expected as many examples in every tensor, at least one, found {shown}")
    wide = {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
    if odd := [name for name, tensor in wide.items() if tensor.is_complex() or not bool(tensor.isfinite().all())]:
        found = str(wide[odd[0]].dtype) if wide[odd[0]].is_complex() else "NaN or infinity"
        raise SpecError(f"{odd[0]}: expected finite real numbers in {path}, found {found}; take these examples out")
    return wide


def batches_of(examples: Mapping[str, Tensor], batch_size: int) -> list[dict[str, Tensor]]:
    """Examples cut into batches, in their order, where models run."""
    device = compute_device()
    return [
        {name: tensor[start : start + batch_size].to(device) for name, tensor in examples.items()}
        for start in range(0, len(examples["labels"]), batch_size)
    ]


def quiet_transformers() -> Any:
    """transformers, without its progress bars and advice."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def _config(path: Path) -> Any:
    return quiet_transformers().AutoConfig.from_pretrained(str(path), local_files_only=True)


def _model_class(config: Any) -> Any:
    """The class that a configuration was saved from, a bare backbone's where it does not say."""
    transformers = quiet_transformers()
    architecture = next(iter(config.architectures or []), None)
    named = getattr(transformers, architecture, None) if architecture else None
    return named or transformers.MODEL_MAPPING[type(config)]


def _loading(path: Path) -> contextlib.AbstractContextManager[None]:
    return refusing(f"{path}: expected a model that transformers can load")


# ----------------------------------------------------------------------------------------------------------
# Writing


def check_target(out: Path, models: Sequence[Path], force: bool, config: str = "config.json") -> None:
    """Raise AlignmentError where a new model directory cannot take the place of what is at `out`.

    `config` is the file by which a model directory that may be replaced is known.
    """
    if any(out.resolve().is_relative_to(model.resolve()) for model in models):
        raise AlignmentError(f"{out}: expected a directory of its own, found one of the models; write elsewhere")
    if Path.cwd().is_relative_to(out.resolve()):
        raise AlignmentError(f"{out}: expected a directory of its own, found the one to work in; write elsewhere")
    if not out.exists():
        return
    if not out.is_dir():
        raise AlignmentError(f"{out}: expected a directory to write, found a file; write elsewhere")
    inside = sorted(path.name for path in out.iterdir())
    if inside and not force:
        raise AlignmentError(
            f"{out}: expected no such directory, or an empty one, found {inside[0]} in it; add --force"
        )
    others = [
        path.name
        for path in sorted(out.iterdir())
        if path.name != _TEMPLATES and (path.is_dir() or path.suffix not in {*_COPIED, ".safetensors"})
    ]
    if inside and (config not in inside or others):
        found = f"{others[0]} in it" if others else f"no {config} in it"
        raise AlignmentError(f"{out}: expected a model directory to replace, found {found}; write elsewhere")


def write_checkpoint(
    out: Path,
    params: Mapping[str, Tensor],
    like: Path,
    weights: str = "model.safetensors",
    texts: Mapping[str, str] | None = None,
) -> None:
    """Write a model directory that transformers loads as it loads `like`, in one step or not at all.

    Parameters: `out`, the directory, which is replaced (`check_target` says where that is wrong); `params`, under the
    names of `like`'s files; `like`, the directory from which configuration, tokenizer and processor come; `weights`,
    the name of the file of parameters; `texts`, files to write beside it. Raises AlignmentError where the disk does
    not take it.
    """
    out = out.resolve()
    new, old = (out.parent / f".{out.name}.{os.getpid()}.{state}" for state in ("new", "old"))
    fresh = [folder for folder in out.parents if not folder.exists()]
    try:
        new.mkdir(parents=True)
        copied = [path for path in like.iterdir() if path.is_file() and path.suffix in _COPIED]
        copied += (like / _TEMPLATES).glob("*.jinja")
        for path in copied:
            if not any(path.match(pattern) for pattern in _OF_THE_TRAINING):
                target = new / path.relative_to(like)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)
        for name, text in (texts or {}).items():
            (new / name).write_text(text, encoding="utf-8")
        file = new / weights
        save_file({name: tensor.contiguous() for name, tensor in params.items()}, file, metadata={"format": "pt"})
        # safetensors lets only its owner read a file.
        file.chmod(new.stat().st_mode & 0o666)
        if out.exists():
            out.rename(old)
        new.rename(out)
    except (OSError, SafetensorError) as error:
        raise AlignmentError(f"{out}: expected to write a model there, found: {error}; nothing was changed") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)
        if out.exists():
            shutil.rmtree(old, ignore_errors=True)
        elif old.exists():
            old.rename(out)
        else:
            with contextlib.suppress(OSError):
                for folder in fresh:
                    folder.rmdir()
