"""One start out of several parties' own models: over Flower's messages on an in-process Grid."""

import dataclasses
import logging
import random
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import Tensor

import rotfed
from rotfed.align import AlignOptions
from rotfed.checks import example_inputs
from rotfed.errors import AlignmentError
from rotfed.flower import AlignedStrategy, MultiPartyStart, register_party, to_record, to_state_dict
from rotfed.flower.party import ALIGN, DESCEND, KEEP, SUBMIT, Descent
from rotfed.frames import AlignPair
from rotfed.learned import refine
from rotfed.residual import fold_norms
from simulations.grid import InProcessGrid
from tests.models import EXAMPLES, assert_recovers, change_of_function, distance, norm

Params = Mapping[str, Tensor]

MODEL = EXAMPLES["vit"].model("AutoModelForImageClassification")
SPEC = rotfed.load_spec(MODEL)
RESIDUAL = rotfed.load_spec(MODEL, residual=True)
THETA = {name: tensor.clone() for name, tensor in MODEL.state_dict().items()}
FOLDED = fold_norms(THETA, RESIDUAL)
PIXELS = example_inputs(MODEL, torch.Generator().manual_seed(0))
BIAS = "classifier.bias"
SCALES = rotfed.random_transform(SPEC).elements["vo_scale"].shape


def turned(partition: int, spec: rotfed.SymmetrySpec = SPEC) -> dict[str, Tensor]:
    """The same function in a frame of this party's own."""
    frame = rotfed.random_transform(spec, torch.Generator().manual_seed(partition))
    return frame.apply(FOLDED if spec.residual else THETA)


def own(partition: int) -> dict[str, Tensor]:
    """A model of this party's own, from an initialisation of its own."""
    return dict(EXAMPLES["vit"].model("AutoModelForImageClassification", seed=partition + 1).state_dict())


Answer = Callable[[str, int, RecordDict], RecordDict] | None


class Grid(InProcessGrid):
    """Records what is sent and received, loses some nodes' replies to some messages, and puts others in their place."""

    def __init__(self, app: ClientApp, nodes: int, lost: Iterable[tuple[int, str]] = (), answer: Answer = None) -> None:
        super().__init__(app, nodes)
        self.lost = set(lost)
        self.answer = answer or (lambda action, node, content: content)
        self.sent: list[Message] = []
        self.received: list[Message] = []
        self.batches: list[list[tuple[str, int]]] = []

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        sent = list(messages)
        addressed = [(m.metadata.message_type.split("_")[-1], m.metadata.dst_node_id) for m in sent]
        self.sent += sent
        self.batches += [addressed] if sent else []
        replies = [
            reply
            for (action, node), reply in zip(addressed, super().send_and_receive(sent), strict=True)
            if (node, action) not in self.lost
        ]
        # What is read is taken out of the replies, so keep the models as they came.
        self.received += [
            Message(RecordDict(dict(reply.content.items())), reply_to=instruction)
            for instruction in sent
            for reply in replies
            if not reply.has_error() and reply.metadata.reply_to_message_id == instruction.metadata.message_id
        ]
        for message in self.received:
            for key, record in message.content.array_records.items():
                message.content[key] = ArrayRecord(dict(record))
        return [
            reply if reply.has_error() else Message(self.answer(*addressed[sent.index(to)], reply.content), reply_to=to)
            for reply in replies
            for to in sent
            if reply.metadata.reply_to_message_id == to.metadata.message_id
        ]


def parties(
    model: Callable[[int], Params],
    examples: Callable[[int], int] = lambda partition: 10,
    refine: Callable[[Context], AlignPair] | None = None,
    descend: Callable[[Context, int], Descent] | None = None,
    spec: rotfed.SymmetrySpec = SPEC,
) -> ClientApp:
    app = ClientApp()

    def party_model(context: Context) -> tuple[Params, int]:
        partition = int(context.node_config["partition-id"])
        return model(partition), examples(partition)

    register_party(app, party_model, lambda context: spec, refine, descend)
    return app


def by_weights(context: Context) -> AlignPair:
    """What stands in for a learned alignment where only the messages matter."""
    return lambda source, anchor, share: rotfed.align(source, anchor, SPEC)


def change(arrays: ArrayRecord, expected: Params = THETA) -> float:
    return change_of_function(MODEL, expected, to_state_dict(arrays), PIXELS)


