"""The models that are measured: sizes, weights drawn at random, and weights that stand for local training."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

CLASSES = {
    "bert": (transformers.BertConfig, transformers.BertModel),
    "roberta": (transformers.RobertaConfig, transformers.RobertaModel),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "vit": (transformers.ViTConfig, transformers.ViTForImageClassification),
}

SPREAD = 0.02
"""The standard deviation of weights at their initialisation, as transformers draws them."""

TRAINED = 0.03
"""How far ordinary local training moves each matrix, relative to its norm."""


RANK = 8
"""The rank of the half of that which is no noise."""


@dataclass(frozen=True)
class Shape:
    """The size of a model: `name` is for tables, `family` one of `CLASSES`; `kv_heads` of Llamas only."""

    name: str
    family: str
    layers: int
    width: int
    heads: int
    d_ff: int
    vocabulary: int = 1000
    kv_heads: int = 0

    @property
    def config(self) -> Any:
        """The configuration of transformers."""
        sizes: dict[str, Any] = {
            "num_hidden_layers": self.layers,
            "hidden_size": self.width,
            "num_attention_heads": self.heads,
            "intermediate_size": self.d_ff,
        }
        if self.family == "vit":
            sizes |= {"image_size": 28, "patch_size": 7, "num_channels": 1, "num_labels": 10}
        else:
            sizes["vocab_size"] = self.vocabulary
        if self.family == "llama":
            sizes |= {"num_key_value_heads": self.kv_heads, "tie_word_embeddings": False}
        return CLASSES[self.family][0](**sizes)

    def model(self) -> nn.Module:
        """The model without values."""
        with torch.device("meta"):
            model: nn.Module = CLASSES[self.family][1](self.config)
        return model

    def sizes(self) -> dict[str, torch.Size]:
        """The shape of each parameter."""
        return {name: tensor.shape for name, tensor in self.model().state_dict().items()}

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(math.prod(size) for size in self.sizes().values())


ROBERTA = Shape("RoBERTa-base", "roberta", layers=12, width=768, heads=12, d_ff=3072, vocabulary=50265)
ROBERTA_LARGE = Shape("RoBERTa-large", "roberta", layers=24, width=1024, heads=16, d_ff=4096, vocabulary=50265)
MINILM = Shape("MiniLM", "bert", layers=6, width=384, heads=12, d_ff=1536, vocabulary=30522)
BERT_MINI = Shape("BERT-mini", "bert", layers=4, width=256, heads=4, d_ff=1024, vocabulary=30522)
BERT_MEDIUM = Shape("BERT-medium", "bert", layers=8, width=512, heads=8, d_ff=2048, vocabulary=30522)
TINY_LLAMA = Shape("TinyLlama", "llama", 22, width=2048, heads=32, d_ff=5632, vocabulary=32000, kv_heads=4)
VIT = Shape("small ViT", "vit", layers=4, width=64, heads=4, d_ff=128)

# For the first call of everything, which is not measured.
WARM_UP = Shape("warm-up", "bert", layers=1, width=64, heads=2, d_ff=64)


def fresh(shape: Shape, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Give the tensors of a new model in float32; biases and gains are noisy, too, as none is zero in trained ones."""
    for number, (name, size) in enumerate(shape.sizes().items()):
        values = torch.randn(size, generator=_generator(seed, number)).mul_(SPREAD)
        gain = len(size) == 1 and name.endswith("weight")
        yield name, values.add_(1.0) if gain else values


def trained(shape: Shape, seed: int, client: int, share: float = TRAINED) -> Iterator[tuple[str, Tensor]]:
    """Give the tensors of a new model after one client's local training, each moved by about `share` of its norm.

    Half of the displacement, by its expected square, is of low rank, as that of training is, the other half is noise.
    """
    for number, (name, values) in enumerate(fresh(shape, seed)):
        generator = _generator(1_000_003 * (seed + 1) + client, number)
        change = torch.randn(values.shape, generator=generator)
        step = share * float(values.norm()) / values.numel() ** 0.5
        if values.ndim > 1:
            rows, columns = values.shape[0], values[0].numel()
            rank = min(RANK, rows, columns)
            tall = torch.randn(rows, rank, generator=generator)
            wide = torch.randn(rank, columns, generator=generator)
            part = step * 0.5**0.5
            change = change.view(rows, columns).addmm_(tall, wide, beta=part, alpha=part / rank**0.5)
        else:
            change.mul_(step)
        yield name, change.view(values.shape).add_(values)


def _generator(seed: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed(10_007 * seed + number)
