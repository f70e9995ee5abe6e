"""The Flower layer, with Flower's own strategies and messages on an in-process Grid."""

import copy
import logging
import random
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    FedYogi,
    Krum,
    MultiKrum,
    QFedAvg,
    Strategy,
)
from torch import Tensor

import rotfed
from rotfed.align import AlignOptions
from rotfed.checks import example_inputs
from rotfed.errors import AlignmentError, RecordError
from rotfed.flower import AlignedStrategy, RotFedAvg, align_mod, to_record, to_state_dict
from rotfed.layout import lay_out
from simulations.grid import InProcessGrid
from tests.models import EXAMPLES, change_of_function

CLIENTS = 7
MODEL = EXAMPLES["vit"].model()
SPEC = rotfed.load_spec(MODEL)
THETA = {name: tensor.clone() for name, tensor in MODEL.state_dict().items()}

Trained = Callable[[int], Mapping[str, Tensor]]


def relative_distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    error2 = sum(float((found[n].double() - t.double()).square().sum()) for n, t in expected.items())
    return (error2 / sum(float(t.double().square().sum()) for t in expected.values())) ** 0.5


@cache
def frame(partition: int) -> rotfed.Transform:
    """A frame of this client's own."""
    return rotfed.random_transform(SPEC, torch.Generator().manual_seed(partition))


def turned(partition: int, params: Mapping[str, Tensor] = THETA) -> dict[str, Tensor]:
    """The same function in a frame of this client's own."""
    return frame(partition).apply(params)


def reply_to(message: Message, params: Mapping[str, Tensor] | ArrayRecord, **metrics: Any) -> Message:
    record = params if isinstance(params, ArrayRecord) else to_record(params)
    values = {"num-examples": 10, "train_loss": 0.5, **metrics}
    return Message(RecordDict({"arrays": record, "metrics": MetricRecord(values)}), reply_to=message)


def client_app(answer: Callable[[Message, int], Message], mods: list[Any] | None = None) -> ClientApp:
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return answer(message, int(context.node_config["partition-id"]))

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": 10, "loss": 0.25})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def run(strategy: Strategy, app: ClientApp, params: Mapping[str, Tensor] = THETA, clients: int = CLIENTS) -> Any:
    random.seed(0)  # Flower samples nodes, and so orders its sums, by Python's own generator.
    return strategy.start(InProcessGrid(app, clients), to_record(params), num_rounds=1)


TURNED = client_app(lambda message, partition: reply_to(message, turned(partition)))

STOCK: dict[str, Callable[[], Strategy]] = {
    "FedAvg": FedAvg,
    "FedProx": lambda: FedProx(proximal_mu=0.1),
    "FedAvgM": lambda: FedAvgM(server_learning_rate=1.0, server_momentum=0.0),
    "FedAdam": FedAdam,
    # By default its first step is a hundred times what rounding to float32 leaves of the distance.
    "FedAdagrad": lambda: FedAdagrad(tau=0.1),
    "FedYogi": FedYogi,
    "FedMedian": FedMedian,
    "FedTrimmedAvg": lambda: FedTrimmedAvg(beta=0.2),
    "Krum": lambda: Krum(num_malicious_nodes=1),
    "MultiKrum": lambda: MultiKrum(num_malicious_nodes=1, num_nodes_to_select=3),
    "Bulyan": lambda: Bulyan(num_malicious_nodes=1),
    "QFedAvg": lambda: QFedAvg(client_learning_rate=0.1, q=0.1),
    "DPFixed": lambda: DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.0, 1.0, CLIENTS),
    "DPAdaptive": lambda: DifferentialPrivacyServerSideAdaptiveClipping(FedAvg(), 0.0, CLIENTS),
}


@pytest.mark.parametrize(
    ("name", "anchor"),
    [(n, a) for n in STOCK for a in ("global", "medoid", "consensus") if a == "global" or not n.startswith("DP")],
)
def test_turned_copies_average_back_under_every_stock_strategy(name: str, anchor: str) -> None:
    strategy = AlignedStrategy(STOCK[name](), SPEC, anchor=anchor)
    result = run(strategy, TURNED)
    assert relative_distance(to_state_dict(result.arrays), THETA) < 1e-5
    assert strategy.reports[0].distance_before > 1.0 > 1e-4 > strategy.reports[0].distance_after


