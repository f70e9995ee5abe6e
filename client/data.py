"""Data sets, the held-out split, and how the rest is divided over clients.

Three facts hold for every data set: the held-out split is fixed by the seed and lies in no partition; only
the rows that are asked for are decoded; images stay uint8 until a batch is encoded (see `client.models`).
A row is an image or a whole text (a .txt file), for language too: the held-out split and the partitions cut no text.
"""

import gzip
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from client.settings import ConfigError, Settings

Indices = NDArray[np.int64]
Inputs = Tensor | list[str]
"""Images as uint8 (n, channels, height, width), n texts, or windows of tokens, int64 (n, length)."""

FASHION_MNIST_FOLDER = Path("/usr/share/datasets/fashion-mnist")
FASHION_MNIST_HUB_NAME = "zalando-datasets/fashion_mnist"
TEST_SHARE = 0.2
VALIDATION_SHARE = 0.1
MIN_PARTITION_SIZE = 10
MAX_IMAGE_SIDE = 224
LABEL_NAMES = ("label", "labels", "target", "class")


@dataclass(frozen=True)
class Examples:
    """Inputs with their labels: classes, int64 (n,), or the tokens of windows, int64 (n, length), themselves.

    A token is predicted from those before it in its window, so that a window has length - 1 to predict.
    """

    inputs: Inputs
    labels: Tensor

    def __len__(self) -> int:
        """The number of examples, n, by which Flower weights a client: of images, texts or windows."""
        return len(self.labels)

    def class_counts(self, classes: int) -> Tensor | None:
        """How many examples of each class there are, int64 (classes,); None where labels are tokens."""
        return None if self.labels.ndim == 2 else torch.bincount(self.labels, minlength=classes)

    def take(self, rows: Tensor) -> "Examples":
        """The examples at `rows`, int64 (m,)."""
        inputs = self.inputs
        taken = inputs[rows] if isinstance(inputs, Tensor) else [inputs[row] for row in rows.tolist()]
        return Examples(taken, self.labels[rows])


@dataclass(frozen=True)
class Corpus:
    """A whole data set: labels int64 (n,), the rows held out for testing and the rest, and a reader.

    A label is a row's class or, for language, its author, and `class_names` are theirs. `image_shape` is (channels,
    side) of what `read` returns for images, None for text.
    """

    class_names: tuple[str, ...]
    labels: Indices
    train: Indices
    test: Indices
    read: Callable[[Indices], Inputs]
    image_shape: tuple[int, int] | None

    def examples(self, rows: Indices) -> Examples:
        """Decode the given rows."""
        return Examples(self.read(rows), torch.from_numpy(self.labels[rows]))


@lru_cache(maxsize=1)
def load_corpus(settings: Settings) -> Corpus:
    """Open the configured data set.

    Raises
    ------
    ConfigError
        When the data set cannot be found, or what to read in it is ambiguous.
    """
    if settings.dataset == "digits":
        return _digits(settings.seed)
    if settings.dataset == "fashion-mnist":
        if FASHION_MNIST_FOLDER.is_dir():
            return read_idx_folder(FASHION_MNIST_FOLDER)
        return _hub(FASHION_MNIST_HUB_NAME, settings)
    if settings.task == "image" and (Path(settings.dataset) / "train-images-idx3-ubyte.gz").is_file():
        return read_idx_folder(Path(settings.dataset))
    if settings.reads_text and Path(settings.dataset).is_dir():
        return _text_folder(Path(settings.dataset), settings.seed)
    return _hub(settings.dataset, settings)


@lru_cache(maxsize=64)
def partition_rows(settings: Settings, num_partitions: int, partition_id: int) -> Indices:
    """Rows of the training split that belong to one client, shuffled by the seed.

    Raises
    ------
    ConfigError
        When there are fewer than 10 training examples per client or, where authors go to clients whole, fewer authors
        than clients.
    """
    partitioners = import_extra("flwr_datasets.partitioner", "flwr-datasets")
    datasets = import_extra("datasets", "flwr-datasets")
    corpus = load_corpus(settings)
    # IidPartitioner cuts contiguous pieces, and data sets may be sorted by label.
    rows = np.random.default_rng(settings.seed).permutation(corpus.train)[: settings.train_examples or None]
    natural = settings.partition == "natural"
    if not natural and len(rows) < MIN_PARTITION_SIZE * num_partitions:
        raise ConfigError(
            f"data set {settings.dataset!r} has {len(rows)} training examples, and "
            f"{num_partitions} clients need at least {MIN_PARTITION_SIZE} each; use fewer clients"
        )
    groups = corpus.labels[rows]
    if natural:
        groups = _grouped(groups, settings, num_partitions)
        partitioner = partitioners.NaturalIdPartitioner(partition_by="label")
    elif settings.partition == "iid":
        partitioner = partitioners.IidPartitioner(num_partitions)
    else:
        partitioner = partitioners.DirichletPartitioner(
            num_partitions,
            partition_by="label",
            alpha=settings.alpha,
            min_partition_size=MIN_PARTITION_SIZE,
            seed=settings.seed,
        )
    partitioner.dataset = datasets.Dataset.from_dict({"row": rows, "label": groups})
    return np.asarray(partitioner.load_partition(partition_id)["row"], dtype=np.int64)


