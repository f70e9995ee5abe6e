"""One start out of several parties' own models, for the ordinary rounds of any Flower strategy."""

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from logging import INFO, WARNING
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from torch import Tensor

from rotfed.align import DEFAULTS, Alignment, AlignOptions, align
from rotfed.errors import AlignmentError, RecordError, RotfedError
from rotfed.flower.party import (
    ALIGN,
    DESCEND,
    FIGURES,
    KEEP,
    SUBMIT,
    UNMOVED,
    WEIGHT,
    figures,
    model_key,
    write_options,
)
from rotfed.flower.records import to_record, to_state_dict
from rotfed.flower.replies import (
    NO_REPLY,
    Reader,
    Received,
    Usable,
    match_params,
    read_weight,
    record_key,
    sort_replies,
    widened,
)
from rotfed.flower.reports import ClientReport
from rotfed.flower.wrapper import selected
from rotfed.frames import align_all, chosen_anchor
from rotfed.layout import lay_out
from rotfed.learned import LearnedAlignment
from rotfed.matching import Anchor
from rotfed.mergers import weighted_mean
from rotfed.residual import folded
from rotfed.spec import SymmetrySpec
from rotfed.tensors import Params, to_work
from rotfed.transform import Transform

START_ANCHORS = ("progressive", "tree", "medoid", "consensus")
IN_TURN = ("progressive", "tree")
LEARNED = ("own", "together")

# The entries of a generator grow as the tangent of half an angle: these are a thousandth from the half turn.
_FARTHEST = 1e3


