"""Adapters in Flower rounds: every rank, every method, Flower's own strategies, PEFT's own models."""

import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedTrimmedAvg,
    Krum,
    MultiKrum,
    QFedAvg,
    Strategy,
)
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn

import rotfed
from rotfed.adapters.client import read_delta
from rotfed.errors import AlignmentError
from rotfed.flower import (
    AdapterStrategy,
    AlignedStrategy,
    MultiPartyStart,
    RotFedAvg,
    adapter_mod,
    align_mod,
    to_record,
    to_state_dict,
)
from rotfed.flower.reports import AdapterReport
from simulations.grid import InProcessGrid
from tests.test_flower import SPEC as WHOLE
from tests.test_flower import STOCK, reply_to

NAMES = [f"base_model.model.{layer}.lora_{side}.weight" for layer in ("0", "2") for side in "AB"]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 12), nn.Tanh(), nn.Linear(12, 6), nn.Linear(6, 3))


def adapted(rank: int, **settings: Any) -> PeftModel:
    options = {"r": rank, "lora_alpha": 8, "target_modules": ["0", "2"], "modules_to_save": ["3"], **settings}
    torch.manual_seed(rank)
    return get_peft_model(network(), LoraConfig(**options))


def start(rank: int = 16, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """An adapter in the middle of its training: nothing is zero."""
    model = adapted(rank)
    generator = torch.Generator().manual_seed(5)
    return {
        name: (tensor + 0.1 * torch.randn(tensor.shape, generator=generator)).to(dtype)
        for name, tensor in get_peft_model_state_dict(model).items()
    }


SPEC = rotfed.load_adapter_spec(adapted(16))


def updates(model: PeftModel) -> dict[str, Tensor]:
    return {
        n: m.get_delta_weight("default").detach() for n, m in model.named_modules() if hasattr(m, "get_delta_weight")
    }


def loaded(params: dict[str, Tensor], rank: int) -> PeftModel:
    model = adapted(rank)
    found = set_peft_model_state_dict(model, params)
    assert not found.unexpected_keys and not [key for key in found.missing_keys if "lora_" in key]
    return model


class Clients:
    """Clients that train by adding noise. By round and partition: what they were sent and what they trained."""

    def __init__(self, ranks: list[int], change: float = 0.1, answer: Callable[..., Any] | None = None) -> None:
        self.ranks, self.change, self.answer = ranks, change, answer
        self.sent: dict[int, dict[int, dict[str, Tensor]]] = {}
        self.trained: dict[int, dict[int, PeftModel]] = {}
        self.configs: dict[int, dict[str, Any]] = {}
        self.arrays: list[dict[str, Tensor]] = []
        self.deltas: list[dict[str, Tensor]] = []
        self.app = ClientApp()
        self.app.train()(self._train)

    def _train(self, message: Message, context: Context) -> Message:
        partition = int(context.node_config["partition-id"])
        config = dict(message.content["config"])
        number = int(config["server-round"])
        model = adapted(self.ranks[partition])
        received = to_state_dict(message.content["arrays"])
        self.sent.setdefault(number, {})[partition] = received
        self.configs[number] = config
        if "base-delta" in message.content:
            rotfed.add_base_delta(model, to_state_dict(message.content["base-delta"]))
        set_peft_model_state_dict(model, rotfed.fit_adapter(received, get_peft_model_state_dict(model), SPEC))
        rotfed.train_factors(model, str(config.get("rotfed-train", "both")))
        generator = torch.Generator().manual_seed(100 * number + partition)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter += self.change * torch.randn(parameter.shape, generator=generator)
        self.trained.setdefault(number, {})[partition] = model
        answer = get_peft_model_state_dict(model)
        if self.answer is not None:
            answer = self.answer(partition, answer)
        return reply_to(message, answer, **{"num-examples": 10 * (partition + 1)})

    def run(self, strategy: Strategy, params: dict[str, Tensor], rounds: int = 1) -> dict[str, Tensor]:
        def note(_: int, arrays: ArrayRecord) -> MetricRecord:
            self.arrays.append(to_state_dict(arrays))
            self.deltas.append(getattr(strategy, "base_delta", {}))
            return MetricRecord()

        grid = InProcessGrid(self.app, len(self.ranks))
        result = strategy.start(grid, to_record(params), num_rounds=rounds, evaluate_fn=note)
        self.metrics = result.train_metrics_clientapp
        return to_state_dict(result.arrays)


def mean_of_updates(clients: Clients, which: int = 1) -> dict[str, Tensor]:
    models = clients.trained[which]
    total = sum(partition + 1 for partition in models)
    return {
        name: torch.stack([(p + 1) / total * updates(model)[name] for p, model in models.items()]).sum(0)
        for name in updates(models[0])
    }


def test_ranks_4_8_and_16_aggregate_and_each_client_gets_its_own_back() -> None:
    clients = Clients([4, 8, 16])
    strategy = AdapterStrategy(FedAvg(), SPEC)
    result = clients.run(strategy, start(), rounds=2)
    sizes = {number: [len(sent[part][NAMES[0]]) for part in range(3)] for number, sent in clients.sent.items()}
    assert sizes == {1: [16, 16, 16], 2: [4, 8, 16]}
    model = loaded(result, 16)
    for name, target in mean_of_updates(clients, 2).items():
        singular = torch.linalg.svdvals(target)
        torch.testing.assert_close((updates(model)[name] - target).norm(), singular[16:].norm(), atol=1e-5, rtol=1e-4)
    report = strategy.reports[-1]
    assert isinstance(report, AdapterReport) and report.ranks == {101: 4, 102: 8, 103: 16}
    assert report.error < 1e-6 and report.error < report.mean_error and set(report.errors) == set(report.mean_errors)
    assert report.to_dict()["aggregation"] == "optimal" and NAMES[0].partition(".lora")[0] not in repr(report)


@pytest.mark.parametrize("aggregation", ["mean", "rotation", "optimal"])
def test_every_client_of_one_rank_sees_what_the_report_says(aggregation: str) -> None:
    clients = Clients([3, 3, 3])
    strategy = AdapterStrategy(FedAvg(), SPEC, aggregation=aggregation)
    found = clients.run(strategy, start(3))
    model = loaded(found, 3)
    report = strategy.reports[0]
    for name, target in mean_of_updates(clients).items():
        error = float((updates(model)[name] - target).norm() / target.norm())
        assert error == pytest.approx(report.errors[name], rel=1e-3, abs=1e-5)
    assert report.error <= report.mean_error + 1e-12
    assert clients.metrics[1]["rotfed-aggregation-error"] == report.error
    # Flower logs the whole record in every round: no place for a figure a module.
    assert all(isinstance(value, float) for name, value in clients.metrics[1].items() if name.startswith("rotfed-"))
    name = "base_model.model.3.weight"
    heads = [(p + 1) / 6 * get_peft_model_state_dict(model)[name] for p, model in clients.trained[1].items()]
    torch.testing.assert_close(found[name], torch.stack(heads).sum(0))


@pytest.mark.parametrize("aggregation", ["exact", "exact-mean", "stack"])
def test_nothing_is_lost_over_rounds_with_a_change_of_the_base(aggregation: str) -> None:
    clients = Clients([2, 4, 3], change=0.3)
    clients.run(AdapterStrategy(FedAvg(), SPEC, aggregation=aggregation), start(4), rounds=3)
    before = {name: torch.zeros_like(update) for name, update in updates(adapted(4)).items()}
    base = dict(adapted(4).named_parameters())
    for number in (1, 2, 3):
        model = loaded(clients.arrays[number], 4)
        rotfed.add_base_delta(model, clients.deltas[number])
        for name, target in mean_of_updates(clients, number).items():
            weight = f"{name}.base_layer.weight"
            moved = dict(model.named_parameters())[weight].detach() - base[weight].detach()
            # What clients trained on in this round was moved by the changes of those before.
            expected = target + before[name]
            torch.testing.assert_close(moved + updates(model)[name], expected, atol=2e-5, rtol=1e-4)
            before[name] = moved


@pytest.mark.parametrize("aggregation", rotfed.adapters.METHODS)
def test_a_round_in_which_nothing_was_learned_changes_nothing(aggregation: str) -> None:
    clients, params = Clients([4, 2], change=0.0), get_peft_model_state_dict(adapted(4))
    strategy = AdapterStrategy(FedAvg(), SPEC, aggregation=aggregation)
    for name, tensor in clients.run(strategy, params, rounds=2).items():
        torch.testing.assert_close(tensor, params[name], atol=1e-6, rtol=1e-6)
    assert not strategy.base_delta


def test_what_is_usual_may_be_said() -> None:
    AdapterStrategy(FedAvg(), SPEC, aggregation="optimal", over="both", reflections=True, strength=1.0, anchor="global")


def test_a_strategy_that_is_started_again_knows_nothing_of_the_adapter_before() -> None:
    strategy = AdapterStrategy(FedAvg(), SPEC, aggregation="stack")
    Clients([2, 4]).run(strategy, start(4))
    strategy.base_delta = {}
    other = {name: 2 * tensor for name, tensor in start(4).items()}
    again = Clients([4, 4])
    found = again.run(strategy, other)
    assert [len(again.sent[1][part][NAMES[0]]) for part in range(2)] == [4, 4]
    for name in NAMES:
        torch.testing.assert_close(found[name], other[name])


@pytest.mark.parametrize("name", STOCK)
def test_turned_copies_average_back_under_every_stock_strategy(name: str) -> None:
    params = start(4)

    def turned(partition: int, _: dict[str, Tensor]) -> dict[str, Tensor]:
        R = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(partition)))[0]
        return {n: t @ R if "lora_B" in n else R.mT @ t if "lora_A" in n else t for n, t in params.items()}

    clients = Clients([4] * 7, answer=turned)
    strategy = AdapterStrategy(STOCK[name](), SPEC, aggregation="rotation")
    for key, tensor in clients.run(strategy, params).items():
        torch.testing.assert_close(tensor, params[key], atol=1e-4, rtol=1e-4)


