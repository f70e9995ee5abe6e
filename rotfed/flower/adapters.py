"""LoRA adapters: their updates averaged around any Flower strategy that speaks the message API."""

import time
from collections.abc import Iterable, Mapping
from logging import INFO
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Bulyan, FedMedian, FedTrimmedAvg, Krum, MultiKrum, QFedAvg, Strategy
from torch import Tensor

from rotfed.adapters import METHODS, AdapterSpec, aggregate_adapters
from rotfed.adapters.aggregate import LEAVES_DELTA, check_rotation, with_ranks
from rotfed.adapters.client import delta_record, read_delta
from rotfed.adapters.factors import Factors, left_over
from rotfed.adapters.spec import Module
from rotfed.errors import AlignmentError, RecordError
from rotfed.flower.records import to_record, to_state_dict
from rotfed.flower.replies import Received, Usable, match_params, widened
from rotfed.flower.reports import AdapterReport
from rotfed.flower.wrapper import Wrapper, averages, chain, check_is_adapter_spec, require_unset
from rotfed.mergers import normalised_weights
from rotfed.tensors import check_finite

TRAIN = "rotfed-train"
DELTA_KEY = "base-delta"

TRAINED = ("both", "B", "alternate")
_ANCHORS = ("global", "consensus")

# Strategies that compare replies with each other, or weight them by more than their number of examples.
_COMPARES = (Krum, MultiKrum, Bulyan, FedMedian, FedTrimmedAvg, QFedAvg)