def test_plain_fedavg_loses_turned_copies() -> None:
    plain = to_state_dict(run(FedAvg(), TURNED).arrays)
    assert relative_distance(plain, THETA) > 0.3
    pixels = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    model = EXAMPLES["vit"].model("AutoModelForImageClassification")
    spec, theta = rotfed.load_spec(model), model.state_dict()
    app = client_app(
        lambda message, partition: reply_to(
            message, rotfed.random_transform(spec, torch.Generator().manual_seed(partition)).apply(theta)
        )
    )

    def answers(arrays: ArrayRecord) -> Tensor:
        with torch.no_grad():
            return torch.func.functional_call(model, to_state_dict(arrays), (pixels,)).logits

    def started(strategy: Strategy) -> Tensor:
        return answers(strategy.start(InProcessGrid(app, CLIENTS), to_record(theta), num_rounds=1).arrays)

    true = answers(to_record(theta))
    torch.testing.assert_close(started(RotFedAvg(spec)), true, rtol=1e-4, atol=1e-5)
    averaged = started(FedAvg())
    correlation = torch.corrcoef(
        torch.stack([(true - true.mean(0)).flatten(), (averaged - averaged.mean(0)).flatten()])
    )
    assert float((averaged - true).square().mean() / true.var()) > 0.5 or float(correlation[0, 1]) < 0.5


@pytest.mark.parametrize(
    "options", [{"options": AlignOptions(["d_ff"])}, {"min_gain": 1.5}, {"min_gain": float("inf")}]
)
def test_identity_alignment_equals_plain_to_the_bit(options: dict[str, Any]) -> None:
    def near(message: Message, partition: int) -> Message:
        generator = torch.Generator().manual_seed(partition)
        noisy = {n: t + 1e-3 * torch.randn(t.shape, generator=generator) for n, t in THETA.items()}
        return reply_to(message, noisy)

    plain = to_state_dict(run(FedAvg(), client_app(near)).arrays)
    aligned = to_state_dict(run(RotFedAvg(SPEC, **options), client_app(near)).arrays)
    assert list(aligned) == list(plain) == list(THETA)
    for name, tensor in plain.items():
        torch.testing.assert_close(aligned[name], tensor.to(aligned[name].dtype), rtol=0, atol=0)


def spoiled(**changes: Tensor | None) -> dict[str, Tensor]:
    params = {**turned(0), **{name: t for name, t in changes.items() if t is not None}}
    return {name: t for name, t in params.items() if name not in {n for n, c in changes.items() if c is None}}


BIAS = "layernorm.bias"
BAD_REPLIES: dict[str, tuple[Callable[[Message], Message], str]] = {
    "nan": (lambda m: reply_to(m, spoiled(**{BIAS: THETA[BIAS] * torch.nan})), "layernorm.bias.*NaN"),
    "misshapen": (lambda m: reply_to(m, spoiled(**{BIAS: torch.ones(1)})), r"layernorm.bias: expected shape \(12,\)"),
    "missing": (lambda m: reply_to(m, spoiled(**{BIAS: None})), "layernorm.bias: expected in the reply"),
    "unknown": (lambda m: reply_to(m, spoiled(extra=torch.ones(1))), "extra: not a parameter"),
    "whole numbers": (lambda m: reply_to(m, spoiled(**{BIAS: torch.ones(12, dtype=torch.int32)})), "int32"),
    "unreadable": (
        lambda m: reply_to(
            m, ArrayRecord({**to_record(turned(0)), BIAS: Array("float32", (12,), "numpy.ndarray", b"x")})
        ),
        "cannot be read",
    ),
    "no weight": (
        lambda m: Message(RecordDict({"arrays": to_record(turned(0)), "metrics": MetricRecord({"a": 1})}), reply_to=m),
        "num-examples",
    ),
    "endless weight": (lambda m: reply_to(m, turned(0), **{"num-examples": 1e308}), "num-examples: expected"),
    "list of numbers": (lambda m: reply_to(m, turned(0), train_loss=[0.5]), "lengths of lists"),
    "record of another name": (
        lambda m: Message(
            RecordDict({"a": to_record(turned(0)), "metrics": MetricRecord({"num-examples": 1, "train_loss": 0.5})}),
            reply_to=m,
        ),
        "metrics: the names differ",
    ),
    "float8": (lambda m: reply_to(m, spoiled(**{BIAS: THETA[BIAS].to(torch.float8_e4m3fn)})), "found torch.float8"),
    "negative weight": (lambda m: reply_to(m, turned(0), **{"num-examples": -1}), "num-examples: expected"),
    "no metrics": (lambda m: Message(RecordDict({"arrays": to_record(turned(0))}), reply_to=m), "MetricRecord"),
    "other metrics": (lambda m: reply_to(m, turned(0), surprise=1.0), "metrics: the names differ"),
    "two records": (
        lambda m: Message(
            RecordDict({"a": to_record(turned(0)), "b": to_record({}), "m": MetricRecord({"num-examples": 1})}),
            reply_to=m,
        ),
        "expected one ArrayRecord, found 2",
    ),
}