@dataclass(frozen=True)
class StartReport:
    """A multi-party start: the parties that were merged, with their last move, and what went wrong.

    `skipped` names the nodes that are not in the result, `data_free` those whose model is in it, but whose data had no
    part in learning because something failed, both with the reason. `messages` were sent.
    """

    anchor: str
    learned: str | None
    parties: tuple[ClientReport, ...]
    skipped: dict[int, str] = field(default_factory=dict)
    data_free: dict[int, str] = field(default_factory=dict)
    messages: int = 0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data for a JSON file."""
        found = asdict(self)
        named = {key: {str(node): why for node, why in found[key].items()} for key in ("skipped", "data_free")}
        return {**found, **named}


class MultiPartyStart:
    """Make one model of several parties' own, to start any strategy from.

        start = MultiPartyStart(rotfed.load_spec(model, residual=True), anchor="progressive", learned="own")
        strategy.start(grid, initial_arrays=start.run(grid), ...)

    Parameters
    ----------
    spec
        The bound spec of the parties' models. With the residual stream models are folded first, and so is the result
        (`rotfed.fold_norms`); training unfolds it again, so an aligned strategy for the rounds after takes a spec
        without.
    anchor
        `"progressive"`, `"tree"`, `"medoid"` or `"consensus"`, as in `rotfed.align_all`. Where each party learns
        in turn, `"progressive"` goes from the one with most examples to the one with fewest.
    learned
        None: the weights alone decide. `"own"`: each step of `"progressive"` and `"tree"` is one message to one
        party, which moves its own model, or the mean of a group in which it has most examples, on its own data.
        `"together"`: from where the weights alone bring them, the alignment of all models is trained by all parties.
        Its parameters alone travel and are averaged by Flower's FedAvg for `rounds` rounds, while the models stay put
        with every party; so every party gets to see all of them.
    submit
        Whether parties hand in their models as they are. Without, `"progressive"` only, each party in turn gets the
        mean so far and answers with its own model in that mean's frame; the first one's own frame, folded, is the
        common one unless there is a `reference`. This keeps a party's frame to itself, not what its model computes.
    reference
        Parameters of a model in whose frame the result is expressed; it lends its frame and shapes only.
    min_parties, min_available_nodes
        How many usable models there must be, and how many nodes to wait for before all that are connected are asked.
    options
        As in `rotfed.align`, wherever the weights alone decide.

    A party that is lost, fails, or sends what cannot be used is skipped and named. Where it is lost in its step but has
    handed in its model, that is merged by its weights alone. `report` holds what happened in the last run.
    """

    def __init__(
        self,
        spec: SymmetrySpec,
        anchor: str = "progressive",
        learned: str | None = None,
        submit: bool = True,
        reference: Params | None = None,
        rounds: int = 10,
        min_parties: int = 2,
        min_available_nodes: int = 2,
        options: AlignOptions = DEFAULTS,
    ) -> None:
        selected(spec, options, "AdapterStrategy(inner, spec)")
        self.options = options
        anchor = chosen_anchor(anchor, START_ANCHORS)
        if learned not in (None, *LEARNED):
            raise AlignmentError(f"learned: expected None or one of {', '.join(LEARNED)}, found {learned!r}")
        if learned == "own" and anchor not in IN_TURN:
            raise AlignmentError(
                f"anchor: expected one of {', '.join(IN_TURN)} where each party learns in turn, found {anchor!r}"
            )
        if not submit and anchor != "progressive":
            raise AlignmentError(f"anchor: expected 'progressive' where no model is submitted, found {anchor!r}")
        for name, value in (
            ("rounds", rounds),
            ("min_parties", min_parties),
            ("min_available_nodes", min_available_nodes),
        ):
            if not isinstance(value, int) or value < 1:
                raise AlignmentError(f"{name}: expected a whole number, at least 1, found {value!r}")
        self.spec = spec
        self.anchor = anchor
        self.learned = learned
        self.submit = submit
        self.reference = None if reference is None else dict(Anchor(folded(reference, spec), spec).params)
        self.rounds = rounds
        self.min_parties = min_parties
        self.min_available_nodes = max(min_parties, min_available_nodes)
        self.report: StartReport | None = None

    def run(self, grid: Grid, timeout: float = 3600.0, config: ConfigRecord | None = None) -> ArrayRecord:
        """Ask every connected node for its part and return the merged model, in the types of the parties' models.

        Parameters: `timeout`, the seconds to wait for nodes to connect, and for the replies to each batch of messages;
        `config`, what to send to the parties with every message, for their own mods. Raises AlignmentError, naming who
        was left out and why, where fewer than `min_parties` usable models remain.
        """
        try:
            config = ConfigRecord({**(config or {})})
        except (TypeError, ValueError) as error:
            raise AlignmentError(
                f"config: expected entries of a flwr.app.ConfigRecord, found others: {error}"
            ) from error
        started = time.perf_counter()
        log(INFO, "Starting from several parties' models: anchor '%s', learned %s", self.anchor, self.learned)
        run = _Run(self, grid, timeout, config)
        try:
            merged = run.as_parties(run.submitted() if self.submit else run.unsubmitted())
        finally:
            self.report = StartReport(
                self.anchor,
                self.learned,
                tuple(run.reports.values()),
                run.skipped,
                run.data_free,
                run.messages,
                time.perf_counter() - started,
            )
        log(
            INFO,
            "MultiPartyStart: merged %d models with %d messages in %.2f s, %d nodes left out",
            len(run.reports),
            run.messages,
            self.report.seconds,
            len(run.skipped),
        )
        return to_record(merged)


@dataclass(frozen=True)
class _Joined:
    """Some of the parties' models in one frame: the weight of each, by node, and their mean."""

    weights: Mapping[int, float]
    mean: Params

    @property
    def weight(self) -> float:
        """The weight of all."""
        return sum(self.weights.values())

    @property
    def mover(self) -> int:
        """The node with most examples, which moves the mean of all; the first of equals."""
        return max(self.weights, key=lambda node: self.weights[node])

    def share_beside(self, other: "_Joined") -> float:
        """This group's share in the mean with another one."""
        return self.weight / (self.weight + other.weight)

    def with_moved(self, other: "_Joined", moved: Params) -> "_Joined":
        """This group and another one whose mean has been moved to this one's."""
        share = other.share_beside(self)
        # In a narrow type every join would round the mean of those before it anew.
        models = [widened(self.mean, torch.float64), moved]
        return _Joined({**self.weights, **other.weights}, weighted_mean(models, [1 - share, share]))