def test_fedadam_steps_towards_the_combined_factors() -> None:
    clients = Clients([4, 4, 4])
    params = start(4)
    found = clients.run(AdapterStrategy(FedAdam(eta=1e-2), SPEC, aggregation="optimal"), params)
    goal = Clients([4, 4, 4]).run(AdapterStrategy(FedAvg(), SPEC, aggregation="optimal"), params)
    for name in NAMES:
        step, way = found[name] - params[name], goal[name] - params[name]
        assert float((step * way > 0).float().mean()) > 0.95


def test_frozen_factors_stay_and_a_client_that_changes_one_is_refused() -> None:
    params = start(4)
    clients = Clients([4, 4, 4])
    found = clients.run(AdapterStrategy(FedAvg(), SPEC, train="B"), params, rounds=2)
    for name in NAMES:
        same = torch.equal(found[name], params[name])
        assert same if "lora_A" in name else not same
    assert {config["rotfed-train"] for config in clients.configs.values()} == {"B"}
    strategy = AdapterStrategy(FedAvg(), SPEC, train="alternate")
    turns = Clients([4, 4, 4])
    turns.run(strategy, params, rounds=2)
    assert [config["rotfed-train"] for config in turns.configs.values()] == ["B", "A"]
    assert all(report.error < 1e-7 for report in strategy.reports if isinstance(report, AdapterReport))

    def disobedient(partition: int, answer: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: t + 0.01 if partition == 1 and "lora_A" in n else t for n, t in answer.items()}

    strategy = AdapterStrategy(FedAvg(), SPEC, train="B")
    Clients([4, 4, 4], answer=disobedient).run(strategy, params)
    assert list(strategy.reports[0].refused) == [102]
    assert "lora_A.weight: expected as it was sent, found changed" in strategy.reports[0].refused[102]