@pytest.mark.parametrize("anchor", ["global", "medoid", "consensus"])
def test_values_at_the_end_of_their_type_do_not_end_the_run(anchor: str) -> None:
    theta = {name: tensor.half() for name, tensor in THETA.items()}

    def answer(message: Message, partition: int) -> Message:
        generator = torch.Generator().manual_seed(5 + partition)
        noise = {n: torch.randn(t.shape, generator=generator, dtype=torch.float64) for n, t in theta.items()}
        near = {n: (t + 1e-3 * noise[n]).half() for n, t in theta.items()}
        diverged = {n: (65000 * t.sign()).half() for n, t in noise.items()}
        return reply_to(message, near if partition else diverged)

    result = to_state_dict(run(RotFedAvg(SPEC, anchor=anchor), client_app(answer), theta, clients=4).arrays)
    assert all(bool(tensor.isfinite().all()) for tensor in result.values())


@pytest.mark.parametrize("anchor", ["global", "consensus"])
@pytest.mark.parametrize("name", BAD_REPLIES)
def test_a_bad_reply_is_refused_by_node_and_reason_and_the_round_goes_on(name: str, anchor: str) -> None:
    bad, reason = BAD_REPLIES[name]
    app = client_app(lambda m, partition: bad(m) if partition == 2 else reply_to(m, turned(partition)))
    strategy = RotFedAvg(SPEC, anchor=anchor)
    result = run(strategy, app, clients=4)
    (report,) = strategy.reports
    assert list(report.refused) == [103]
    assert re.search(reason, report.refused[103])
    assert sorted(client.node_id for client in report.clients) == [101, 102, 104]
    assert relative_distance(to_state_dict(result.arrays), THETA) < 1e-5


def test_of_several_replies_of_one_node_the_first_counts() -> None:
    def merged(extra: int) -> dict[str, Tensor]:
        random.seed(0)
        strategy = RotFedAvg(SPEC)
        grid = InProcessGrid(client_app(lambda m, p: reply_to(m, {n: t + 0.1 * p for n, t in THETA.items()})), 2)
        replies = list(grid.send_and_receive(strategy.configure_train(1, to_record(THETA), ConfigRecord(), grid)))
        arrays, _ = strategy.aggregate_train(1, [*replies, *copy.deepcopy(replies[:extra])])
        assert arrays is not None and len(strategy.reports[0].clients) == 2
        return to_state_dict(arrays)

    torch.testing.assert_close(merged(1), merged(0), rtol=0, atol=0)


def test_all_weights_zero_keeps_the_last_model() -> None:
    strategy = RotFedAvg(SPEC)
    app = client_app(lambda m, partition: reply_to(m, turned(partition), **{"num-examples": 0}))
    result = run(strategy, app, clients=3)
    assert len(result.arrays) == 0 and not result.train_metrics_clientapp
    assert all("zero in every reply" in reason for reason in strategy.reports[0].refused.values())


def test_errors_and_silence_are_laid_to_the_true_node() -> None:
    strategy = RotFedAvg(SPEC)
    grid = InProcessGrid(TURNED, 5)
    sent = list(strategy.configure_train(1, to_record(THETA), ConfigRecord(), grid))
    replies = {m.metadata.dst_node_id: r for m, r in zip(sent, grid.send_and_receive(sent), strict=True)}
    by_node = {m.metadata.dst_node_id: m for m in sent}
    lost = Message(Error(5, "node unavailable"), reply_to=by_node[102])
    lost.metadata.__dict__["_src_node_id"] = 1  # Flower reports a lost node as the SuperLink's own error.
    arrays, metrics = strategy.aggregate_train(1, [replies[101], lost, replies[104], replies[105]])
    assert strategy.reports[0].refused == {102: "node unavailable", 103: "no reply before the timeout"}
    assert arrays is not None and relative_distance(to_state_dict(arrays), THETA) < 1e-5
    assert metrics is not None and metrics["rotfed-refused"] == 2.0