class AdapterStrategy(Wrapper):
    """Average the updates of LoRA adapters, then let another strategy aggregate.

    Parameters
    ----------
    inner
        Any message-API strategy; it sees replies whose mean is the result.
    spec
        The spec of the adapters, from `rotfed.load_adapter_spec`. Adapters are sent and answered as
        `get_peft_model_state_dict(model)` gives them.
    aggregation
        The stand-in for the mean of updates, `"optimal"` by default (`"rotation"` around differential privacy, `"mean"`
        with a frozen factor; see `rotfed.aggregate_adapters`). `"exact"` and `"stack"` leave a change of the base
        weights: it is sent beside the adapter as the record `"base-delta"`, for `rotfed.add_base_delta`, and
        `base_delta` holds it, summed over all rounds.
    train
        `"both"` factors; `"B"` alone, A frozen as it was sent (FFA-LoRA, arXiv 2403.12313); or `"alternate"`, B in the
        first round and A in the next (RoLoRA, arXiv 2502.01755). The train config says which under `"rotfed-train"`,
        for `rotfed.train_factors`; a reply that changed the other is refused.
    anchor, over, reflections, strength
        Of `"rotation"` only, refused with any other: to the `"global"` adapter or to the `"consensus"`; over `"both"`
        factors, `"A"`, `"B"`, or `"alternate"`, A in the first round and B in the next, which with `strength` is
        FedRot-LoRA (arXiv 2602.23638).

    Clients' adapters may have lower ranks than the server's. A node's rank is read from its replies: until it has
    answered once it gets the server's adapter whole, at the highest rank, and fits it to its own
    (`rotfed.fit_adapter`, which changes nothing where ranks agree); afterwards it gets the best approximation of its
    own rank. `reports` holds one `AdapterReport` a round. See `Wrapper` for replies that cannot be used.
    """

    def __init__(
        self,
        inner: Strategy,
        spec: AdapterSpec,
        aggregation: str | None = None,
        train: str = "both",
        anchor: str = "global",
        over: str = "both",
        reflections: bool = True,
        strength: float = 1.0,
    ) -> None:
        super().__init__(inner)
        check_is_adapter_spec(spec, "AlignedStrategy(inner, spec)")
        private = self.private
        self.spec = spec
        self.train = train
        self.method = aggregation or ("mean" if train != "both" else "rotation" if private else "optimal")
        self.over = over
        self.options: dict[str, Any] = {
            "agree": anchor == "consensus",
            "reflections": reflections,
            "strength": strength,
        }
        for name, value, allowed in (
            ("aggregation", self.method, METHODS),
            ("anchor", anchor, _ANCHORS),
            ("over", self.over, ("both", "A", "B", "alternate")),
            ("train", train, TRAINED),
        ):
            if value not in allowed:
                raise AlignmentError(f"{name}: expected one of {', '.join(allowed)} for adapters, found {value!r}")
        check_rotation(reflections, strength)
        innermost = chain(inner)[-1]
        plain = not self.options["agree"] and self.over == "both" and strength == 1
        if private and not (self.method == "mean" or (self.method == "rotation" and plain)):
            raise AlignmentError(
                f"aggregation: expected 'rotation' to the global anchor, whole and over both factors, around "
                f"{private}, found {self.method!r} with anchor {anchor!r}, over {self.over!r}, strength "
                f"{strength:g}; one client's reply must not depend on those of others, nor move away from what was sent"
            )
        if self.method != "rotation":
            usual = {"over": "both", "reflections": True, "strength": 1, "anchor": "global"}
            found = {"over": self.over, "reflections": reflections, "strength": strength, "anchor": anchor}
            given = {name: None if value == usual[name] else value for name, value in found.items()}
            require_unset(f"{self.method!r} (only 'rotation' turns adapters)", **given)
        if isinstance(innermost, _COMPARES) and self.method not in ("mean", "rotation"):
            raise AlignmentError(
                f"aggregation: expected 'rotation' around {type(innermost).__name__}, found {self.method!r}, which "
                "combines the replies before the strategy can choose among them"
            )
        if self.method in LEAVES_DELTA and not averages(innermost):
            raise AlignmentError(
                f"aggregation: expected 'optimal', 'rotation' or 'mean' around {type(innermost).__name__}, found "
                f"{self.method!r}, whose change of the base makes up for a mean and not for a step towards it"
            )
        if train != "both" and self.method != "mean":
            raise AlignmentError(
                f"aggregation: expected 'mean' where one factor is frozen, found {self.method!r}; the mean of the "
                "other factor is exact already"
            )
        self.reports: list[AdapterReport] = []
        self._delta: dict[str, Tensor] = {}
        self._left: dict[str, Factors] = {}
        self._ranks: dict[int, dict[str, int]] = {}
        self._first: dict[str, Tensor] = {}
        self._round = 0

    @property
    def base_delta(self) -> dict[str, Tensor]:
        """What all rounds so far left for the base weights, for `rotfed.add_base_delta`; empty of most methods."""
        return dict(self._delta)

    @base_delta.setter
    def base_delta(self, left: Mapping[str, Tensor | Factors]) -> None:
        """Go on from the change of the base of an earlier run, with the adapter that it belongs to."""
        self._delta = delta_record(left)

    def settings(self) -> list[tuple[str, str]]:
        """The settings as `summary` logs them."""
        shown = [("Aggregation", f"'{self.method}'"), ("Trained", self.train)]
        if self.method == "rotation":
            shown += [("Over", self.over), *((name.capitalize(), str(value)) for name, value in self.options.items())]
        return shown

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Remember the adapter that goes out, say which factor is trained, and let the inner strategy choose nodes."""
        self._round, self.broadcast = server_round, to_state_dict(arrays)
        if server_round == 1 or not self._first:
            # A strategy may be started again, with another adapter.
            self._first, self._ranks = self.broadcast, {}
        self._check_delta(self.broadcast)
        if self.train != "both":
            config[TRAIN] = self._trained
        self.spec.resolve(self.broadcast)
        check_finite(self.broadcast, "model sent out")
        return self.send_out(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the usable adapters, let the inner strategy take their mean, restore names, types and shapes."""
        started = time.perf_counter()
        received = self.receive(server_round, replies, self._read)
        models, report = self._combine(received, started)
        self.reports.append(report)
        log(INFO, "aggregate_train: %s", report.line())
        made, metrics = self.aggregate_inside(server_round, received, models)
        self.done()
        if made is None:
            return None, metrics
        shares = normalised_weights(len(models), [entry.weight for entry in received.usable])
        made = self.completed(made, models, shares)
        metrics = MetricRecord() if metrics is None else metrics
        metrics.update(report.metrics())
        self._settle()
        return to_record(self.typed({**made, **self._frozen_factors()})), metrics

    def beside(self) -> dict[str, ArrayRecord]:
        """Return the change of the base weights, where there is any."""
        return {DELTA_KEY: to_record(self._delta)} if self._delta else {}

    def _check_delta(self, broadcast: Mapping[str, Tensor]) -> None:
        """Raise AlignmentError for a change of the base that clients could not add, or would add twice."""
        modules = {module.name: module.read(broadcast) for module in self.spec.resolve(broadcast)}
        carried = [name for name in (f"{module}.base_layer.weight" for module in modules) if name in broadcast]
        if self.method in LEAVES_DELTA and carried:
            raise AlignmentError(
                f"{carried[0]}: expected no base weight beside a change of it, found one; send "
                "get_peft_model_state_dict(model, save_embedding_layers=False), or aggregate by 'optimal'"
            )
        for name, (B, A) in read_delta(self._delta).items():
            expected = (modules[name].B.shape[0], modules[name].A.shape[1]) if name in modules else None
            if (found := (B.shape[0], A.shape[1])) != expected:
                raise AlignmentError(
                    f"{name}: expected a change of the base of shape {expected} as the adapter has, found {found}; "
                    "set the one that was saved with this adapter"
                )

    @property
    def _trained(self) -> str:
        """RoLoRA takes turns and begins with B: as long as B is zero, no gradient reaches A."""
        return self.train if self.train != "alternate" else "B" if self._round % 2 else "A"

    def _frozen(self, module: Module) -> str:
        return {"both": "", "B": module.a, "A": module.b}[self._trained]

    def sent_alike(self, node_id: int) -> tuple[object, ...]:
        """Return a node's ranks by module, where they are known."""
        return tuple(self._ranks.get(node_id, {}).values())

    def for_node(self, node_id: int, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the adapter at a node's own rank, where that is known."""
        return with_ranks(params, self.spec, self._ranks.get(node_id, {}))

    def _read(self, entry: Usable) -> dict[str, Tensor]:
        """Return a reply's adapter at the server's ranks and scales. Raises RotfedError to refuse it."""
        found = dict(entry.params)
        common = {module.name: module.read(self.broadcast) for module in self.spec.resolve(self.broadcast)}
        ranks: dict[str, int] = {}
        modules = self.spec.resolve(found)
        if odd := sorted(found.keys() ^ self.broadcast.keys()):
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
            if (kept := self.broadcast.get(frozen)) is not None:
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
        matched = match_params(found, widened(self.broadcast, torch.float32))
        self._ranks[entry.node_id] = ranks
        return matched

    def _combine(self, received: Received, started: float) -> tuple[list[dict[str, Tensor]], AdapterReport]:
        """Return the adapters that the inner strategy is given in place of the replies, and the round's report."""
        usable = received.usable
        if not usable:
            return [], AdapterReport(self._round, self.method, refused=dict(received.refused))
        in_turn = "A" if self._round % 2 else "B"
        made = aggregate_adapters(
            [entry.params for entry in usable],
            self.spec,
            self.method,
            [entry.weight for entry in usable],
            # A fresh start in every round is what stacking leaves the clients with.
            self._first if self.method == "stack" else self.broadcast,
            over=in_turn if self.over == "alternate" else self.over,
            **self.options,
        )
        self._left = made.base_delta
        return list(made.replies), AdapterReport(
            round=self._round,
            aggregation=self.method,
            ranks={entry.node_id: max(self._ranks[entry.node_id].values()) for entry in usable},
            error=made.error,
            mean_error=made.mean_error,
            errors=made.errors,
            mean_errors=made.mean_errors,
            refused=dict(received.refused),
            seconds=time.perf_counter() - started,
        )

    def _frozen_factors(self) -> dict[str, Tensor]:
        """Return the factors that the round does not train, as they were sent."""
        frozen = [self._frozen(module) for module in self.spec.resolve(self.broadcast)]
        return {name: self.broadcast[name] for name in frozen if name}

    def _settle(self) -> None:
        """Add the round's change of the base to those before, once the inner strategy has made a model of it."""
        before = read_delta(self._delta)
        for name, new in self._left.items():
            total = [before[name], new] if name in before else [new]
            self._delta |= delta_record({name: left_over(total, [1.0] * len(total))})
        self._left = {}