def _grouped(authors: Indices, settings: Settings, num_partitions: int) -> Indices:
    """The group of each row's author: as many groups as clients, which differ by one author at most.

    flwr-datasets groups ids by the size of groups, which not every number of clients can be had by.
    """
    names, numbers = np.unique(authors, return_inverse=True)
    if len(names) < num_partitions:
        raise ConfigError(
            f"data set {settings.dataset!r} has training texts of {len(names)} authors, and partition = 'natural' "
            f"gives each of {num_partitions} clients one at least; use fewer clients, or partition = 'iid'"
        )
    groups = np.arange(len(names)) % num_partitions
    return np.random.default_rng(settings.seed).permutation(groups)[numbers]


def local_split(examples: Examples) -> tuple[Examples, Examples]:
    """One client's examples, at least two, already shuffled -> those it trains on and the tenth it validates on."""
    rows = torch.arange(len(examples))
    validation = max(1, round(VALIDATION_SHARE * len(rows)))
    return examples.take(rows[:-validation]), examples.take(rows[-validation:])


# ----------------------------------------------------------------------------------------------------------
# Sources


def _digits(seed: int) -> Corpus:
    digits = import_extra("sklearn.datasets", "scikit-learn").load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[:, None]
    labels = digits.target.astype(np.int64)
    train, test = _hold_out(len(labels), seed)
    return _image_corpus(tuple(map(str, digits.target_names)), images, labels, train, test)


def read_idx_folder(folder: Path) -> Corpus:
    """Read the four gzipped IDX files of MNIST and its kin; their test files are the held-out split."""
    images, labels = [], []
    for part in ("train", "t10k"):
        pixels = gzip.decompress((folder / f"{part}-images-idx3-ubyte.gz").read_bytes())
        classes = gzip.decompress((folder / f"{part}-labels-idx1-ubyte.gz").read_bytes())
        # The header of an images file is four big-endian int32: magic, count, height, width.
        count, height, width = np.frombuffer(pixels, ">i4", count=3, offset=4)
        images.append(np.frombuffer(pixels, np.uint8, offset=16).reshape(count, 1, height, width))
        labels.append(np.frombuffer(classes, np.uint8, offset=8).astype(np.int64))
    train, test = np.split(np.arange(sum(map(len, labels))), [len(labels[0])])
    all_labels = np.concatenate(labels)
    names = tuple(str(label) for label in np.unique(all_labels))
    return _image_corpus(names, np.concatenate(images), all_labels, train, test)


def _image_corpus(
    names: tuple[str, ...], images: NDArray[np.uint8], labels: Indices, train: Indices, test: Indices
) -> Corpus:
    """A corpus over square images (n, channels, side, side) held in memory."""
    assert images.ndim == 4 and images.shape[2] == images.shape[3]
    shape = (images.shape[1], images.shape[2])
    return Corpus(names, labels, train, test, lambda rows: torch.from_numpy(images[rows]), shape)


def _text_folder(folder: Path, seed: int) -> Corpus:
    """One subfolder of .txt files per class or author; a file that is not UTF-8 is read as latin-1."""
    load_files = import_extra("sklearn.datasets", "scikit-learn").load_files
    bunch = load_files(folder, load_content=False, allowed_extensions=[".txt"], shuffle=False)
    names = tuple(bunch.target_names)
    labels = np.asarray(bunch.target, dtype=np.int64)
    files = [Path(name) for name in bunch.filenames]
    missing = sorted(set(range(len(names))) - set(labels.tolist()))
    problems = [f"no .txt file in {names[label]!r}" for label in missing]
    problems += [f"nothing in {str(file.relative_to(folder))!r}" for file in files if not file.stat().st_size]
    if len(names) < 2 or problems:
        raise ConfigError(
            f"data set folder {str(folder)!r} has {(problems or [f'{len(names)} subfolders'])[0]}; it must have one "
            "subfolder of .txt files, none of them empty, per class or author, and at least two subfolders"
        )
    train, test = _hold_out(len(labels), seed)
    return Corpus(names, labels, train, test, lambda rows: [_read_text(files[row]) for row in rows], None)