QUICK = AlignOptions(["qk", "d_ff"], [0], max_sweeps=1)
UNMOVED = AlignOptions([])


def quickly(context: Context) -> AlignPair:
    return lambda source, anchor, share: rotfed.align(source, anchor, SPEC, options=QUICK)


MODES: dict[str, dict[str, Any]] = {
    **{anchor: {"anchor": anchor} for anchor in ("progressive", "tree", "medoid", "consensus")},
    "progressive, own": {"anchor": "progressive", "learned": "own"},
    "tree, own": {"anchor": "tree", "learned": "own"},
    "unsubmitted": {"submit": False},
    "unsubmitted, own": {"submit": False, "learned": "own"},
}
every_mode = pytest.mark.parametrize("mode", MODES)


@every_mode
def test_one_model_in_frames_of_the_parties_own_comes_back(mode: str) -> None:
    count = 5 if mode.startswith("tree") else 3
    start = MultiPartyStart(SPEC, **MODES[mode])
    arrays = start.run(Grid(parties(turned, refine=by_weights), count))
    assert change(arrays) < 1e-5
    assert list(arrays) == list(THETA)
    report = start.report
    assert report is not None and not report.skipped and not report.data_free
    assert sorted(party.node_id for party in report.parties) == [101 + p for p in range(count)]
    assert sum(party.distance_before > 1.0 for party in report.parties) >= count - 1
    assert all(party.distance_after < 1e-3 for party in report.parties)
    if start.anchor in ("progressive", "tree"):
        assert (report.parties[0].distance_before, report.parties[0].identity_permutations) == (0.0, 1.0)
    assert report.to_dict()["messages"] == report.messages > 0


@pytest.mark.parametrize("mode", ["medoid", "tree, own", "unsubmitted"])
def test_with_the_residual_stream_models_are_folded_on_either_side(mode: str) -> None:
    def refine(context: Context) -> AlignPair:
        return lambda source, anchor, share: rotfed.align(source, anchor, RESIDUAL)

    app = parties(lambda p: THETA if p == 1 else turned(p, RESIDUAL), refine=refine, spec=RESIDUAL)
    start = MultiPartyStart(RESIDUAL, **MODES[mode])
    arrays = start.run(Grid(app, 3))
    assert start.report is not None and not start.report.skipped and not start.report.data_free
    assert change(arrays) < 1e-5
    assert_recovers(to_state_dict(arrays), fold_norms(to_state_dict(arrays), RESIDUAL))


@every_mode
def test_the_wire_gives_what_the_library_gives_with_the_parties_weights(mode: str) -> None:
    weights = [1, 4, 2]
    start = MultiPartyStart(SPEC, **MODES[mode], options=QUICK)
    found = to_state_dict(start.run(Grid(parties(own, lambda p: weights[p], quickly), 3)))
    in_turn = start.submit and start.learned == "own" and start.anchor == "progressive"
    order = [1, 2, 0] if in_turn else [0, 1, 2]
    models = [own(p) for p in order]
    expected = rotfed.merge(models, SPEC, [weights[p] for p in order], anchor=start.anchor, options=QUICK)
    assert_recovers(found, expected, 1e-4)
    equal = rotfed.merge(models, SPEC, anchor=start.anchor, options=QUICK)
    assert distance(found, equal) > 0.05 * norm(equal)


def test_a_party_is_asked_once_and_every_step_is_one_message() -> None:
    def batches(count: int, **options: Any) -> list[list[tuple[str, int]]]:
        # The fourth party has the most examples, the last the fewest.
        grid = Grid(parties(turned, lambda p: [2, 3, 4, 9, 1][p], quickly), count)
        start = MultiPartyStart(SPEC, **options, options=QUICK)
        start.run(grid)
        assert start.report is not None and start.report.messages == sum(map(len, grid.batches))
        return grid.batches

    asked = [("submit", 101 + p) for p in range(5)]
    for anchor in ("progressive", "tree", "medoid", "consensus"):
        assert batches(5, anchor=anchor) == [asked]
    steps = [[("align", 101 + p)] for p in range(5)]
    # From the party with most examples to the one with fewest.
    assert batches(5, learned="own") == [asked, *(steps[p] for p in (2, 1, 0, 4))]
    assert batches(5, submit=False) == batches(5, submit=False, learned="own") == steps
    # In a tree the pairs of a level go out at once; a group is moved by the party with most examples in it.
    assert batches(5, anchor="tree", learned="own") == [
        asked,
        [("align", 102), ("align", 104)],
        [("align", 104)],
        [("align", 105)],
    ]