def test_a_frozen_factor_may_come_back_in_the_clients_own_type() -> None:
    def rounded(_: int, answer: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.bfloat16() for name, tensor in answer.items()}

    params, strategy = start(4), AdapterStrategy(FedAvg(), SPEC, train="B")
    found = Clients([4, 4], answer=rounded).run(strategy, params)
    assert not strategy.reports[0].refused
    assert all(torch.equal(found[name], params[name]) for name in NAMES if "lora_A" in name)


def test_bfloat16_adapters_come_back_as_such() -> None:
    found = Clients([4, 2]).run(AdapterStrategy(FedAvg(), SPEC), start(4, torch.bfloat16))
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}


REFUSED: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "nan": (lambda a: {n: t * torch.nan if "0.lora_B" in n else t for n, t in a.items()}, "0.lora_B.weight.*NaN"),
    "half a pair": (lambda a: {n: t for n, t in a.items() if "0.lora_B" not in n}, "expected lora_B beside it"),
    "unknown": (
        lambda a: {**a, "base_model.model.9.weight": torch.ones(1)},
        "9.weight: not in the adapter sent out; send",
    ),
    "missing": (lambda a: {n: t for n, t in a.items() if "3.bias" not in n}, "3.bias: expected in the reply"),
    "a model": (
        lambda a: {re.sub("(lora_.)", r"\1.default", n): t for n, t in a.items()},
        "; send get_peft_model_state_dict",
    ),
    "misshapen": (lambda a: {n: t[:, :5] if "0.lora_A" in n else t for n, t in a.items()}, "0.lora_A.*expected shape"),
    "another method": (lambda a: {**a, "base_model.model.0.ia3_l": torch.ones(1)}, "ia3_l: expected a parameter of"),
    "too high a rank": (
        lambda a: {**a, NAMES[0]: torch.ones(9, 10), NAMES[1]: torch.ones(12, 9)},
        "0.lora_A.weight: expected rank 4 or less, found 9",
    ),
    "a number": (
        lambda a: {**a, NAMES[0]: torch.tensor(1.0)},
        r"0.lora_B.weight: expected 0 columns.*\(12, 4\) and \(\)",
    ),
    "a lower rank of another layer": (
        lambda a: {**a, NAMES[0]: torch.ones(2, 7), NAMES[1]: torch.ones(12, 2)},
        r"0.lora_A.weight: expected shape \(4, 10\).*found \(2, 7\)",
    ),
    "unequal ranks": (lambda a: {n: t[:2] if "0.lora_A" in n else t for n, t in a.items()}, "expected 2 columns"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_used_is_refused_and_the_round_goes_on(kind: str) -> None:
    spoil, reason = REFUSED[kind]
    clients = Clients([4, 4, 4], answer=lambda partition, answer: spoil(answer) if partition == 1 else answer)
    strategy = AdapterStrategy(FedAvg(), SPEC)
    found = clients.run(strategy, start(4))
    assert list(strategy.reports[0].refused) == [102]
    assert re.search(reason, strategy.reports[0].refused[102]), strategy.reports[0].refused[102]
    assert all(bool(tensor.isfinite().all()) for tensor in found.values())


def test_a_round_without_an_adapter_has_no_error_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    clients = Clients([4, 4], answer=lambda _, answer: {name: tensor * torch.nan for name, tensor in answer.items()})
    strategy = AdapterStrategy(FedAvg(), SPEC)
    with caplog.at_level("INFO", logger="flwr"):
        clients.run(strategy, start(4))
    (report,) = strategy.reports
    assert isinstance(report, AdapterReport) and math.isnan(report.error) and math.isnan(report.mean_error)
    assert "no adapter could be used, 2 refused" in caplog.text and "aggregation error" not in caplog.text
    assert "NaN" not in json.dumps({**report.to_dict(), "refused": {}}) and report.to_dict()["error"] is None
    assert not clients.metrics


def dp() -> Strategy:
    return DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.0, 1.0, 3)


