"""Rounds of LoRA adapters: what goes to whom, what comes back, and how it is aggregated."""

import time
from collections.abc import Mapping
from typing import Any

import torch
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import Bulyan, FedAvg, FedMedian, FedTrimmedAvg, Krum, MultiKrum, QFedAvg, Strategy
from torch import Tensor

from rotfed.adapters import METHODS, AdapterSpec, aggregate_adapters
from rotfed.adapters.aggregate import RESIDUAL, check_rotation, with_ranks
from rotfed.adapters.client import read_residual, residual_record
from rotfed.adapters.factors import Factors, residual
from rotfed.adapters.spec import Module
from rotfed.errors import AlignmentError, RecordError
from rotfed.flower.mods import refuse_options
from rotfed.flower.replies import Received, Usable, match_params, widened
from rotfed.flower.reports import AdapterReport

TRAIN = "rotfed-train"
RESIDUAL_KEY = "residual"

TRAINED = ("both", "B", "alternate")
_ANCHORS = ("global", "consensus")

# Strategies that compare replies with each other, or weight them by more than their number of examples.
_COMPARES = (Krum, MultiKrum, Bulyan, FedMedian, FedTrimmedAvg, QFedAvg)


class AdapterRounds:
    """What an adapter spec makes of the rounds of an `AlignedStrategy`, whose keywords these are.

    A node's rank is read from its replies. Until it has answered once it gets the server's adapter whole, at the
    highest rank, and fits it to its own (`rotfed.fit_adapter`, which changes nothing where ranks agree); afterwards it
    gets the best approximation of its own rank.
    """

    def __init__(
        self,
        spec: AdapterSpec,
        strategies: list[Strategy],
        private: str,
        anchor: str,
        proper: bool,
        strength: float,
        max_sweeps: int,
        aggregation: str | None,
        over: str | None,
        train: str | None,
    ) -> None:
        self.spec = spec
        self.train = train = train or "both"
        self.method = aggregation or ("mean" if train != "both" else "rotation" if private else "optimal")
        self.over = over or "both"
        self.options: dict[str, Any] = {"agree": anchor == "consensus", "proper": proper, "strength": strength}
        self.options["max_sweeps"] = max_sweeps
        for name, value, allowed in (
            ("aggregation", self.method, METHODS),
            ("anchor", anchor, _ANCHORS),
            ("over", self.over, ("both", "A", "B", "alternate")),
            ("train", train, TRAINED),
        ):
            if value not in allowed:
                raise AlignmentError(f"{name}: expected one of {', '.join(allowed)} for adapters, found {value!r}")
        check_rotation(proper, strength, max_sweeps)
        inner = strategies[-1]
        plain = not self.options["agree"] and self.over == "both" and strength == 1
        if private and not (self.method == "mean" or (self.method == "rotation" and plain)):
            raise AlignmentError(
                f"aggregation: expected 'rotation' to the global anchor, whole and over both factors, around "
                f"{private}, found {self.method!r} with anchor {anchor!r}, over {self.over!r}, strength "
                f"{strength:g}; one client's reply must not depend on those of others, nor move away from what was sent"
            )
        if self.method != "rotation":
            usual = {"over": "both", "proper": False, "strength": 1, "anchor": "global"}
            found = {"over": self.over, "proper": proper, "strength": strength, "anchor": anchor}
            given = {name: None if value == usual[name] else value for name, value in found.items()}
            refuse_options(f"{self.method!r} (only 'rotation' turns adapters)", **given)
        if isinstance(inner, _COMPARES) and self.method not in ("mean", "rotation"):
            raise AlignmentError(
                f"aggregation: expected 'rotation' around {type(inner).__name__}, found {self.method!r}, which "
                "combines the replies before the strategy can choose among them"
            )
        if self.method in RESIDUAL and not averages(inner):
            raise AlignmentError(
                f"aggregation: expected 'optimal', 'rotation' or 'mean' around {type(inner).__name__}, found "
                f"{self.method!r}, whose residual makes up for a mean and not for a step towards it"
            )
        if train != "both" and self.method != "mean":
            raise AlignmentError(
                f"aggregation: expected 'mean' where one factor is frozen, found {self.method!r}; the mean of the "
                "other factor is exact already"
            )
        # A round delivers what the next one starts from.
        self.delivered: dict[str, Tensor] = {}
        self.residual: dict[str, Tensor] = {}
        self._left: dict[str, Factors] = {}
        self._ranks: dict[int, dict[str, int]] = {}
        self._broadcast: dict[str, Tensor] = {}
        self._start: dict[str, Tensor] = {}
        self._round = 0

    def settings(self) -> list[tuple[str, str]]:
        """The settings as `summary` logs them."""
        shown = [("Aggregation", f"'{self.method}'"), ("Trained", self.train)]
        if self.method == "rotation":
            shown += [("Over", self.over), *((name.capitalize(), str(value)) for name, value in self.options.items())]
        return shown

    def begin(self, server_round: int, broadcast: dict[str, Tensor], config: ConfigRecord) -> dict[str, Tensor]:
        """Take note of what a round sends, say in its config which factor is trained, and return the adapter."""
        self._round, self._broadcast = server_round, broadcast
        if server_round == 1 or not self._start:
            # A strategy may be started again, with another adapter.
            self._start, self._ranks = broadcast, {}
        self._check_residual(broadcast)
        if self.train != "both":
            config[TRAIN] = self._trained
        return broadcast

    def _check_residual(self, broadcast: Mapping[str, Tensor]) -> None:
        """Raise AlignmentError for a residual that clients could not add, or would add twice."""
        modules = {module.name: module.read(broadcast) for module in self.spec.resolve(broadcast)}
        carried = [name for name in (f"{module}.base_layer.weight" for module in modules) if name in broadcast]
        if self.method in RESIDUAL and carried:
            raise AlignmentError(
                f"{carried[0]}: expected no base weight beside a residual, which goes onto it, found one; send "
                "get_peft_model_state_dict(model, save_embedding_layers=False), or aggregate by 'optimal'"
            )
        for name, (B, A) in read_residual(self.residual).items():
            expected = (modules[name].B.shape[0], modules[name].A.shape[1]) if name in modules else None
            if (found := (B.shape[0], A.shape[1])) != expected:
                raise AlignmentError(
                    f"{name}: expected a residual of shape {expected} as the adapter has, found {found}; set the "
                    "residual that was saved with this adapter"
                )

    @property
    def _trained(self) -> str:
        """RoLoRA takes turns and begins with B: as long as B is zero, no gradient reaches A."""
        return self.train if self.train != "alternate" else "B" if self._round % 2 else "A"

    def _frozen(self, module: Module) -> str:
        return {"both": "", "B": module.a, "A": module.b}[self._trained]

    def ranks(self, node_id: int) -> tuple[int, ...]:
        """A node's ranks by module, where they are known."""
        return tuple(self._ranks.get(node_id, {}).values())

    def for_node(self, node_id: int, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """The adapter at a node's own rank, where that is known."""
        return with_ranks(params, self.spec, self._ranks.get(node_id, {}))

    def read(self, entry: Usable) -> dict[str, Tensor]:
        """A reply's adapter at the server's ranks and scales. Raises RotfedError to refuse it."""
        found = dict(entry.params)
        common = {module.name: module.read(self._broadcast) for module in self.spec.resolve(self._broadcast)}
        ranks: dict[str, int] = {}
        modules = self.spec.resolve(found)
        if odd := sorted(found.keys() ^ self._broadcast.keys()):
            wrong = "not in the adapter sent out" if odd[0] in found else "expected in the reply, not found"
            raise RecordError(f"{odd[0]}: {wrong}; send get_peft_model_state_dict(model) of the same modules")
        for module in modules:
            sent, factors = common[module.name], module.read(found)
            highest = sent.rank
            ranks[module.name] = factors.rank
            frozen = self._frozen(module)
            if factors.rank > highest or (frozen and factors.rank < highest):
                raise RecordError(
                    f"{module.a}: expected rank {highest}{'' if frozen else ' or less'}, found {factors.rank}; "
                    + ("frozen factors have one rank" if frozen else "start from an adapter of the highest rank")
                )
            if (kept := self._broadcast.get(frozen)) is not None:
                if kept.shape != found[frozen].shape or not kept.to(found[frozen].dtype).equal(found[frozen]):
                    raise RecordError(
                        f"{frozen}: expected as it was sent, found changed; train the other factor only in this round "
                        f"(rotfed.train_factors(model, {self._trained!r}))"
                    )
                found[frozen] = kept
            # Factors of another layer's shape are refused by it, below.
            if factors.rank < highest and factors.A.shape[1] == sent.A.shape[1]:
                ratio = self.spec.scale(module, factors.rank) / self.spec.scale(module, highest)
                padded = Factors(factors.B.double() * ratio, factors.A).padded(sent)
                found.update(module.write(padded, found))
                if module.bias is not None:
                    found[module.bias] = found[module.bias].double() * ratio
        matched = match_params(found, widened(self._broadcast, torch.float32))
        self._ranks[entry.node_id] = ranks
        return matched

    def combine(
        self, received: Received, refused: Mapping[int, str], started: float
    ) -> tuple[list[dict[str, Tensor]], AdapterReport]:
        """The adapters that the inner strategy is given in place of the replies, and the round's report."""
        usable = received.usable
        if not usable:
            return [], AdapterReport(self._round, self.method, refused=dict(refused))
        in_turn = "A" if self._round % 2 else "B"
        made = aggregate_adapters(
            [entry.params for entry in usable],
            self.spec,
            self.method,
            [entry.weight for entry in usable],
            # A fresh start in every round is what stacking leaves the clients with.
            self._start if self.method == "stack" else self._broadcast,
            over=in_turn if self.over == "alternate" else self.over,
            **self.options,
        )
        self._left = made.residual
        return list(made.replies), AdapterReport(
            round=self._round,
            aggregation=self.method,
            ranks={entry.node_id: max(self._ranks[entry.node_id].values()) for entry in usable},
            error=made.error,
            mean_error=made.mean_error,
            errors=made.errors,
            mean_errors=made.mean_errors,
            refused=dict(refused),
            seconds=time.perf_counter() - started,
        )

    def frozen(self) -> dict[str, Tensor]:
        """The factors that the round does not train, as they were sent."""
        frozen = [self._frozen(module) for module in self.spec.resolve(self._broadcast)]
        return {name: self._broadcast[name] for name in frozen if name}

    def settle(self) -> None:
        """Add the round's residual to those before, once the inner strategy has made a model of it."""
        before = read_residual(self.residual)
        for name, new in self._left.items():
            total = [before[name], new] if name in before else [new]
            self.residual |= residual_record({name: residual(total, [1.0] * len(total))})
        self._left = {}


def averages(strategy: Strategy) -> bool:
    """Whether a strategy takes the weighted mean of the replies, as FedAvg does."""
    return isinstance(strategy, FedAvg) and type(strategy).aggregate_train is FedAvg.aggregate_train


def chain(strategy: Strategy) -> list[Strategy]:
    """A strategy and those that it wraps, outermost first."""
    found = [strategy]
    while isinstance(nested := getattr(found[-1], "strategy", None), Strategy):
        found.append(nested)
    return found