def test_a_group_is_moved_as_a_whole_and_a_party_moves_its_own_model() -> None:
    shares: list[float] = []

    def refine(context: Context) -> AlignPair:
        def step(source: Params, anchor: Params, share: float) -> rotfed.Alignment:
            shares.append(share)
            return rotfed.align(source, anchor, SPEC)

        return step

    grid = Grid(parties(turned, lambda p: p + 1, refine), 4)
    MultiPartyStart(SPEC, anchor="tree", learned="own").run(grid)
    sources = [sorted(m.content.array_records) for m in grid.sent if m.metadata.message_type == ALIGN]
    assert sources == [["anchor"], ["anchor"], ["anchor", "source"]]
    assert shares == pytest.approx([2 / 3, 4 / 7, 7 / 10])


@pytest.mark.parametrize("reference", [None, own(7)])
@pytest.mark.parametrize("learned", [None, "own"])
def test_without_submission_no_model_leaves_but_in_the_frame_of_the_mean(
    learned: str | None, reference: Params | None
) -> None:
    start = MultiPartyStart(SPEC, submit=False, learned=learned, reference=reference)
    grid = Grid(parties(own, refine=by_weights), 4)
    start.run(grid)
    assert {m.metadata.message_type for m in grid.sent} == {ALIGN}
    left = [(m, to_state_dict(m.content.array_records["arrays"])) for m in grid.received]
    came = [to_state_dict(m.content.array_records["anchor"]) for m in grid.sent if m.content.array_records]
    first = 0 if reference is not None else 1
    assert len(left) == 4 and len(came) == 4 - first
    for partition in range(first, 4):
        kept = own(partition)
        for sent in (*came, *(params for _, params in left)):
            assert distance(sent, kept) > 0.1 * norm(kept)
        anchor, aligned = came[partition - first], left[partition][1]
        nearest = rotfed.align(kept, anchor, SPEC)
        assert distance(aligned, anchor) == pytest.approx(nearest.distance_after, rel=1e-4)
        assert change(to_record(aligned), kept) < 1e-4


@pytest.mark.parametrize("mode", ["medoid", "progressive", "tree, own", "unsubmitted"])
def test_the_result_is_in_the_frame_of_the_reference(mode: str) -> None:
    start = MultiPartyStart(SPEC, **MODES[mode], reference=THETA)
    assert_recovers(to_state_dict(start.run(Grid(parties(turned, refine=by_weights), 3))), THETA)


BAD_MODELS: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "nan": ({BIAS: THETA[BIAS] * torch.nan}, "classifier.bias: expected finite values"),
    "infinite": ({"vit.layernorm.weight": THETA["vit.layernorm.weight"] / 0}, "vit.layernorm.weight: expected finite"),
    "misshapen": ({BIAS: torch.ones(1)}, r"classifier\.bias: expected|came first"),
    "complex": ({BIAS: THETA[BIAS].to(torch.complex64)}, "classifier.bias: expected .* found torch.complex64"),
    "float8": ({BIAS: THETA[BIAS].to(torch.float8_e4m3fn)}, "classifier.bias: expected .* found torch.float8"),
    "missing": ({"vit.layernorm.weight": None}, r"vit\.layernorm\.weight: expected"),
    "unknown": ({"extra": torch.ones(1)}, "extra: (expected none|not a parameter)|came first"),
    "other classes": (
        {"classifier.weight": torch.ones(5, 12), BIAS: torch.ones(5)},
        r"classifier\.\w+: expected .*, found .*\(5,|came first",
    ),
}