@pytest.mark.parametrize(
    ("inner", "options", "message"),
    [
        *[
            (inner, {"aggregation": aggregation}, "expected 'rotation' around")
            for inner in (
                lambda: Krum(num_malicious_nodes=1),
                lambda: MultiKrum(num_malicious_nodes=1, num_nodes_to_select=2),
                lambda: Bulyan(num_malicious_nodes=1),
                FedMedian,
                FedTrimmedAvg,
                lambda: QFedAvg(client_learning_rate=0.1),
            )
            for aggregation in ("optimal", "exact", "stack")
        ],
        (FedAdam, {"aggregation": "exact"}, "change of the base makes up for a mean"),
        (FedAvgM, {"aggregation": "stack"}, "change of the base makes up for a mean"),
        (dp, {"aggregation": "optimal"}, "expected 'rotation' to the global anchor"),
        (dp, {"aggregation": "rotation", "anchor": "consensus"}, "expected 'rotation' to the global anchor"),
        (dp, {"over": "A"}, "expected 'rotation' to the global anchor"),
        (FedAvg, {"train": "B", "aggregation": "optimal"}, "expected 'mean' where one factor is frozen"),
        (FedAvg, {"aggregation": "best"}, "aggregation: expected one of mean"),
        (FedAvg, {"anchor": "medoid"}, "anchor: expected one of global, consensus for adapters"),
        (FedAvg, {"over": "C"}, "over: expected one of both"),
        (FedAvg, {"train": "A"}, "train: expected one of both"),
        (FedAvg, {"strength": 1.5}, "strength: expected a number from 0 to 1"),
        (FedAvg, {"reflections": "yes"}, "reflections: expected True or False, found 'yes'"),
        *[
            (FedAvg, {**method, name: value}, f"{name}: expected unset for .*only 'rotation' turns adapters.*{value}")
            for method in ({}, {"aggregation": "mean"}, {"train": "B"})
            for name, value in (("over", "A"), ("reflections", False), ("strength", 0.5), ("anchor", "consensus"))
        ],
    ],
)
def test_combinations_that_make_no_sense_are_refused(
    inner: Callable[[], Strategy], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(AlignmentError, match=message):
        AdapterStrategy(inner(), SPEC, **options)


def test_around_privacy_rotation_is_the_default_and_no_reply_moves_away(caplog: pytest.LogCaptureFixture) -> None:
    strategy = AdapterStrategy(dp(), SPEC)
    Clients([4, 4, 4]).run(strategy, start(4))
    report = strategy.reports[0]
    assert isinstance(report, AdapterReport) and report.aggregation == "rotation"


def test_specs_of_models_and_of_adapters_are_not_taken_for_each_other() -> None:
    whole: Any = WHOLE
    adapter: Any = SPEC
    for refuse, message in (
        (
            lambda: RotFedAvg(adapter, aggregation="mean"),
            r"found an AdapterSpec; use AdapterStrategy\(inner, spec\) for adapters",
        ),
        (lambda: AlignedStrategy(FedAdam(), adapter), "found an AdapterSpec; use AdapterStrategy"),
        (lambda: MultiPartyStart(adapter), "found an AdapterSpec; use AdapterStrategy"),
        (lambda: align_mod(adapter), r"found an AdapterSpec; use adapter_mod\(spec\) for adapters"),
        (lambda: AdapterStrategy(FedAvg(), whole), r"a SymmetrySpec; use AlignedStrategy\(inner, spec\) for whole"),
        (lambda: adapter_mod(whole), r"found a SymmetrySpec; use align_mod\(spec\) for whole models"),
        (
            lambda: AdapterStrategy(FedAvg(), adapter.config),
            "expected an AdapterSpec, found dict; pass what load_adapter",
        ),
        (lambda: adapter_mod(None), "expected an AdapterSpec, found NoneType"),  # type: ignore[arg-type]
    ):
        with pytest.raises(rotfed.SpecError, match=message):
            refuse()


def test_fedrot_lora_turns_over_a_and_b_in_turn() -> None:
    clients, params = Clients([4, 4, 4], change=0.3), start(4)
    strategy = AdapterStrategy(
        FedAvg(), SPEC, aggregation="rotation", over="alternate", reflections=False, strength=0.5
    )
    first = clients.run(strategy, params)
    replies = [get_peft_model_state_dict(clients.trained[1][partition]) for partition in range(3)]
    expected = rotfed.aggregate_adapters(
        replies, SPEC, "rotation", [1, 2, 3], params, over="A", reflections=False, strength=0.5
    ).params
    for name in NAMES:
        torch.testing.assert_close(first[name], expected[name], atol=1e-5, rtol=1e-5)


def test_settings_are_logged_and_the_config_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    strategy = AdapterStrategy(FedAvg(), SPEC, aggregation="rotation", over="A")
    with caplog.at_level("INFO", logger="flwr"):
        strategy.summary()
    assert "Aggregation: 'rotation'" in caplog.text and "Over: A" in caplog.text
    config = ConfigRecord()
    strategy.configure_train(1, to_record(start(4)), config, InProcessGrid(ClientApp(), 2))
    assert list(config) == ["server-round"]
    assert isinstance(to_record(strategy.base_delta), ArrayRecord) and not strategy.base_delta


def test_the_mod_turns_on_the_client_what_leaves_it() -> None:
    params = start(4)

    def turned(partition: int, _: dict[str, Tensor]) -> dict[str, Tensor]:
        R = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(partition)))[0]
        return {n: t @ R if "lora_B" in n else R.mT @ t if "lora_A" in n else t for n, t in params.items()}

    clients = Clients([4, 4, 4], answer=turned)
    clients.app = ClientApp(mods=[adapter_mod(SPEC)])
    clients.app.train()(clients._train)
    for name, tensor in clients.run(FedAvg(), params).items():
        torch.testing.assert_close(tensor, params[name], atol=1e-5, rtol=1e-5)
    with pytest.raises(AlignmentError, match="strength: expected a number from 0 to 1"):
        adapter_mod(SPEC, strength=2)