def test_a_bad_reply_of_nobody_that_was_asked_reaches_no_one() -> None:
    strategy = RotFedAvg(SPEC)
    grid = InProcessGrid(TURNED, 4)
    sent = list(strategy.configure_train(1, to_record(THETA), ConfigRecord(), grid))
    replies = list(grid.send_and_receive(sent))
    stranger = Message(RecordDict(), dst_node_id=999, message_type="train")
    replies.append(reply_to(stranger, spoiled(**{BIAS: THETA[BIAS] * torch.nan})))
    arrays, _ = strategy.aggregate_train(1, replies)
    assert list(strategy.reports[0].refused) == [999]
    assert arrays is not None and relative_distance(to_state_dict(arrays), THETA) < 1e-5


def test_an_exception_in_the_client_is_an_error_of_that_node() -> None:
    def answer(message: Message, partition: int) -> Message:
        if partition == 1:
            raise RuntimeError("out of memory")
        return reply_to(message, turned(partition))

    strategy = RotFedAvg(SPEC)
    run(strategy, client_app(answer), clients=3)
    assert strategy.reports[0].refused == {102: "<class 'RuntimeError'>:<'out of memory'>"}


def test_key_order_does_not_matter() -> None:
    shuffled = client_app(lambda m, p: reply_to(m, dict(sorted(turned(p).items(), reverse=p % 2 == 0))))
    strategy = AlignedStrategy(Bulyan(num_malicious_nodes=1), SPEC)
    result = run(strategy, shuffled)
    assert list(result.arrays) == list(THETA)
    assert relative_distance(to_state_dict(result.arrays), THETA) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_types_and_shapes_come_back_exactly(dtype: torch.dtype) -> None:
    theta = {name: tensor.to(dtype) for name, tensor in THETA.items()}
    theta["counter"] = torch.tensor(7)
    theta["flag"] = torch.tensor([True, False])
    theta = {f"vit.{n}" if n in THETA else n: t for n, t in theta.items()}

    def answer(message: Message, partition: int) -> Message:
        received = to_state_dict(message.content["arrays"])
        assert {n: t.dtype for n, t in received.items()} == {n: t.dtype for n, t in theta.items()}
        return reply_to(message, turned(partition, received))

    result = run(AlignedStrategy(FedAvgM(), SPEC), client_app(answer), theta, clients=3)
    found = to_state_dict(result.arrays)
    assert {n: (t.dtype, t.shape) for n, t in found.items()} == {n: (t.dtype, t.shape) for n, t in theta.items()}
    torch.testing.assert_close(found["counter"], theta["counter"])
    torch.testing.assert_close(found["flag"], theta["flag"])
    floats = {n: t for n, t in theta.items() if t.is_floating_point()}
    assert relative_distance(found, floats) < {torch.bfloat16: 1e-2, torch.float16: 2e-3}.get(dtype, 1e-10)


def test_tied_weights_stay_tied_under_noise() -> None:
    model = EXAMPLES["gpt2"].model("AutoModelForCausalLM")
    theta = {n: t.clone() for n, t in model.state_dict().items()}
    spec = rotfed.load_spec(model)
    theta["copy_of_head.weight"] = theta["transformer.wte.weight"].clone()
    inner = DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.5, 1.0, 3)
    app = client_app(lambda m, p: reply_to(m, {n: t * 1.01 for n, t in theta.items()}))
    found = to_state_dict(run(AlignedStrategy(inner, spec, anchor="global"), app, theta, clients=3).arrays)
    torch.testing.assert_close(found["copy_of_head.weight"], found["transformer.wte.weight"], rtol=0, atol=0)
    assert relative_distance(found, theta) > 1e-3  # the noise is there


def test_replies_are_freed_after_use() -> None:
    strategy = RotFedAvg(SPEC)
    grid = InProcessGrid(TURNED, 3)
    replies = grid.send_and_receive(list(strategy.configure_train(1, to_record(THETA), ConfigRecord(), grid)))
    strategy.aggregate_train(1, replies)
    assert [sum(len(a) for r in reply.content.array_records.values() for a in r) for reply in replies] == [0, 0, 0]


class Wrapper(FedAvg):  # type: ignore[misc]
    """A strategy around another one, as Flower's own wrappers hold theirs."""

    def __init__(self, strategy: Strategy) -> None:
        super().__init__()
        self.strategy = strategy

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        return self.strategy.aggregate_train(server_round, replies)


def test_only_the_global_anchor_goes_with_privacy() -> None:
    inner = DifferentialPrivacyServerSideFixedClipping(FedAvg(), 1.0, 1.0, 3)
    AlignedStrategy(inner, SPEC, anchor="global")
    for anchor in ("medoid", "consensus", "generalized_procrustes"):
        for strategy in (inner, Wrapper(inner), Wrapper(Wrapper(inner))):
            with pytest.raises(AlignmentError, match=r"'global' around DifferentialPrivacy.*privacy accounting"):
                AlignedStrategy(strategy, SPEC, anchor=anchor)
    assert AlignedStrategy(Wrapper(inner), SPEC).settings()[1] == ("Anchor", "'global'")


