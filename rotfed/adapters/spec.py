"""LoRA adapters by the names and the configuration that PEFT gives them: which parameters are factors of what.

PEFT names (its `save_and_load.py`): `<module>.lora_A.weight`, or `.lora_A.default.weight` in `model.state_dict()`,
where the adapter's name is in the middle; `lora_embedding_A` and `_B` without `.weight`; DoRA's
`lora_magnitude_vector`.
A module's update is `scale * B @ A`, its scale `lora_alpha / rank`, or `lora_alpha / sqrt(rank)` with `use_rslora`.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from torch import Tensor

from rotfed.adapters.factors import Factors
from rotfed.errors import SpecError
from rotfed.layout import no_plain_tensor
from rotfed.tensors import Params

_FACTOR = re.compile(
    r"(?P<module>.+)\.(?:(?P<kind>lora_[AB])(?:\.(?P<adapter>[^.]+))?\.(?P<part>weight|bias)"
    r"|(?P<embedding>lora_embedding_[AB])(?:\.(?P<embedded>[^.]+))?)"
)
_MAGNITUDE = re.compile(r".+\.lora_magnitude_vector(\.(?!weight$)[^.]+)?(\.weight)?")
# What PEFT's other methods call their parameters.
_FOREIGN = re.compile(
    r"(^|\.)(lora_|ia3_|p?vera_|hada_|lokr_|b?oft_|randlora_|vblora_|fourierft_|adaption_|prefix|prompt_e)"
)
# What PEFT counts from is the base model: a module of its own may be called `module`.
_PREFIX = re.compile(r"^(module\.|_orig_mod\.)*(base_model\.model\.)*")

# PEFT puts the base weights of adapted input and output embeddings into an adapter's state, and no others.
_EMBEDDINGS = 2

# Ways to start an adapter that leave the base weights as they are.
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")

# Settings with which A and B are more than two factors of one update, with the reason.
_VARIANTS = {
    "use_qalora": "whose A acts on pooled inputs",
    "use_bdlora": "whose factors are block-diagonal",
    "target_parameters": "which interleaves the factors of several experts",
    "arrow_config": "which routes between adapters",
    "kasa_config": "which has singular values between the factors",
    "monteclora_config": "which has a distribution over the factors",
}


@dataclass(frozen=True)
class Module:
    """One adapted module.

    `b` and `a` name the factors of its weight's update `B @ A`. PEFT's embeddings have their update transposed, so `b`
    is the name of `lora_embedding_A` there; it is the factor that starts at zero, as `lora_B` is elsewhere. `bias` is
    the name of `lora_B`'s bias, where there is one.
    """

    name: str
    b: str
    a: str
    embedding: bool = False
    bias: str | None = None

    def read(self, params: Params) -> Factors:
        """This module's factors as matrices: those of convolutions flattened, those of embeddings transposed."""
        b, a = params[self.b], params[self.a]
        return Factors(b.mT, a.mT) if self.embedding else Factors(b.flatten(1), a.flatten(1))

    def write(self, factors: Factors, like: Params) -> dict[str, Tensor]:
        """Factors of any rank under their names, with the other dimensions of those in `like`."""
        if self.embedding:
            return {self.b: factors.B.mT.contiguous(), self.a: factors.A.mT.contiguous()}
        b, a = like[self.b].shape, like[self.a].shape
        return {
            self.b: factors.B.reshape(b[0], factors.rank, *b[2:]),
            self.a: factors.A.reshape(factors.rank, *a[1:]),
        }