@pytest.mark.parametrize("mode", ["medoid", "unsubmitted"])
@pytest.mark.parametrize("bad", BAD_MODELS)
def test_a_party_whose_model_cannot_be_used_is_skipped_and_named(
    bad: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    changes, reason = BAD_MODELS[bad]

    def model(partition: int) -> Params:
        spoiled = {**turned(partition), **changes} if partition == 0 else turned(partition)
        return {name: tensor for name, tensor in spoiled.items() if tensor is not None}

    start = MultiPartyStart(SPEC, **MODES[mode])
    flower = logging.getLogger("flwr")
    flower.addHandler(caplog.handler)
    try:
        arrays = start.run(Grid(parties(model, refine=by_weights), 3))
    finally:
        flower.removeHandler(caplog.handler)
    assert change(arrays) < 1e-5
    assert start.report is not None and list(start.report.skipped) == [101]
    assert re.search(reason, start.report.skipped[101])
    assert f"node 101 skipped: {start.report.skipped[101]}" in caplog.text
    assert [party.node_id for party in start.report.parties] == [102, 103]


def with_entries(key: str, **entries: Any) -> Callable[[RecordDict], RecordDict]:
    """A reply with other entries in one of its records."""

    def changed(content: RecordDict) -> RecordDict:
        record: Any = content[key]
        return RecordDict(
            {**content, key: type(record)({**record, **{k.replace("_", "-"): e for k, e in entries.items()}})}
        )

    return changed


def only_to(action: str, nodes: Iterable[int], change: Callable[[RecordDict], RecordDict]) -> Answer:
    return lambda asked, node, content: change(content) if asked == action and node in nodes else content


def each(change: Callable[[Tensor], Tensor]) -> Callable[[RecordDict], RecordDict]:
    """A reply with other values in its arrays."""

    def changed(content: RecordDict) -> RecordDict:
        arrays = to_state_dict(content.array_records["arrays"])
        return RecordDict({**content, "arrays": to_record({name: change(t) for name, t in arrays.items()})})

    return changed


@pytest.mark.parametrize(
    "lie",
    [
        each(torch.zeros_like),
        each(lambda t: t * 1e30),
        each(lambda t: t * 1e8 if t.shape == SCALES else t),
        lambda content: RecordDict({**content, "arrays": to_record(own(1))}),
    ],
    ids=["zeros", "scaled", "blown up", "another model"],
)
def test_who_moves_what_others_handed_in_cannot_replace_it(lie: Callable[[RecordDict], RecordDict]) -> None:
    start = MultiPartyStart(SPEC, anchor="tree", learned="own")
    grid = Grid(parties(turned, lambda p: p + 1, by_weights), 4, answer=only_to("align", [104], lie))
    assert change(start.run(grid)) < 1e-5
    assert start.report is not None and list(start.report.data_free) == [104] and not start.report.skipped


@pytest.mark.parametrize("mode", ["medoid", "unsubmitted"])
@pytest.mark.parametrize("examples", [1e308, 1e-30, float("inf"), 10**400], ids=lambda count: str(count)[:5])
def test_a_count_that_no_data_have_is_refused_by_node(mode: str, examples: float) -> None:
    start = MultiPartyStart(SPEC, **MODES[mode], options=UNMOVED)
    lie = only_to("align" if not start.submit else "submit", [101, 103], with_entries("metrics", num_examples=examples))
    assert change(start.run(Grid(parties(lambda p: THETA), 4, answer=lie))) < 1e-5
    assert start.report is not None and list(start.report.skipped) == [101, 103]
    assert all("num-examples: expected" in reason for reason in start.report.skipped.values())


def test_the_types_are_those_of_most_parties() -> None:
    app = parties(lambda p: {n: t.bfloat16() if p == 0 else t for n, t in turned(p).items()})
    for mode in ("medoid", "unsubmitted"):
        arrays = MultiPartyStart(SPEC, **MODES[mode]).run(Grid(app, 3))
        assert {t.dtype for t in to_state_dict(arrays).values()} == {torch.float32}
        assert change(arrays) < 0.02


@pytest.mark.parametrize("mode", ["progressive, own", "unsubmitted"])
def test_the_mean_is_rounded_once_however_many_join(mode: str) -> None:
    def narrow(partition: int) -> Params:
        return {n: t.bfloat16() for n, t in own(partition % 4).items()}

    as_it_is = lambda context: lambda source, anchor, share: rotfed.align(source, anchor, SPEC, options=UNMOVED)  # noqa: E731
    start = MultiPartyStart(SPEC, **MODES[mode], options=UNMOVED)
    found = to_state_dict(start.run(InProcessGrid(parties(narrow, refine=as_it_is), 16)))
    exact = rotfed.weighted_mean([{n: t.double() for n, t in narrow(p).items()} for p in range(4)])
    assert distance(found, exact) < 2e-3 * norm(exact)


def test_a_model_that_overflows_when_folded_is_refused() -> None:
    large = {n: t * 1e30 if n.endswith(("layernorm_before.weight", "q_proj.weight")) else t for n, t in THETA.items()}
    lie = only_to("align", [101], lambda content: RecordDict({**content, "arrays": to_record(large)}))
    start = MultiPartyStart(RESIDUAL, submit=False, min_parties=1)
    app = parties(lambda p: turned(p, RESIDUAL), spec=RESIDUAL)
    assert change(start.run(Grid(app, 3, answer=lie))) < 1e-5
    assert start.report is not None and list(start.report.skipped) == [101]


def test_of_two_kinds_of_models_as_many_neither_is_chosen() -> None:
    other = {**THETA, "classifier.weight": torch.ones(5, 12), BIAS: torch.ones(5)}
    with pytest.raises(AlignmentError, match="found 1 of one kind and as many of another; pass a reference"):
        MultiPartyStart(SPEC, min_parties=1).run(Grid(parties(lambda p: THETA if p else other), 2))
    start = MultiPartyStart(SPEC, min_parties=1, reference=THETA)
    assert change(start.run(Grid(parties(lambda p: THETA if p else other), 2))) < 1e-5


@pytest.mark.parametrize("mode", ["medoid", "tree, own", "unsubmitted"])
@pytest.mark.parametrize("lost", [101, 103])
def test_a_lost_party_is_skipped_and_named(mode: str, lost: int) -> None:
    start = MultiPartyStart(SPEC, **MODES[mode])
    grid = Grid(parties(turned, refine=by_weights), 4, [(lost, "align" if not start.submit else "submit")])
    assert change(start.run(grid)) < 1e-5
    assert start.report is not None and start.report.skipped == {lost: "no reply before the timeout"}


@pytest.mark.parametrize("examples", [0, -1])
@pytest.mark.parametrize("mode", ["medoid", "unsubmitted"])
def test_a_party_without_weight_is_skipped_and_named(mode: str, examples: int) -> None:
    start = MultiPartyStart(SPEC, **MODES[mode])
    arrays = start.run(Grid(parties(turned, lambda p: examples if p == 0 else 3), 3))
    assert change(arrays) < 1e-5
    assert start.report is not None and list(start.report.skipped) == [101]
    assert "num-examples" in start.report.skipped[101]


@pytest.mark.parametrize("anchor", ["progressive", "tree"])
def test_a_party_that_fails_in_its_step_is_merged_by_its_weights(anchor: str) -> None:
    def refine(context: Context) -> AlignPair:
        if context.node_config["partition-id"] == 1:
            raise RuntimeError("out of memory")
        if context.node_config["partition-id"] == 3:
            return lambda source, anchor, share: dataclasses.replace(
                rotfed.align(source, anchor, SPEC), distance_after=float("nan")
            )
        return by_weights(context)

    start = MultiPartyStart(SPEC, anchor=anchor, learned="own")
    assert change(start.run(Grid(parties(turned, refine=refine), 4))) < 1e-5
    report = start.report
    assert report is not None and not report.skipped and set(report.data_free) == {102, 104}
    assert "out of memory" in report.data_free[102] and "nan" in report.data_free[104]
    assert len(report.parties) == 4


def test_a_server_that_asks_for_what_a_party_does_not_offer_is_told() -> None:
    start = MultiPartyStart(SPEC, learned="own")
    start.run(Grid(parties(turned), 2))
    assert start.report is not None
    assert "pass refine to register_party" in start.report.data_free[102]


@pytest.mark.parametrize("mode", ["medoid", "progressive, own", "unsubmitted"])
def test_too_few_parties_are_an_error_that_names_who_was_left_out(mode: str) -> None:
    start = MultiPartyStart(SPEC, **MODES[mode], min_parties=3)
    lost = [(102, "submit"), (102, "align")]
    with pytest.raises(
        AlignmentError, match="at least 3 usable models, found 2; node 102: no reply before the timeout"
    ):
        start.run(Grid(parties(turned, refine=by_weights), 3, lost))
    assert start.report is not None and list(start.report.skipped) == [102]
    with pytest.raises(AlignmentError, match="found 1"):
        MultiPartyStart(SPEC, **MODES[mode]).run(Grid(parties(turned), 1), timeout=0.01)


@pytest.mark.parametrize("mode", ["medoid", "tree, own", "unsubmitted"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_types_and_buffers_come_back(mode: str, dtype: torch.dtype) -> None:
    app = parties(lambda p: {n: t.to(dtype) for n, t in turned(p).items()}, lambda p: [10, 23, 35, 71][p], by_weights)
    found = to_state_dict(MultiPartyStart(SPEC, **MODES[mode]).run(Grid(app, 4)))
    assert {name: tensor.dtype for name, tensor in found.items()} == dict.fromkeys(THETA, dtype)
    assert change(to_record({n: t.float() for n, t in found.items()})) < (0.1 if dtype == torch.bfloat16 else 1e-5)


def test_generalized_procrustes_is_the_consensus() -> None:
    assert MultiPartyStart(SPEC, anchor="generalized_procrustes").anchor == "consensus"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"anchor": "global"}, "anchor: expected one of progressive, tree, medoid, consensus, found 'global'"),
        (
            {"anchor": "medoid", "learned": "own"},
            "anchor: expected one of progressive, tree where each party learns in turn",
        ),
        ({"anchor": "tree", "submit": False}, "anchor: expected 'progressive' where no model is submitted"),
        ({"learned": "both"}, "learned: expected None or one of own, together, found 'both'"),
        ({"rounds": 0}, "rounds: expected a whole number"),
        ({"min_parties": 0}, "min_parties: expected a whole number"),
        ({"min_parties": "2"}, "min_parties: expected a whole number"),
        ({"min_available_nodes": None}, "min_available_nodes: expected a whole number"),
        ({"reference": {BIAS: THETA[BIAS]}}, "does not fit"),
        ({"reference": {**THETA, BIAS: THETA[BIAS] * torch.nan}}, "classifier.bias: expected finite values"),
        ({"reference": MODEL}, "parameters: expected a mapping"),
        ({"options": {"strength": 0.5}}, "options: expected AlignOptions, found dict"),
        ({"options": AlignOptions(["nope"])}, "nope"),
        ({"spec": None}, "spec: expected a SymmetrySpec"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_sent(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(rotfed.RotfedError, match=error):
        MultiPartyStart(**{"spec": SPEC, **arguments})


def test_a_bad_config_or_spec_is_refused_before_anybody_is_asked() -> None:
    grid = Grid(parties(turned), 2)
    bad: Any = {"lr": {"head": 0.1}}
    with pytest.raises(AlignmentError, match="config: expected entries"):
        MultiPartyStart(SPEC).run(grid, config=bad)
    assert not grid.sent
    bad = "vit"
    with pytest.raises(rotfed.SpecError, match="spec: expected a SymmetrySpec"):
        register_party(ClientApp(), lambda context: (THETA, 1), bad)


def test_ordinary_rounds_go_on_from_the_start() -> None:
    labels = torch.tensor([0, 1])
    app = parties(own)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = EXAMPLES["vit"].model("AutoModelForImageClassification")
        model.load_state_dict(to_state_dict(message.content.array_records["arrays"]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(**PIXELS, labels=labels).loss
            loss.backward()
            optimizer.step()
        content = {"arrays": to_record(model.state_dict()), "metrics": MetricRecord({"num-examples": 2})}
        return Message(RecordDict(content), reply_to=message)

    def loss(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        with torch.no_grad():
            output = torch.func.functional_call(MODEL, to_state_dict(arrays), kwargs={**PIXELS, "labels": labels})
        return MetricRecord({"loss": float(output.loss)})

    grid = Grid(app, 3)
    arrays = MultiPartyStart(SPEC).run(grid)
    for strategy in (
        FedAvg(fraction_evaluate=0.0),
        AlignedStrategy(FedAvg(fraction_evaluate=0.0), rotfed.load_spec(MODEL)),
    ):
        result = strategy.start(grid, arrays, num_rounds=2, evaluate_fn=loss)
        losses = [float(result.evaluate_metrics_serverapp[r]["loss"]) for r in range(3)]  # type: ignore[arg-type]
        assert losses[0] > losses[1] > losses[2]
    assert [m.metadata.message_type for m in grid.sent].count(SUBMIT) == 3


# --- on the parties' data --------------------------------------------------------------------------------------------


def loss_on(partition: int, params: Params) -> Tensor:
    """The loss on a party's own examples, of which each has another label."""
    pixels = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(partition))
    labels = torch.full((4,), partition % 2)
    output = torch.func.functional_call(MODEL, dict(params), kwargs={"pixel_values": pixels, "labels": labels})
    return output.loss


def descend(context: Context, server_round: int) -> Descent:
    partition = int(context.node_config["partition-id"])
    return lambda alignment: alignment.train(
        lambda params, batch: loss_on(partition, params), [{}], learning_rate=0.05, max_steps=3, decay=False
    )


def refine_on_own(context: Context) -> AlignPair:
    partition = int(context.node_config["partition-id"])
    return lambda source, anchor, share: (
        (
            refine(source, anchor, SPEC, lambda params, batch: loss_on(partition, params), [{}], share=share, steps=10)
        ).alignment
    )


@pytest.mark.parametrize("submit", [True, False])
def test_a_step_on_a_partys_own_data_lowers_its_loss_and_keeps_its_model(submit: bool) -> None:
    start = MultiPartyStart(SPEC, learned="own", submit=submit)
    merged = to_state_dict(start.run(Grid(parties(own, refine=refine_on_own), 2)))
    assert start.report is not None and not start.report.data_free
    assert_second_half_computes_the_same(merged)
    by_weights = rotfed.merge([own(0), own(1)], SPEC, anchor="progressive")
    assert float(loss_on(1, merged)) < float(loss_on(1, by_weights)) - 0.01


def assert_second_half_computes_the_same(merged: Params) -> None:
    """Half of the merged model is the first party's: the other half is the second's, moved."""
    moved = {name: 2 * merged[name].double() - tensor.double() for name, tensor in own(0).items()}
    assert change(to_record({name: tensor.float() for name, tensor in moved.items()}), own(1)) < 1e-3


@pytest.mark.parametrize("submit", [True, False])
def test_together_only_the_parameters_travel_and_the_models_stay_what_they_are(submit: bool) -> None:
    start = MultiPartyStart(SPEC, learned="together", submit=submit, rounds=3)
    grid = Grid(parties(own, descend=descend), 2)
    merged = to_state_dict(start.run(grid))
    first = [("submit", 101), ("submit", 102)]
    trained = [[("keep", 101), ("keep", 102)], *([[("descend", 101), ("descend", 102)]] * 3)]
    batches = [sorted(batch) for batch in grid.batches]
    assert batches == [*([first] if submit else [[("align", 101)], [("align", 102)]]), *trained]
    assert start.report is not None and start.report.messages == sum(map(len, batches))
    for message in (*grid.sent, *grid.received):
        if message.metadata.message_type == DESCEND:
            assert set(message.content.array_records["arrays"]) == {"qk", "vo"}
    assert_second_half_computes_the_same(merged)
    by_weights = rotfed.merge([own(0), own(1)], SPEC, anchor="progressive")
    with torch.no_grad():
        before, after = (sum(float(loss_on(p, params)) for p in range(2)) for params in (by_weights, merged))
    assert after < before - 0.01
    assert all(not context.state for context in grid.contexts.values())


def test_together_the_parties_weights_count() -> None:
    grid = Grid(parties(own, lambda p: [1, 3][p], descend=descend), 2)
    MultiPartyStart(SPEC, learned="together", rounds=2).run(grid)
    sent = [m for m in grid.sent if m.metadata.message_type == DESCEND]
    replies = [m for m in grid.received if m.metadata.message_type == DESCEND]
    kept = [m.content.config_records["config"]["weights"] for m in grid.sent if m.metadata.message_type == KEEP]
    assert kept == [[1.0, 3.0]] * 2
    mine = {m.metadata.src_node_id: to_state_dict(m.content.array_records["arrays"]) for m in replies[:2]}
    expected = rotfed.weighted_mean([mine[101], mine[102]], [1, 3])
    assert_recovers(to_state_dict(sent[-1].content.array_records["arrays"]), expected)


def test_together_a_party_that_is_out_is_not_asked_again() -> None:
    grid = Grid(parties(own, descend=descend), 4, [(101, "submit"), (103, "keep")])
    start = MultiPartyStart(SPEC, learned="together", rounds=2)
    start.run(grid)
    assert start.report is not None and list(start.report.skipped) == [101]
    assert start.report.data_free == {103: "no reply before the timeout"}
    assert [sorted(node for _, node in batch) for batch in grid.batches] == [
        [101, 102, 103, 104],
        [102, 103, 104],
        *[[102, 104]] * 2,
    ]


def test_together_a_party_that_fails_is_left_out_and_none_left_means_by_weights() -> None:
    def failing(*partitions: int) -> Callable[[Context, int], Descent]:
        def some(context: Context, server_round: int) -> Descent:
            if context.node_config["partition-id"] in partitions:
                raise RuntimeError("out of memory")
            return descend(context, server_round)

        return some

    start = MultiPartyStart(SPEC, anchor="tree", learned="together", rounds=1)
    start.run(Grid(parties(turned, descend=failing(1)), 3))
    assert start.report is not None and list(start.report.data_free) == [102]
    assert "out of memory" in start.report.data_free[102]
    assert len(start.report.parties) == 3
    start = MultiPartyStart(SPEC, anchor="tree", learned="together", rounds=1)
    assert change(start.run(Grid(parties(turned, descend=failing(0, 1, 2)), 3))) < 1e-5
    assert start.report is not None and list(start.report.data_free) == [101, 102, 103]
    start.run(Grid(parties(turned), 2))
    assert list(start.report.data_free) == [101, 102]


def other_name(content: RecordDict) -> RecordDict:
    return RecordDict({"mine" if key == "arrays" else key: record for key, record in content.items()})


@pytest.mark.parametrize(
    ("action", "lie", "reason"),
    [
        ("descend", each(lambda t: torch.full_like(t, 1e6)), "up to 1000, found 1e.06"),
        ("descend", each(lambda t: torch.full_like(t, 1e30)), "up to 1000, found 1e.30"),
        ("descend", other_name, "the names differ"),
        ("descend", with_entries("metrics", losses=[1.0]), "the names differ"),
        ("descend", with_entries("metrics", num_examples=1e308), "num-examples: expected"),
        ("keep", with_entries("metrics", num_examples=1e308), "num-examples: expected"),
    ],
)
def test_together_one_liar_is_left_out_and_named(
    action: str, lie: Callable[[RecordDict], RecordDict], reason: str
) -> None:
    def still(context: Context, server_round: int) -> Descent:
        return lambda alignment: None

    start = MultiPartyStart(SPEC, learned="together", rounds=1, options=UNMOVED)
    arrays = start.run(Grid(parties(turned, descend=still), 3, answer=only_to(action, [102], lie)))
    assert start.report is not None and list(start.report.data_free) == [102]
    assert re.search(reason, start.report.data_free[102])
    assert_recovers(to_state_dict(arrays), rotfed.weighted_mean([turned(p) for p in range(3)]))


class Restless(Grid):
    """Nodes that leave after they have handed in their models, while one comes that has none there."""

    def get_node_ids(self) -> Iterable[int]:
        return [999] if self.sent else super().get_node_ids()


def test_together_the_parties_are_asked_and_nobody_else() -> None:
    def still(context: Context, server_round: int) -> Descent:
        return lambda alignment: None

    random.seed(1)
    expected = random.random()
    random.seed(1)
    grid = Restless(parties(turned, descend=still), 2)
    MultiPartyStart(SPEC, learned="together", rounds=2, options=UNMOVED).run(grid)
    assert random.random() == expected
    assert grid.batches == [[(action, 101), (action, 102)] for action in ("submit", "keep", "descend", "descend")]


def test_together_no_models_stay_behind_where_the_last_round_fails() -> None:
    def failing(context: Context, server_round: int) -> Descent:
        assert any(key.startswith("rotfed.kept") for key in context.state)
        if server_round == 2:
            raise RuntimeError("out of memory")
        return lambda alignment: None

    grid = Grid(parties(turned, descend=failing), 2)
    start = MultiPartyStart(SPEC, learned="together", rounds=2, options=UNMOVED)
    start.run(grid)
    assert start.report is not None and not start.report.data_free
    assert all(not context.state for context in grid.contexts.values())