def test_a_clip_bound_that_held_before_alignment_holds_after() -> None:
    def clipped(message: Message, partition: int) -> Message:
        own = turned(partition)
        norm = sum(float((own[n] - THETA[n]).double().square().sum()) for n in THETA) ** 0.5
        return reply_to(message, {n: THETA[n] + (own[n] - THETA[n]) / norm for n in THETA})

    strategy = RotFedAvg(SPEC, anchor="global")
    run(strategy, client_app(clipped))
    assert all(c.distance_after <= c.distance_before * (1 + 1e-9) for c in strategy.reports[0].clients)
    assert all(c.distance_after <= 1 + 1e-5 for c in strategy.reports[0].clients)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"anchor": "mean"}, "anchor: expected one of global, medoid, consensus, found 'mean'"),
        ({"options": AlignOptions(groups=["nope"])}, "nope"),
        ({"options": AlignOptions(layers=[9])}, "layers"),
        ({"options": {"groups": ["qk"]}}, r"options: expected AlignOptions, found dict; pass rotfed.AlignOptions"),
        ({"options": None}, "options: expected AlignOptions, found NoneType"),
        ({"min_gain": -1}, "min_gain: expected a number from 0 on, found -1"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_sent(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(rotfed.RotfedError, match=error):
        RotFedAvg(SPEC, **arguments)
    if "anchor" not in arguments:
        with pytest.raises(rotfed.RotfedError, match=error):
            align_mod(SPEC, **arguments)


@pytest.mark.parametrize("spec", [None, "vit"])
def test_what_is_no_spec_is_refused(spec: Any) -> None:
    for refuse in (lambda: align_mod(spec, own_models=True), lambda: RotFedAvg(spec), lambda: align_mod(spec)):
        with pytest.raises(rotfed.SpecError, match="spec: expected a SymmetrySpec"):
            refuse()


def test_a_model_that_the_spec_does_not_fit_stops_the_run_at_once() -> None:
    with pytest.raises(rotfed.SpecError, match=r"layernorm.bias: expected by specs/vit.toml"):
        run(RotFedAvg(SPEC), TURNED, {n: t for n, t in THETA.items() if n != BIAS})


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_model_that_is_not_finite_is_not_sent(value: float) -> None:
    strategy, grid = RotFedAvg(SPEC), InProcessGrid(TURNED, 3)
    start = to_record({**THETA, BIAS: THETA[BIAS] * value})
    with pytest.raises(AlignmentError, match=r"layernorm.bias: expected finite values in the model sent out"):
        strategy.configure_train(1, start, ConfigRecord(), grid)


def test_evaluation_goes_through_and_the_summary_names_both(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("flwr")
    logger.propagate = True
    try:
        with caplog.at_level(logging.INFO, logger="flwr"):
            result = run(RotFedAvg(SPEC, options=AlignOptions(layers=[0], strength=0.5)), TURNED)
    finally:
        logger.propagate = False
    assert result.evaluate_metrics_clientapp[1]["loss"] == pytest.approx(0.25)
    assert "Anchor: 'consensus'" in caplog.text and "Inner strategy: FedAvg" in caplog.text
    metrics = result.train_metrics_clientapp[1]
    assert metrics["rotfed-distance-after"] <= metrics["rotfed-distance-before"]
    assert 0 <= metrics["rotfed-identity-permutations"] <= 1 and metrics["rotfed-seconds"] > 0


def test_report_is_plain_data() -> None:
    strategy = RotFedAvg(SPEC, anchor="medoid")
    run(strategy, TURNED, clients=3)
    report = strategy.reports[0].to_dict()
    assert report["anchor"] == "medoid" and report["round"] == 1 and len(report["clients"]) == 3
    assert report["distance_after"] < 1e-4 < report["distance_before"]


# --- the client mod --------------------------------------------------------------------------------------------------


def test_mod_sends_aligned_models_through_plain_fedavg() -> None:
    app = client_app(lambda m, p: reply_to(m, turned(p)), mods=[align_mod(SPEC)])
    assert relative_distance(to_state_dict(run(FedAvg(), app).arrays), THETA) < 1e-5


def test_mod_works_in_the_legacy_layout_with_names() -> None:
    class Client(NumPyClient):  # type: ignore[misc]
        def fit(self, parameters: Any, config: Any) -> Any:
            return [t.numpy() for t in turned(3).values()], 10, {}

    names = list(THETA)
    grid = InProcessGrid(
        ClientApp(client_fn=lambda context: Client().to_client(), mods=[align_mod(SPEC, names=names)]), 1
    )
    (reply,) = grid.send_and_receive([legacy_message()])
    arrays = reply.content.array_records["fitres.parameters"]
    found = {name: torch.from_numpy(array.numpy()) for name, array in zip(names, arrays.values(), strict=True)}
    assert relative_distance(found, THETA) < 1e-5
    nameless = InProcessGrid(ClientApp(client_fn=lambda context: Client().to_client(), mods=[align_mod(SPEC)]), 1)
    (refused,) = nameless.send_and_receive([legacy_message()])
    assert "pass names=list(model.state_dict())" in refused.error.reason


def legacy_message(params: Mapping[str, Tensor] = THETA, node: int = 101) -> Message:
    from flwr.common import FitIns, ndarrays_to_parameters
    from flwr.compat.common.recorddict_compat import fitins_to_recorddict

    ins = FitIns(ndarrays_to_parameters([t.numpy() for t in params.values()]), {})
    return Message(fitins_to_recorddict(ins, keep_input=True), dst_node_id=node, message_type="train")


@pytest.mark.parametrize("legacy", [False, True])
def test_mod_lets_models_trained_apart_leave_folded_and_in_the_frame_received(legacy: bool) -> None:
    model = EXAMPLES["vit"].model("AutoModelForImageClassification")
    spec, received = rotfed.load_spec(model, residual=True), dict(model.state_dict())
    target = rotfed.fold_norms(received, spec)
    own = [dict(EXAMPLES["vit"].model("AutoModelForImageClassification", seed=seed).state_dict()) for seed in (1, 2)]
    own.append(rotfed.random_transform(spec, torch.Generator().manual_seed(0)).apply(target))

    class Client(NumPyClient):  # type: ignore[misc]
        def __init__(self, partition: int) -> None:
            self.partition = partition

        def fit(self, parameters: Any, config: Any) -> Any:
            return [tensor.numpy() for tensor in own[self.partition].values()], 10, {}

    mods = [align_mod(spec, names=list(received), own_models=True)]
    if legacy:
        app = ClientApp(lambda context: Client(int(context.node_config["partition-id"])).to_client(), mods=mods)
        sent = [legacy_message(received, 101 + partition) for partition in range(3)]
    else:
        app = client_app(lambda m, p: reply_to(m, own[p]), mods)
        sent = [Message(RecordDict({"arrays": to_record(received)}), 101 + p, "train") for p in range(3)]
    replies = [next(iter(r.content.array_records.values())) for r in InProcessGrid(app, 3).send_and_receive(sent)]
    left = [
        {name: torch.from_numpy(array.numpy()) for name, array in zip(received, record.values(), strict=True)}
        for record in replies
    ]
    inputs = example_inputs(model, torch.Generator().manual_seed(0))
    for mine, aligned in zip(own, left, strict=True):
        assert change_of_function(model, mine, aligned, inputs) < 1e-4
        lay_out(aligned, spec)
        assert relative_distance(aligned, target) < relative_distance(rotfed.fold_norms(mine, spec), target)
    assert relative_distance(left[2], target) < 1e-5
    merged = rotfed.merge(own, spec, anchor=received)
    assert relative_distance(rotfed.weighted_mean(left), merged) < 1e-5
    with pytest.raises(rotfed.SpecError, match="own_models=True"):
        align_mod(spec)


def test_mod_refuses_what_it_cannot_align() -> None:
    app = client_app(lambda m, p: reply_to(m, spoiled(**{BIAS: THETA[BIAS] * torch.inf})), mods=[align_mod(SPEC)])
    (reply,) = InProcessGrid(app, 1).send_and_receive(
        [Message(RecordDict({"arrays": to_record(THETA), "config": ConfigRecord()}), 101, "train")]
    )
    assert "layernorm.bias: expected finite values" in reply.error.reason


# --- the codec -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).bfloat16(),
        torch.randn(4).half(),
        torch.randn(2, 2).to(torch.float8_e4m3fn),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.tensor(3),
        torch.tensor([True, False]),
        torch.randn(6, 4).t()[::2],
        torch.empty(0, 3),
    ],
    ids=lambda t: f"{str(t.dtype).removeprefix('torch.')}-{tuple(t.shape)}",
)
def test_codec_round_trip(tensor: Tensor) -> None:
    record = to_record({"x": tensor})
    found = to_state_dict(copy.deepcopy(record))["x"]
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    torch.testing.assert_close(found.float(), tensor.float(), rtol=0, atol=0)
    # An .npy header takes 128 bytes; the values take what they take in memory.
    assert len(record["x"].data) <= 128 + tensor.numel() * tensor.element_size()


def test_packed_bits_cannot_be_averaged_by_mistake() -> None:
    with pytest.raises(TypeError, match="Unsupported serialization"):
        to_record({"x": torch.ones(2).bfloat16()})["x"].numpy()


@pytest.mark.parametrize("tensor", [torch.eye(2).to_sparse(), torch.empty(2, device="meta")])
def test_codec_refuses_tensors_without_plain_data(tensor: Tensor) -> None:
    with pytest.raises(RecordError, match="x: expected a dense tensor"):
        to_record({"x": tensor})


def npy(header: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()


@pytest.mark.parametrize("kind", [("numpy.ndarray", "float32"), ("rotfed.bits", "bfloat16")])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04 no zip file",
        b"\x80\x04K\x01.",
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000000,), }\n"),
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (10000000000000000000000000,), }\n"),
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': ((((3,), \n"),
        npy("  x\n y\n"),
        npy("{'descr': ',', 'fortran_order': False, 'shape': (3,), }\n"),
    ],
)
def test_codec_refuses_what_numpy_cannot_read_whatever_it_raises(data: bytes, kind: tuple[str, str]) -> None:
    stype, dtype = kind
    with pytest.raises(RecordError, match="x: expected an array packed by to_record"):
        to_state_dict(ArrayRecord({"x": Array(dtype, (3,), stype, data)}))