class _Run:
    """One run of a start: what goes over the wire, and what is remembered of it."""

    def __init__(self, start: MultiPartyStart, grid: Grid, timeout: float, config: ConfigRecord) -> None:
        self.start = start
        self.spec = start.spec
        self.grid = grid
        self.timeout = timeout
        self.config = config
        # Names, shapes and types of the parties' models, once known.
        self.like: Params | None = None
        self.reports: dict[int, ClientReport] = {}
        self.skipped: dict[int, str] = {}
        self.data_free: dict[int, str] = {}
        self.messages = 0

    # --- the two orders of events ------------------------------------------------------------------------------------

    def submitted(self) -> Params:
        """Collect every party's model, then bring all into one frame."""
        joined = self._collect()
        self._check_count(len(joined))
        reference = self.start.reference
        if self.start.learned != "own":
            weights = [party.weight for party in joined]
            models = [party.mean for party in joined]
            aligned = align_all(models, self.spec, self.start.anchor, weights, reference, options=self.start.options)
            for party, alignment in zip(joined, aligned, strict=True):
                self._note(party.weights, figures(alignment))
            near = [_Joined(party.weights, alignment.params) for party, alignment in zip(joined, aligned, strict=True)]
            return self._averaged(near)
        if self.start.anchor == "progressive":
            # What knows most is moved least: on label-skewed parties the one order of four never below the best party.
            joined.sort(key=lambda party: -party.weight)
        self._note(joined[0].weights, UNMOVED)
        while len(joined) > 1:
            ends = len(joined) - len(joined) % 2 if self.start.anchor == "tree" else 2
            pairs = list(zip(joined[:ends:2], joined[1:ends:2], strict=True))
            joined = [*self._join(pairs), *joined[ends:]]
        merged = joined[0].mean
        return merged if reference is None else self._nearest(merged, reference).params

    def unsubmitted(self) -> Params:
        """Send the mean so far to one party after another; each answers with its own model in that frame."""
        nodes = self._connected()
        joined, near = self._in_turn(nodes)
        while joined is not None and len(joined.weights) == 1 and self.start.reference is None:
            # It may be the first that is odd: its model alone was what the others were held against.
            misfits = [node for node in nodes if self.skipped.get(node, NO_REPLY) != NO_REPLY]
            if len(misfits) < 2:
                break
            self.skipped = {node: reason for node, reason in self.skipped.items() if node not in misfits}
            self._skip({joined.mover: "no other party's model could be joined with this one's, which came first"})
            self.reports.clear()
            joined, near = self._in_turn(nodes := misfits)
        self._check_count(len(joined.weights) if joined else 0)
        assert joined is not None
        return self._averaged(near) if near else joined.mean

    def _in_turn(self, nodes: Sequence[int]) -> tuple[_Joined | None, list[_Joined]]:
        """Join the nodes' models one after another: all of them, and each, where they are to be trained together."""
        joined: _Joined | None = None
        near: list[_Joined] = []
        forms: list[Params] = []
        self.like = self.start.reference
        for node in nodes:
            anchor, weight = (self.start.reference, 0.0) if joined is None else (joined.mean, joined.weight)
            moved, failed = self._step([self._instruction(node, anchor, weight)], self._read)
            self._skip(failed)
            if node not in moved:
                continue
            party, figured = moved[node]
            self._note((node,), figured)
            forms.append({name: torch.empty_like(tensor, device="meta") for name, tensor in party.mean.items()})
            self.like = _usual(forms, self.start.reference)
            joined = party if joined is None else joined.with_moved(party, party.mean)
            if self.start.learned == "together":
                near.append(party)
        return joined, [_Joined(party.weights, self.as_parties(party.mean)) for party in near]

    def _averaged(self, near: Sequence[_Joined]) -> Params:
        """The mean of models in one frame, after they have been trained to meet where that is asked for."""
        models = self._together(near) if self.start.learned == "together" else [party.mean for party in near]
        return weighted_mean(models, [party.weight for party in near])

    def _join(self, pairs: Sequence[tuple[_Joined, _Joined]]) -> list[_Joined]:
        """Move the second of each pair to the first, and average; the pairs' messages go out at once."""
        by_mover = {right.mover: (left, right) for left, right in pairs}

        def read(entry: Usable) -> Params:
            left, right = by_mover[entry.node_id]
            moved = Transform(self.spec, entry.params).apply(right.mean)
            # Scales could blow a model up, which then is all of the average; what brings it nearer to another cannot.
            if not _norm(moved) <= 3 * (_norm(left.mean) + _norm(right.mean)):
                raise RecordError(
                    "transform: expected one toward the anchor, found one that makes the model far larger"
                )
            return moved

        instructions = [
            self._instruction(
                node, left.mean, left.weight, right if len(right.weights) > 1 else None, keeps_source=True
            )
            for node, (left, right) in by_mover.items()
        ]
        moved, failed = self._step(instructions, read)
        met = []
        for node, (left, right) in by_mover.items():
            if node in moved:
                params, figured = moved[node][0].mean, moved[node][1]
            else:
                near = self._nearest(right.mean, left.mean)
                params, figured = near.params, figures(near)
                self._merge_data_free(node, failed[node])
            self._note(right.weights, figured)
            met.append(left.with_moved(right, params))
        return met

    # --- what goes over the wire -------------------------------------------------------------------------------------

    def _connected(self) -> list[int]:
        """The connected nodes, once there are enough of them or the timeout has passed."""
        deadline = time.monotonic() + self.timeout
        while len(nodes := sorted(self.grid.get_node_ids())) < self.start.min_available_nodes:
            if time.monotonic() > deadline:
                break
            log(INFO, "Waiting for nodes to connect: %d of %d.", len(nodes), self.start.min_available_nodes)
            time.sleep(min(1.0, self.timeout))
        return nodes

    def _config(self, **entries: Any) -> ConfigRecord:
        return ConfigRecord({**self.config, **entries})

    def _ask(self, messages: Sequence[Message], read: Reader | None) -> Received:
        self.messages += len(messages)
        replies = self.grid.send_and_receive(messages, timeout=self.timeout)
        return sort_replies(replies, messages, WEIGHT, read)

    def _collect(self) -> list[_Joined]:
        """The usable models that the parties hand in, folded, alike in names, shapes and types."""
        sent = [Message(RecordDict({"config": self._config()}), node, SUBMIT) for node in self._connected()]
        received = self._ask(sent, self._read)
        self._skip(received.refused)
        self.like = _usual([entry.params for entry in received.usable], self.start.reference)
        parties = []
        for entry in received.usable:
            try:
                parties.append(_Joined({entry.node_id: entry.weight}, self.as_parties(entry.params)))
            except RotfedError as error:
                self._skip({entry.node_id: str(error)})
        return parties

    def _read(self, entry: Usable) -> Params:
        """A party's own model, folded, in its own types."""
        if entry.weight < 1:
            raise RecordError(
                f"{WEIGHT}: expected at least one, found {entry.weight:g}; a model counts by its examples"
            )
        params: Params = match_params(entry.params, entry.params)
        if self.like is None:
            lay_out(params, self.spec, folded=False)
            params = folded(params, self.spec)
        else:
            lay_out(params, self.spec)
        # The common types have to hold it; in its own it makes a better mean.
        like = self.like or params
        match_params(params, like)
        return {name: params[name] for name in like}

    def as_parties(self, params: Params) -> Params:
        """Parameters in the names, order and types that most parties' models have."""
        return params if self.like is None else match_params(params, self.like)

    def _instruction(
        self,
        node: int,
        anchor: Params | None,
        anchor_weight: float,
        source: _Joined | None = None,
        keeps_source: bool = False,
    ) -> Message:
        """Ask a party to move a source, by default its own model, to an anchor."""
        options = write_options(self.start.options)
        config = self._config(
            **{"anchor-weight": float(anchor_weight), "keeps-source": keeps_source},
            refine=self.start.learned == "own",
            **options,
        )
        content = RecordDict({"config": config})
        if anchor is not None:
            content["anchor"] = to_record(self.as_parties(anchor))
        if source is not None:
            content["source"] = to_record(self.as_parties(source.mean))
            config["source-weight"] = float(source.weight)
        return Message(content, node, ALIGN)

    def _step(
        self, instructions: Sequence[Message], read: Reader
    ) -> tuple[dict[int, tuple[_Joined, dict[str, float]]], dict[int, str]]:
        """What the parties of a step moved, with its figures, and why others did not, by node."""

        def told(entry: Usable) -> dict[str, float]:
            return {key: read_weight(entry.reply, key) for key in FIGURES}

        def checked(entry: Usable) -> Params:
            told(entry)
            return read(entry)

        received = self._ask(instructions, checked)
        moved = {e.node_id: (_Joined({e.node_id: e.weight}, e.params), told(e)) for e in received.usable}
        return moved, dict(received.refused)

    def _together(self, near: Sequence[_Joined]) -> list[Params]:
        """The models of all parties, moved from the frame that they are near in by an alignment that all train."""
        models, weights = [party.mean for party in near], [party.weight for party in near]
        if len(models) == 1:
            return models
        records = {model_key(number): to_record(model) for number, model in enumerate(models)}
        config = self._config(weights=weights)
        sent = [Message(RecordDict({"config": config, **records}), party.mover, KEEP) for party in near]
        received = self._ask(sent, None)
        alignment = LearnedAlignment(models, self.spec, weights=weights)
        training = _Descent(alignment.parameters, [entry.node_id for entry in received.usable])
        if training.nodes:
            initial, config = to_record(alignment.parameters), self._config(rounds=self.start.rounds)
            learned = training.start(self.grid, initial, self.start.rounds, self.timeout, config).arrays
            self.messages += training.messages
            if learned:
                alignment.load(to_state_dict(learned))
                moved = zip(alignment.transforms(), models[1:], strict=True)
                models = [models[0], *(transform.apply(model) for transform, model in moved)]
        for node, reason in sorted({**received.refused, **training.unheard}.items()):
            self._merge_data_free(node, reason)
        return models

    # --- what is remembered ------------------------------------------------------------------------------------------

    def _nearest(self, source: Params, anchor: Params) -> Alignment:
        return align(source, anchor, self.spec, self.start.options)

    def _note(self, members: Iterable[int], figured: Mapping[str, float]) -> None:
        for node in members:
            self.reports[node] = ClientReport(node, *(figured[key] for key in FIGURES))

    def _skip(self, refused: Mapping[int, str]) -> None:
        for node, reason in refused.items():
            log(WARNING, "MultiPartyStart: node %d skipped: %s", node, reason)
            self.skipped[node] = reason

    def _merge_data_free(self, node: int, reason: str) -> None:
        log(WARNING, "MultiPartyStart: node %d merged without its data: %s", node, reason)
        self.data_free[node] = reason

    def _check_count(self, found: int) -> None:
        if found < self.start.min_parties:
            # An exception in a client comes with its traceback.
            last = {node: (reason.strip().splitlines() or [""])[-1] for node, reason in self.skipped.items()}
            why = "".join(f"; node {node}: {reason}" for node, reason in last.items())
            raise AlignmentError(
                f"parties: expected at least {self.start.min_parties} usable models, found {found}{why}"
            )