@dataclass(frozen=True)
class AdapterSpec:
    """What a LoRA adapter's configuration says about its parameters, from `load_adapter_spec`.

    `config` is PEFT's; `alphas` gives the `lora_alpha` of clients by their rank where it differs from the
    configuration's.
    """

    config: Mapping[str, Any]
    alphas: Mapping[int, float] = field(default_factory=dict)

    def scale(self, module: Module, rank: int) -> float:
        """The factor before `B @ A` in a module's update, at a rank.

        Raises SpecError for another rank than the configuration's where the start of the adapter took that many
        components out of the base weights, so that an update of another rank belongs to other weights.
        """
        start, own = (
            self.config.get("init_lora_weights"),
            self._by_pattern("rank_pattern", module, self.config.get("r")),
        )
        if start not in PLAIN_STARTS and rank != own:
            raise SpecError(
                f"{module.name}: expected rank {own}, found {rank}; {start!r} starts with other base weights at every "
                "rank, so take one rank for all, or convert the adapter to plain LoRA (save_pretrained with "
                "path_initial_model_for_weight_conversion)"
            )
        alpha = self._by_pattern("alpha_pattern", module, self.alphas.get(rank, self.config["lora_alpha"]))
        return float(alpha) / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def _by_pattern(self, key: str, module: Module, usual: Any) -> Any:
        """What the first pattern of a setting says that fits a module, as PEFT looks it up."""
        name = plain_name(module.name)
        patterns = (self.config.get(key) or {}).items()
        return next((value for pattern, value in patterns if re.match(rf"(.*\.)?({pattern})$", name)), usual)

    def resolve(self, params: Params) -> list[Module]:
        """The adapted modules, in order; all other parameters are averaged as they are.

        Raises SpecError, naming the parameter, for what is no LoRA adapter: factors of other methods, a factor without
        the other, shapes that are no two factors of one matrix, quantised ones, several adapters, a whole model.
        """
        found: dict[str, dict[str, str]] = {}
        adapters: dict[str, str] = {}
        for name, tensor in params.items():
            match = _FACTOR.fullmatch(name)
            if match is None or (match["kind"], match["part"]) == ("lora_A", "bias"):
                if not _MAGNITUDE.fullmatch(name) and _FOREIGN.search(name):
                    raise SpecError(
                        f"{name}: expected a parameter of a LoRA adapter, found one of another method, or of a variant "
                        "whose factors are no plain product; average these without an adapter spec"
                    )
                continue
            if found_type := no_plain_tensor(tensor) or ("" if computable(tensor) else str(tensor.dtype)):
                raise SpecError(f"{name}: expected a dense floating-point factor, found {found_type}; dequantise it")
            kind = match["kind"] or match["embedding"]
            adapters.setdefault(match["adapter"] or match["embedded"] or "", name)
            found.setdefault(match["module"], {})[kind + (".bias" if match["part"] == "bias" else "")] = name
        if len(adapters) > 1:
            first, second = list(adapters.items())[:2]
            raise SpecError(
                f"{second[1]}: expected one adapter, found {second[0]!r} beside {first[0]!r}; send one of them, as "
                "get_peft_model_state_dict(model) gives it"
            )
        if not found:
            raise SpecError(
                "adapter: expected lora_A and lora_B among the parameters, found none; send what "
                "get_peft_model_state_dict(model) gives"
            )
        based = [name for module in found if (name := f"{module}.base_layer.weight") in params]
        if len(based) > _EMBEDDINGS:
            raise SpecError(
                f"{based[0]}: expected an adapter alone, found the base weights of {len(based)} adapted modules, which "
                "would be averaged with it; send what get_peft_model_state_dict(model) gives, not model.state_dict()"
            )
        return [_module(name, kinds, params) for name, kinds in found.items()]

    def plain(self, params: Params) -> list[str]:
        """The parameters that are no factors: DoRA's magnitudes, biases, modules_to_save."""
        taken = {name for module in self.resolve(params) for name in (module.b, module.a, module.bias)}
        return [name for name in params if name not in taken]


def computable(tensor: Tensor) -> bool:
    """Whether a tensor is of a floating-point type that torch computes in."""
    return tensor.is_floating_point() and tensor.element_size() > 1


def plain_name(module: str) -> str:
    """A module's name in the base model, without the prefixes of PEFT and of wrappers."""
    return _PREFIX.sub("", module)