@pytest.mark.parametrize("dtype", ["float4_e2m1fn_x2", "quint8", "bits8", "float32", "nn", ""])
def test_codec_reads_bits_of_the_types_that_it_packs_only(dtype: str) -> None:
    packed = to_record({"x": torch.ones(4).to(torch.float8_e4m3fn)})["x"]
    with pytest.raises(RecordError, match="cannot be read: the type"):
        to_state_dict(ArrayRecord({"x": Array(dtype, (4,), packed.stype, packed.data)}))


def test_codec_owns_its_memory() -> None:
    values = np.ones(3, dtype=np.float32)
    tensor = to_state_dict(ArrayRecord({"x": Array(values)}))["x"]
    tensor += 1
    assert values.tolist() == [1.0, 1.0, 1.0]


def test_the_residual_stream_turns_back_too_and_what_clients_get_computes_the_same() -> None:
    model = EXAMPLES["vit"].model("ViTForImageClassification")
    theta = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    spec = rotfed.load_spec(model, residual=True)
    sent = []

    def answer(message: Message, partition: int) -> Message:
        received = to_state_dict(message.content.array_records["arrays"])
        sent.append(received)
        turn = rotfed.random_transform(spec, torch.Generator().manual_seed(partition))
        return reply_to(message, turn.apply(received))

    strategy = RotFedAvg(spec)
    result = to_state_dict(run(strategy, client_app(answer), theta, clients=3).arrays)
    assert strategy.reports[0].gain > 5 and "residual" in strategy.reports[0].groups
    inputs = example_inputs(model, torch.Generator().manual_seed(0))
    assert change_of_function(model, theta, sent[0], inputs) < 1e-5
    assert change_of_function(model, theta, result, inputs) < 1e-4
    plain = to_state_dict(run(FedAvg(), client_app(answer), sent[0], clients=3).arrays)
    assert change_of_function(model, theta, plain, inputs) > 0.1


