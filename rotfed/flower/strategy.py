"""Whole models: alignment around any Flower strategy that speaks the message API."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from logging import INFO
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result, Strategy
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords
from torch import Tensor

from rotfed.align import DEFAULTS, Alignment, AlignOptions
from rotfed.errors import AlignmentError
from rotfed.flower.records import to_record, to_state_dict
from rotfed.flower.replies import Received, Usable, floating, match_params, record_key
from rotfed.flower.reports import ClientReport, RoundReport
from rotfed.flower.spill import Arriving, Held, Spill, Spilled
from rotfed.flower.wrapper import Wrapper, averages, buffers_of, selected
from rotfed.frames import chosen_anchor, follow, to_home
from rotfed.frames_differ import MIN_GAIN, Framed, align_where_frames_differ, check_min_gain
from rotfed.layout import lay_out, moving
from rotfed.matching import Anchor
from rotfed.mergers import normalised_weights
from rotfed.residual import folded
from rotfed.spec import SymmetrySpec
from rotfed.tensors import AT_ONCE, Params, check_finite

# In a round all clients come from one model: joining them one by one or two by two is for models of their own.
ROUND_ANCHORS = ("global", "medoid", "consensus")
STARTS = ("auto", "plain", "aligned")

REPLIES_IN_MEMORY = 2**32

# The inner strategy aggregates what clients report; of a weighted mean, rotfed computes the model itself.
_NO_MODEL = {"rotfed": torch.zeros(1)}


class AlignedStrategy(Wrapper):
    """Bring every reply into one frame, then let another strategy aggregate.

    Parameters
    ----------
    inner
        Any message-API strategy: FedAvg, FedAdam, Krum, a differential-privacy wrapper, your own. Alignment belongs
        outermost: wrap it around a privacy wrapper, not the reverse, which would clip before aligning.
    spec
        The bound spec of the model, from `rotfed.load_spec`. With the residual stream the norms of the model sent out
        and of every reply are folded where that needs it (`rotfed.fold_norms`), so that what clients train and what
        comes out has other weights than without, of the same function at the start.
    anchor
        `"global"`: the model that was sent out. `"medoid"` or `"consensus"`: what the clients agree on, in the frame
        nearest to the model that was sent out (see `rotfed.align_all`). Only `"global"` keeps one client's influence
        bounded, so it is the only one allowed around differential privacy, and the default there; since no reply moves
        away from the model sent out, a clipping bound that held before holds after. Elsewhere the consensus is the
        default.
    options
        Groups, layers, and how they are aligned: see `rotfed.AlignOptions`.
    min_gain
        A round whose frames do not differ is aggregated as it came, to the bit. Only those groups are aligned that gain
        more, in units of the gain on noise (see `rotfed.frames_differ`). 0 aligns every round, infinity none.
    next_round_from
        Around FedAvg and its like: what the next round starts from. `"plain"`, the mean of the replies as they came:
        the rounds run as without alignment, and each delivers the aligned mean. `"aligned"`: what was delivered.
        `"auto"`, the default: plain while clients lie a little apart, as they do that started from one model, and
        aligned where they lie in frames of their own (units changed places, or alignment takes away more than half of
        the spread), whose plain mean would mean nothing. The aligned mean of a round is the better model; that it is
        the better start was not shown (docs/benchmark.md).
    replies_in_memory, spill_folder
        Around FedAvg and its like memory holds so many bytes of a round's replies, four gigabytes by default; others
        are kept, as they arrive, in a file without a name in this folder, the system's temporary one by default. Any
        other strategy gets all replies at once, and memory holds them.

    `reports` holds one `RoundReport` a round; its figures are also in the round's metrics. See `Wrapper` for replies
    that cannot be used.
    """

    def __init__(
        self,
        inner: Strategy,
        spec: SymmetrySpec,
        anchor: str | None = None,
        options: AlignOptions = DEFAULTS,
        min_gain: float = MIN_GAIN,
        next_round_from: str = "auto",
        replies_in_memory: int = REPLIES_IN_MEMORY,
        spill_folder: str | Path | None = None,
    ) -> None:
        super().__init__(inner)
        self.layers, self.groups = selected(spec, options, "AdapterStrategy(inner, spec)")
        self.spec = spec
        self.options = options
        self.min_gain = check_min_gain(min_gain)
        self.anchor = chosen_anchor(anchor or ("global" if self.private else "consensus"), ROUND_ANCHORS)
        if self.private and self.anchor != "global":
            raise AlignmentError(
                f"anchor: expected 'global' around {self.private}, found {self.anchor!r}; aligning one client's "
                "reply to those of others lets it depend on their data, which breaks the privacy accounting"
            )
        self.averages = averages(inner)
        if next_round_from not in STARTS or (next_round_from == "plain" and not self.averages):
            allowed = ", ".join(name for name in STARTS if self.averages or name != "plain")
            raise AlignmentError(
                f"next_round_from: expected one of {allowed}, found {next_round_from!r}; 'plain' is for strategies "
                "that take the weighted mean of the replies, such as FedAvg and FedProx"
            )
        self.next_round_from = next_round_from
        self.replies_in_memory = replies_in_memory
        self.spill_folder = None if spill_folder is None else Path(spill_folder)
        if self.averages:
            # Whether it can be written to is to be known before the rounds.
            Spill(self.spill_folder).close()
        self.reports: list[RoundReport] = []
        # What was delivered, and what the next round starts from in its place.
        self._delivered: tuple[ArrayRecord, ArrayRecord] | None = None

    def settings(self) -> list[tuple[str, str]]:
        """Return the settings as `summary` logs them."""
        return [
            ("Spec", f"{self.spec.source} ({self.spec.model_type})"),
            ("Anchor", f"'{self.anchor}'"),
            ("Groups", ", ".join(self.groups)),
            ("Layers", f"{_span(self.layers)} of {self.spec.num_layers}"),
            ("Rotations", "O(n)" if self.options.reflections else "SO(n)"),
            ("Strength", f"{self.options.strength:g}"),
            ("Least gain over noise", f"{self.min_gain:g}"),
            ("Next round from", self.next_round_from),
        ]

    def start(self, grid: Grid, *arguments: Any, **keywords: Any) -> Result:
        """Run the rounds, as Flower's `Strategy.start`; around FedAvg and its like replies are taken as they arrive."""
        arriving = Arriving(grid) if self.averages and not isinstance(grid, Arriving) else grid
        return super().start(arriving, *arguments, **keywords)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Remember the model that goes out, and let the inner strategy choose to whom."""
        if self._delivered is not None and arrays == self._delivered[0]:
            arrays = self._delivered[1]
        sent = to_state_dict(arrays, shared=True)
        self.broadcast = dict(folded(sent, self.spec))
        lay_out(self.broadcast, self.spec)
        check_finite(self.broadcast, "model sent out")
        as_it_came = all(self.broadcast[name] is tensor for name, tensor in sent.items())
        return self.send_out(server_round, arrays if as_it_came else to_record(self.broadcast), config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Align the usable replies, let the inner strategy aggregate them, restore names, types and shapes."""
        started = time.perf_counter()
        aggregate = self._by_mean if self.averages else self._by_inner
        spill = Spill(self.spill_folder, self.replies_in_memory)
        try:
            received = self.receive(server_round, replies, lambda entry: self._read(entry, spill))
            arrays, metrics = aggregate(server_round, received, spill, started)
        finally:
            spill.close()
            self.done()
        if arrays is not None:
            metrics = MetricRecord() if metrics is None else metrics
            metrics.update(self.reports[-1].metrics())
        return arrays, metrics

    def _read(self, entry: Usable, spill: Spill) -> Params:
        """Return a reply's model, as it is kept through the round. Raises RotfedError to refuse it."""
        params = folded(match_params(entry.params, self.broadcast), self.spec)
        return spill.keep(params) if self.averages else dict(params)

    # --- any strategy ------------------------------------------------------------------------------------------------

    def _by_inner(
        self, server_round: int, received: Received, spill: Spill, started: float
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Hand the aligned replies to the inner strategy."""
        models = [entry.params for entry in received.usable]
        shares = normalised_weights(len(models), [entry.weight for entry in received.usable]) if models else []
        framed = Framed([])
        if models:
            reference = Anchor(self.broadcast, self.spec, checked=True)
            plain = _mean_like_flower(models, shares, floating(self.broadcast))
            centre = reference if self.anchor == "global" else {**self.broadcast, **plain}
            framed = self._framed(models, shares, centre)
        alignments = list(framed.alignments)
        if framed.groups and self.anchor != "global":
            alignments = follow(models, alignments, shares, self.spec, reference, self.options)
        clients = [_client(entry, found) for entry, found in zip(received.usable, alignments, strict=True)]
        self._report(server_round, received, framed, clients, "aligned" if framed.groups else "plain", started)
        moved = [alignment.params for alignment in alignments]
        made, metrics = self.aggregate_inside(server_round, received, moved)
        if made is None:
            return None, metrics
        return to_record(self.typed(self.completed(made, models, shares))), metrics

    # --- FedAvg and its like -----------------------------------------------------------------------------------------

    def _by_mean(
        self, server_round: int, received: Received, spill: Spill, started: float
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Take the weighted mean, plain or aligned, of replies that are read parameter by parameter."""
        models = [entry.params for entry in received.usable]
        merged, metrics = self._metrics_inside(server_round, received)
        shares = normalised_weights(len(models), [entry.weight for entry in received.usable]) if models else []
        plain = _mean_like_flower(models, shares, floating(self.broadcast))
        made = bool(models) and merged is not None
        try:
            check_finite(plain, "mean")
        except AlignmentError as error:
            self.log_not_finite(error)
            made = False
        if not made:
            self._report(server_round, received, Framed([]), [], "plain", started)
            return None, metrics
        self._delivered = None
        reference = {name: t.to(plain[name].dtype) if name in plain else t for name, t in self.broadcast.items()}
        centre = reference if self.anchor == "global" else {**reference, **plain}
        framed = self._framed(models, shares, centre, spill)
        clients: list[ClientReport] = []
        moved = _each_moved(received.usable, framed, clients)
        mean = dict(plain) if framed.groups else plain
        if framed.groups:
            mean |= _mean_like_flower(moved, shares, moving(self.broadcast, self.spec, framed.groups))
            if self.anchor != "global":
                turned = {**reference, **mean}
                once = replace(self.options, groups=framed.groups, max_sweeps=1)
                home = to_home(turned, reference, self.spec, once, near=not framed.far).over(turned)
                mean |= {name: home[name] for name in mean}
        # Where nothing is moved there are still distances to report.
        for _ in moved:
            pass
        apart = framed.groups and (
            self.next_round_from == "plain" or (self.next_round_from == "auto" and not framed.far)
        )
        start = "plain" if apart or not framed.groups else "aligned"
        self._report(server_round, received, framed, clients, start, started)
        # A model that is packed is not kept unpacked.
        buffers, differed = buffers_of(models, shares), bool(framed.groups)
        del framed, centre
        same = {name for name, tensor in mean.items() if tensor is plain[name]}
        next_start = to_record(self.typed({**plain, **buffers})) if apart or not differed else None
        del plain
        if next_start is None:
            return to_record(self.typed({**mean, **buffers})), metrics
        if not differed:
            return next_start, metrics
        typed = self.typed({**mean, **buffers})
        moved_ones = to_record({name: tensor for name, tensor in typed.items() if name not in same})
        delivered = ArrayRecord({name: moved_ones.get(name, next_start[name]) for name in typed})
        # A copy, by value: whoever drives the rounds may copy what was delivered, and may change it.
        self._delivered = ArrayRecord(dict(delivered.items())), next_start
        return delivered, metrics

    def _metrics_inside(self, server_round: int, received: Received) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Let the inner strategy aggregate what clients report, in place of models, which only metrics get to see."""
        assert isinstance(self.inner, FedAvg)
        aggregate = self.inner.train_metrics_aggr_fn

        def with_models(contents: list[RecordDict], weighted_by: str) -> MetricRecord:
            for entry in received.usable:
                if isinstance(entry.params, Spilled | Held):
                    entry.reply.content[record_key(entry.reply)] = entry.params.record()
            return aggregate(contents, weighted_by)

        for entry in received.usable:
            entry.reply.content[record_key(entry.reply)] = to_record(_NO_MODEL)
        if aggregate is not aggregate_metricrecords:
            self.inner.train_metrics_aggr_fn = with_models
        try:
            return self.inner.aggregate_train(server_round, received.messages)
        finally:
            self.inner.train_metrics_aggr_fn = aggregate
            for entry in received.usable:
                entry.reply.content[record_key(entry.reply)].clear()

    def _framed(
        self, models: Sequence[Params], shares: Sequence[float], centre: Params | Anchor, spill: Spill | None = None
    ) -> Framed:
        keep = dict if spill is None else spill.keep
        return align_where_frames_differ(
            models, self.spec, self.anchor, shares, centre, self.min_gain, self.options, keep
        )

    def _report(
        self,
        server_round: int,
        received: Received,
        framed: Framed,
        clients: Sequence[ClientReport],
        start: str,
        started: float,
    ) -> None:
        report = RoundReport(
            round=server_round,
            anchor=self.anchor,
            clients=tuple(clients),
            groups=framed.groups,
            gain=framed.gain,
            next_round_from=start,
            refused=dict(received.refused),
            seconds=time.perf_counter() - started,
        )
        self.reports.append(report)
        log(INFO, "aggregate_train: %s", report.line())


def _each_moved(usable: Sequence[Usable], framed: Framed, clients: list[ClientReport]) -> Iterator[Params]:
    """Yield the models in one frame, one at a time, and note each client's figures in `clients`."""
    for entry, found in zip(usable, framed.alignments, strict=True):
        clients.append(_client(entry, found))
        yield found.params


def _client(entry: Usable, found: Alignment) -> ClientReport:
    return ClientReport(entry.node_id, found.distance_before, found.distance_after, found.identity_permutations)


class RotFedAvg(AlignedStrategy):
    """FedAvg in one common frame.

    Parameters: `spec` and the options of `AlignedStrategy`; every keyword of Flower's `FedAvg`.
    """

    def __init__(
        self,
        spec: SymmetrySpec,
        anchor: str | None = None,
        options: AlignOptions = DEFAULTS,
        min_gain: float = MIN_GAIN,
        next_round_from: str = "auto",
        replies_in_memory: int = REPLIES_IN_MEMORY,
        spill_folder: str | Path | None = None,
        **fedavg_keywords: Any,
    ) -> None:
        # Keywords of adapters would be told first that FedAvg does not know them.
        selected(spec, options, "AdapterStrategy(inner, spec)")
        inner = FedAvg(**fedavg_keywords)
        super().__init__(inner, spec, anchor, options, min_gain, next_round_from, replies_in_memory, spill_folder)


def _mean_like_flower(models: Iterable[Params], shares: Sequence[float], names: Iterable[str]) -> dict[str, Tensor]:
    """Return the weighted mean of floating-point parameters as Flower's FedAvg computes it, to the bit.

    Half precision is summed in float32, and stays so. One model is read at a time, one parameter at a time.
    """
    total: dict[str, Tensor] = {}
    buffer: dict[torch.dtype, Tensor] = {}
    names = list(names)
    for model, share in zip(models, shares, strict=True):
        for name in names:
            tensor = model[name]
            wide = torch.promote_types(tensor.dtype, torch.float32)
            if name not in total:
                total[name] = (tensor.to(wide) * share).contiguous()
                continue
            part = buffer.setdefault(wide, torch.empty(AT_ONCE, dtype=wide))
            own, others = total[name].flatten(), tensor.to(wide).flatten()
            for start in range(0, len(own), AT_ONCE):
                some = others[start : start + AT_ONCE]
                own[start : start + AT_ONCE].add_(torch.mul(some, share, out=part[: len(some)]))
    return total


def _span(layers: Sequence[int]) -> str:
    contiguous = list(layers) == list(range(layers[0], layers[-1] + 1)) if layers else False
    return f"{layers[0]}-{layers[-1]}" if contiguous and len(layers) > 1 else ", ".join(map(str, layers)) or "none"