def _read_text(path: Path) -> str:
    content = path.read_bytes()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return content.decode("latin-1")


def _hub(name: str, settings: Settings) -> Corpus:
    """Any data set that `datasets.load_dataset` opens: a hub name, or a folder it understands."""
    datasets = import_extra("datasets", "flwr-datasets")
    try:
        splits = datasets.load_dataset(name)
    except Exception as error:  # what is raised depends on hub, network and file formats
        raise ConfigError(
            f"run config dataset = {settings.dataset!r} could not be loaded ({_first_line(error)}); it must "
            "be 'digits', 'fashion-mnist', a folder of texts by class or author, or a Hugging Face data set name"
        ) from error
    train_name = "train" if "train" in splits else next(iter(splits))
    train_set = splits[train_name]
    label_column = _label_column(name, train_set, settings, datasets)
    input_column = _input_column(name, train_set, settings, datasets)

    test_name = next((s for s in ("test", "validation") if s in splits and s != train_name), None)
    # Some published test splits carry -1 for "not disclosed"; they measure nothing.
    if test_name is not None and min(splits[test_name][label_column], default=-1) != -1:
        rows_of_train = len(train_set)
        table = datasets.concatenate_datasets([train_set, splits[test_name]])
        train, test = np.split(np.arange(len(table)), [rows_of_train])
    else:
        table = train_set
        train, test = _hold_out(len(table), settings.seed)

    feature = table.features[label_column]
    if isinstance(feature, datasets.ClassLabel):
        names, labels = tuple(feature.names), np.asarray(table[label_column], dtype=np.int64)
    else:
        values, inverse = np.unique(np.asarray(table[label_column]), return_inverse=True)
        names, labels = tuple(map(str, values)), inverse.astype(np.int64)

    column = table.select_columns([input_column])
    if settings.reads_text:
        return Corpus(names, labels, train, test, lambda rows: list(column[rows][input_column]), None)
    first = column[0][input_column]
    channels = 1 if first.mode in ("1", "L", "I", "I;16", "F") else 3
    side = min(max(first.size), MAX_IMAGE_SIDE)

    def read(rows: Indices) -> Tensor:
        images = [_pixels(image, channels, side) for image in column[rows][input_column]]
        return torch.from_numpy(np.stack(images))

    return Corpus(names, labels, train, test, read, (channels, side))


def _pixels(image: Any, channels: int, side: int) -> NDArray[np.uint8]:
    """PIL image -> uint8 (channels, side, side)."""
    image = image.convert("L" if channels == 1 else "RGB")
    if image.size != (side, side):
        image = image.resize((side, side))
    pixels = np.asarray(image, dtype=np.uint8)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def _label_column(name: str, table: Any, settings: Settings, datasets: Any) -> str:
    classes = [column for column, f in table.features.items() if isinstance(f, datasets.ClassLabel)]
    usual = [column for column in table.features if column in LABEL_NAMES]
    return _only_column(name, table, "label", settings.label_column, classes or usual)


def _input_column(name: str, table: Any, settings: Settings, datasets: Any) -> str:
    if settings.reads_text:
        labels = (*LABEL_NAMES, settings.label_column)
        found = [
            column
            for column, feature in table.features.items()
            if getattr(feature, "dtype", "") in ("string", "large_string") and column not in labels
        ]
    else:
        found = [column for column, f in table.features.items() if isinstance(f, datasets.Image)]
    return _only_column(name, table, "input", settings.input_column, found)


def _only_column(name: str, table: Any, role: str, wanted: str, found: Sequence[str]) -> str:
    columns = ", ".join(table.features)
    if wanted:
        if wanted not in table.features:
            raise ConfigError(
                f"run config {role}-column = {wanted!r} is not in data set {name!r}; its columns are {columns}"
            )
        return wanted
    if len(found) != 1:
        problem = f"{len(found)} columns that could be" if found else "no column known as"
        raise ConfigError(
            f"data set {name!r} has {problem} the {role}; set run config {role}-column to one of its columns: {columns}"
        )
    return found[0]


def _hold_out(count: int, seed: int) -> tuple[Indices, Indices]:
    """Rows 0..count-1 -> (train, test), the test share drawn by the seed."""
    order = np.random.default_rng(seed).permutation(count).astype(np.int64)
    test = max(1, round(TEST_SHARE * count))
    return np.sort(order[test:]), np.sort(order[:test])


def import_extra(module: str, package: str) -> Any:
    """Import on use, because the library runs without the packages that only some runs of the apps need."""
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{package}: not installed, and this run needs it; pip install 'rotfed[simulation]'"
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