def test_in_some_layers_what_all_layers_share_is_neither_judged_nor_said_to_be_aligned() -> None:
    spec = rotfed.load_spec(EXAMPLES["vit"].model("ViTForImageClassification"), residual=True)
    assert dict(RotFedAvg(spec).settings())["Groups"].startswith("residual, heads")
    shown = dict(RotFedAvg(spec, options=AlignOptions(layers=[0])).settings())
    assert shown["Layers"] == "0 of 2" and shown["Groups"].startswith("heads") and "residual" not in shown["Groups"]


def apart(message: Message, partition: int) -> Message:
    """A client that trained: what it got, turned a little in its own way, and noise."""
    received = to_state_dict(message.content.array_records["arrays"])
    generator = torch.Generator().manual_seed(partition + 0x9E3779B9)
    skew = 0.02 * torch.randn(2, 3, 4, 4, generator=generator, dtype=torch.float64)
    turn = rotfed.Transform(SPEC, {"qk": torch.matrix_exp(skew - skew.mT)})
    noisy = {n: t + 0.02 * torch.randn(t.shape, generator=generator) for n, t in turn.apply(received).items()}
    return reply_to(message, noisy)


def rounds_of(strategy: Strategy, answer: Callable[[Message, int], Message] = apart) -> tuple[list[Any], list[Any]]:
    """What each of two rounds sends and what it delivers."""
    sent: list[Any] = []
    delivered: list[Any] = []

    def record(message: Message, partition: int) -> Message:
        if partition == 0:
            sent.append(to_state_dict(message.content.array_records["arrays"]))
        return answer(message, partition)

    random.seed(0)
    grid = InProcessGrid(client_app(record), 4)
    strategy.start(
        grid, to_record(THETA), num_rounds=2, evaluate_fn=lambda n, arrays: delivered.append(to_state_dict(arrays))
    )
    return sent, delivered


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_rounds_of_clients_that_lie_a_little_apart_run_as_without_alignment_and_deliver_the_aligned_mean() -> None:
    plain_sent, plain = rounds_of(FedAvg())
    strategy = RotFedAvg(SPEC)
    sent, delivered = rounds_of(strategy)
    assert all(report.groups and report.next_round_from == "plain" for report in strategy.reports)
    assert all(same(one, other) for one, other in zip(sent, plain_sent, strict=True))
    aligned = RotFedAvg(SPEC, next_round_from="aligned")
    aligned_sent, aligned_delivered = rounds_of(aligned)
    assert [report.next_round_from for report in aligned.reports] == ["aligned", "aligned"]
    # Both deliver the same after the first round, and start the second from other models.
    assert relative_distance(delivered[1], aligned_delivered[1]) < 1e-6
    assert relative_distance(delivered[1], plain[1]) > 1e-3
    assert same(aligned_sent[1], aligned_delivered[1]) and not same(sent[1], delivered[1])
    assert relative_distance(delivered[2], plain[2]) > 1e-3