def _module(name: str, kinds: Mapping[str, str], params: Params) -> Module:
    embedding = any(kind.startswith("lora_embedding") for kind in kinds)
    stem = "lora_embedding_" if embedding else "lora_"
    for kind, other in (("A", "B"), ("B", "A")):
        if stem + kind not in kinds:
            present = kinds.get(stem + other) or next(iter(kinds.values()))
            raise SpecError(f"{present}: expected {stem}{kind} beside it, found none; send both factors")
    A, B = params[kinds[stem + "A"]], params[kinds[stem + "B"]]
    rank = A.shape[0] if A.ndim else 0
    flat = max(A.ndim, B.ndim) == 2 or not embedding
    if min(A.ndim, B.ndim) < 2 or not flat or not rank or B.shape[1] != rank or math.prod(B.shape[2:]) != 1:
        raise SpecError(
            f"{kinds[stem + 'B']}: expected {rank} columns for the {rank} rows of {kinds[stem + 'A']}, found shapes "
            f"{tuple(B.shape)} and {tuple(A.shape)}; grouped convolutions and other factors that are no plain product "
            "cannot be aggregated"
        )
    b, a = ("A", "B") if embedding else ("B", "A")
    return Module(name, kinds[stem + b], kinds[stem + a], embedding, kinds.get("lora_B.bias"))


def load_adapter_spec(source: Any, alphas: Mapping[int, float] | None = None) -> AdapterSpec:
    """What PEFT's configuration of a LoRA adapter says about its parameters.

    Parameters: `source`, a PeftModel with one adapter, a LoraConfig, its dict, an adapter's directory or its
    `adapter_config.json`; `alphas`, `lora_alpha` by rank, for clients that have other ranks and not the
    configuration's `lora_alpha` (`{4: 8, 8: 16}` where it is twice the rank). Needs no PEFT. Raises SpecError for
    every other method, and for variants of LoRA in which A and B are not the two factors of one update.
    """
    config = _config_of(source)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise SpecError(f"peft_type: expected 'LORA', found {kind!r}; rotfed aggregates LoRA adapters only")
    for key, reason in _VARIANTS.items():
        if config.get(key):
            raise SpecError(f"{key}: expected unset, found {config[key]!r}, {reason}; train plain LoRA, rsLoRA or DoRA")
    spec = AdapterSpec(config, dict(alphas or {}))
    for key in ("alpha_pattern", "rank_pattern"):
        try:
            for pattern in dict(config.get(key) or {}):
                re.compile(pattern)
        except (TypeError, ValueError, re.error) as error:
            raise SpecError(f"{key}: expected values by a module's name or pattern, found {config[key]!r}") from error
    if odd := [rank for rank in spec.alphas if not isinstance(rank, int)]:
        raise SpecError(f"alphas: expected ranks as whole numbers, found {odd[0]!r}; write {{8: 16}}")
    for name, alpha in [
        ("lora_alpha", config.get("lora_alpha")),
        *(config.get("alpha_pattern") or {}).items(),
        *((f"alphas[{rank}]", alpha) for rank, alpha in spec.alphas.items()),
    ]:
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
            raise SpecError(f"{name}: expected a positive number, found {alpha!r}; the update is nothing without it")
    return spec


def _config_of(source: Any) -> dict[str, Any]:
    configs = getattr(source, "peft_config", None)
    if isinstance(configs, Mapping):
        if len(configs) != 1:
            raise SpecError(f"model: expected one adapter, found {', '.join(configs) or 'none'}; pass one's LoraConfig")
        source = next(iter(configs.values()))
    if isinstance(source, str | Path):
        path = Path(source)
        file = path / "adapter_config.json" if path.is_dir() else path
        try:
            source = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SpecError(
                f"{file}: expected an adapter's configuration, found none that can be read: {error}; write one with "
                "save_pretrained"
            ) from error
    elif hasattr(source, "to_dict"):
        source = source.to_dict()
    if not isinstance(source, Mapping):
        raise SpecError(
            f"adapter: expected a PeftModel, a LoraConfig, its dict or a directory, found {type(source).__name__}"
        )
    return {
        key: value.value if isinstance(value, Enum) else sorted(value) if isinstance(value, set) else value
        for key, value in source.items()
    }