class _Descent(FedAvg):
    """FedAvg over the parameters of one alignment, in messages of its own type to the same nodes each round."""

    def __init__(self, parameters: Mapping[str, Tensor], nodes: Sequence[int]) -> None:
        super().__init__(fraction_evaluate=0.0, weighted_by_key=WEIGHT)
        self.parameters = parameters
        self.nodes = nodes
        # Why a node has had no part yet.
        self.unheard = dict.fromkeys(nodes, NO_REPLY)
        self.sent: list[Message] = []
        self.messages = 0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the parameters to every party that keeps the models, whoever else is connected."""
        content = RecordDict({"arrays": arrays, "config": ConfigRecord({**config, "server-round": server_round})})
        self.sent = [Message(content, node, DESCEND) for node in self.nodes]
        self.messages += len(self.sent)
        return self.sent

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the usable parameters."""
        received = sort_replies(replies, self.sent, WEIGHT, self._read)
        for node, reason in received.refused.items():
            log(WARNING, "MultiPartyStart: node %d left out of round %d: %s", node, server_round, reason)
            if node in self.unheard:
                self.unheard[node] = reason
        for entry in received.usable:
            entry.reply.content[record_key(entry.reply)] = to_record(entry.params)
            self.unheard.pop(entry.node_id, None)
        averaged: tuple[ArrayRecord | None, MetricRecord | None] = super().aggregate_train(
            server_round, received.messages
        )
        return averaged

    def _read(self, entry: Usable) -> Params:
        params = match_params(entry.params, self.parameters)
        for name, tensor in params.items():
            if (largest := float(tensor.abs().max())) > _FARTHEST:
                raise RecordError(
                    f"{name}: expected parameters of an alignment up to {_FARTHEST:g}, found {largest:.3g}; "
                    "lower the learning rate"
                )
        return params