def test_a_run_goes_on_from_the_change_of_the_base_of_another() -> None:
    clients = Clients([2, 2], change=0.3)
    strategy = AdapterStrategy(FedAvg(), SPEC, aggregation="exact")
    params = clients.run(strategy, start(2))
    again = AdapterStrategy(FedAvg(), SPEC, aggregation="exact")
    again.base_delta = read_delta(strategy.base_delta)
    clients.run(again, params)
    for name, tensor in clients.deltas[-2].items():
        torch.testing.assert_close(tensor, strategy.base_delta[name])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda left: {name: tensor for name, tensor in left.items() if "delta_A" not in name},
            "expected delta_B",
        ),
        (lambda left: {name: tensor * torch.nan for name, tensor in left.items()}, "NaN"),
        (
            lambda left: {f"x.{name}": tensor for name, tensor in left.items()},
            "expected a change of the base of shape None",
        ),
        (lambda left: {n: t[:5] if "_B" in n else t for n, t in left.items()}, r"of shape \(12, 10\).*found \(5, 10\)"),
    ],
)
def test_a_change_of_another_base_is_refused_before_the_round(spoil: Callable[..., Any], message: str) -> None:
    clients = Clients([2, 2], change=0.3)
    strategy = AdapterStrategy(FedAvg(), SPEC, aggregation="exact")
    params = clients.run(strategy, start(2))
    again = AdapterStrategy(FedAvg(), SPEC, aggregation="exact")
    again.base_delta = spoil(strategy.base_delta)
    with pytest.raises(AlignmentError, match=message):
        again.configure_train(1, to_record(params), ConfigRecord(), InProcessGrid(clients.app, 2))


def test_a_base_weight_that_travels_with_the_adapter_takes_no_change() -> None:
    """Clients would send it back with the change on it, and add the change to it again."""
    params = {**start(4), "base_model.model.0.base_layer.weight": torch.ones(12, 10)}

    def begin(aggregation: str) -> list[Message]:
        strategy, grid = AdapterStrategy(FedAvg(), SPEC, aggregation=aggregation), InProcessGrid(ClientApp(), 2)
        return list(strategy.configure_train(1, to_record(params), ConfigRecord(), grid))

    for aggregation in ("exact", "exact-mean", "stack"):
        with pytest.raises(AlignmentError, match=r"base_layer\.weight: expected no base weight"):
            begin(aggregation)
    assert begin("optimal")