def test_a_delivered_model_is_known_by_its_values_and_what_was_changed_of_it_is_sent() -> None:
    plain_sent, _ = rounds_of(FedAvg())
    strategy, grid = RotFedAvg(SPEC), InProcessGrid(client_app(apart), 4)

    def sent(arrays: ArrayRecord) -> dict[str, Tensor]:
        random.seed(0)
        messages = list(strategy.configure_train(1, arrays, ConfigRecord(), grid))
        return to_state_dict(messages[0].content.array_records["arrays"])

    random.seed(0)
    messages = list(strategy.configure_train(1, to_record(THETA), ConfigRecord(), grid))
    delivered, _ = strategy.aggregate_train(1, grid.send_and_receive(messages))
    assert delivered is not None
    for arrays in (delivered, to_record(to_state_dict(delivered)), copy.deepcopy(delivered)):
        assert same(sent(arrays), plain_sent[1])
    delivered[BIAS] = to_record({BIAS: THETA[BIAS] + 1})[BIAS]
    assert same(sent(delivered), to_state_dict(delivered))


def test_after_models_in_frames_of_their_own_the_next_round_starts_from_the_aligned_mean() -> None:
    strategy = RotFedAvg(SPEC)
    sent, delivered = rounds_of(strategy, lambda message, partition: reply_to(message, turned(partition)))
    assert [report.next_round_from for report in strategy.reports] == ["aligned", "aligned"]
    assert same(sent[1], delivered[1]) and relative_distance(delivered[2], THETA) < 1e-5


def test_after_a_strategy_that_takes_no_mean_the_next_round_starts_from_what_it_made() -> None:
    sent, delivered = rounds_of(AlignedStrategy(FedAdam(), SPEC))
    assert same(sent[1], delivered[1])
    with pytest.raises(AlignmentError, match="next_round_from: expected one of auto, aligned, found 'plain'"):
        AlignedStrategy(FedAdam(), SPEC, next_round_from="plain")
    with pytest.raises(AlignmentError, match="next_round_from: expected one of auto, plain, aligned, found 'mean'"):
        RotFedAvg(SPEC, next_round_from="mean")


def test_a_mod_refuses_a_spec_that_takes_folded_models_before_the_first_round() -> None:
    model = EXAMPLES["vit"].model("AutoModelForImageClassification")
    with pytest.raises(rotfed.SpecError, match="residual='permutation'"):
        align_mod(rotfed.load_spec(model, residual=True))
    align_mod(rotfed.load_spec(model, residual="permutation"))
    with pytest.raises(AlignmentError, match="expected one of global, medoid, consensus, found 'tree'"):
        RotFedAvg(rotfed.load_spec(model), anchor="tree")