def _usual(models: Sequence[Params], reference: Params | None) -> Params:
    """What the parties' models are like: the names and shapes of the reference or of most, in the types of most.

    Raises AlignmentError where as many are of one kind as of another.
    """
    kinds = [_kind(params) for params in models]
    (usual, count), *others = Counter(kinds).most_common() or [(_kind({}), 0)]
    if reference is not None:
        usual = _kind(reference)
    elif others and others[0][1] == count:
        raise AlignmentError(
            f"parties: expected most models alike in names and shapes, found {count} of one kind and as many of "
            "another; pass a reference of the kind that is meant"
        )
    alike = [params for params, kind in zip(models, kinds, strict=True) if kind == usual]
    types = {name: Counter(params[name].dtype for params in alike).most_common(1)[0][0] for name, *_ in usual if alike}
    like = reference or (alike[0] if alike else {})
    return {name: torch.empty_like(t, dtype=types.get(name, t.dtype), device="meta") for name, t in like.items()}


def _kind(params: Params) -> frozenset[tuple[str, torch.Size, bool]]:
    return frozenset((name, tensor.shape, tensor.is_floating_point()) for name, tensor in params.items())


def _norm(params: Params) -> float:
    """The Euclidean norm over all floating-point parameters."""
    return math.sqrt(sum(float(to_work(t).square().sum()) for t in params.values() if t.is_floating_point()))
