"""Rounds around FedAvg: replies taken one by one, kept outside of memory, and averaged as FedAvg does."""

import copy
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg, FedMedian, FedProx, Strategy
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords
from torch import Tensor

import rotfed
from rotfed.errors import RecordError
from rotfed.flower import AlignedStrategy, RotFedAvg, to_record, to_state_dict
from server.grid import OrderedGrid, RoundFailedError
from simulations.grid import InProcessGrid
from tests.models import EXAMPLES
from tests.test_flower import SPEC, THETA, TURNED, client_app, relative_distance, reply_to, turned

CLIENTS = 4
NORM = "layernorm.weight"
LANGUAGE = EXAMPLES["gpt2"].model("AutoModelForCausalLM")
# Queries and keys, values and outputs, with a head that is the embeddings, and buffers.
TIED = {**{name: tensor.clone() for name, tensor in LANGUAGE.state_dict().items()}, "counter": torch.tensor(7)}


def start(strategy: Strategy, grid: InProcessGrid | OrderedGrid, params: Mapping[str, Tensor] = THETA) -> Any:
    random.seed(0)
    return strategy.start(grid, to_record(params), num_rounds=1, timeout=0.2)


def spilling(folder: Path | None = None, **keywords: Any) -> RotFedAvg:
    """A strategy whose replies are all in the file."""
    return RotFedAvg(SPEC, replies_in_memory=0, spill_folder=folder, fraction_evaluate=0.0, **keywords)


# --- the mean --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_memory", [0, 2**30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_rounds_without_differing_frames_are_those_of_fedavg_to_the_bit(dtype: torch.dtype, in_memory: int) -> None:
    theta = {n: t.to(dtype) if t.is_floating_point() else t for n, t in TIED.items()}

    def near(partition: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(partition)
        noise = {n: 1e-2 * torch.randn(t.shape, generator=generator, dtype=torch.float64) for n, t in theta.items()}
        moved = {n: (t + noise[n]).to(dtype) for n, t in theta.items() if t.is_floating_point()}
        moved["lm_head.weight"] = moved["transformer.wte.weight"]
        return {n: moved.get(n, t + partition) for n, t in theta.items()}

    def answers(widen: bool) -> Any:
        def answer(message: Message, partition: int) -> Message:
            wide = torch.promote_types(dtype, torch.float32)
            params = {n: t.to(wide) if widen and t.is_floating_point() else t for n, t in near(partition).items()}
            return reply_to(message, params, **{"num-examples": (3, 7, 11, 2)[partition]})

        return InProcessGrid(client_app(answer), CLIENTS)

    strategy = RotFedAvg(rotfed.load_spec(LANGUAGE), min_gain=1.5, replies_in_memory=in_memory)
    found = to_state_dict(start(strategy, answers(widen=False), theta).arrays)
    wide = {n: t.to(torch.promote_types(dtype, torch.float32)) for n, t in theta.items() if t.is_floating_point()}
    expected = to_state_dict(start(FedAvg(), answers(widen=True), {**theta, **wide}).arrays)
    (report,) = strategy.reports
    assert not report.groups and len(report.clients) == CLIENTS and report.distance_before > 0
    assert list(found) == list(theta) and {n: t.dtype for n, t in found.items()} == {
        n: t.dtype for n, t in theta.items()
    }
    for name, tensor in wide.items():
        assert not torch.equal(found[name], theta[name])
        torch.testing.assert_close(found[name], expected[name].to(theta[name].dtype), rtol=0, atol=0)
        assert tensor.shape == found[name].shape
    assert torch.equal(found["lm_head.weight"], found["transformer.wte.weight"])
    assert found["counter"].item() == round(expected["counter"].item())


def test_arrays_in_the_order_of_columns_are_averaged_as_others() -> None:
    def answer(message: Message, partition: int) -> Message:
        arrays = {n: np.asfortranarray((1 + 0.01 * partition) * t.numpy()) for n, t in THETA.items()}
        return reply_to(message, ArrayRecord({name: Array(array) for name, array in arrays.items()}))

    for strategy in (RotFedAvg(SPEC, min_gain=float("inf")), spilling(min_gain=float("inf"))):
        found = to_state_dict(start(strategy, InProcessGrid(client_app(answer), 3)).arrays)
        assert relative_distance(found, {n: 1.01 * t for n, t in THETA.items()}) < 1e-6


@pytest.mark.parametrize("make", [lambda **k: spilling(**k), lambda **k: RotFedAvg(SPEC, **k)], ids=["file", "memory"])
def test_metrics_of_ones_own_see_the_clients_models(make: Callable[..., RotFedAvg]) -> None:
    theta = {**{f"vit.{name}": tensor.bfloat16() for name, tensor in THETA.items()}, "counter": torch.tensor(7)}
    seen: list[dict[str, Tensor]] = []
    copies: list[RecordDict] = []

    def measure(contents: list[RecordDict], weighted_by: str) -> MetricRecord:
        copies.extend(copy.deepcopy(contents))
        for content in contents:
            arrays = content.array_records["arrays"]
            # As a strategy's own code reads them.
            seen.append({name: torch.from_numpy(array.numpy().copy()) for name, array in arrays.items()})
        return aggregate_metricrecords(contents, weighted_by)

    app = client_app(lambda m, p: reply_to(m, {n: t * (p + 1) for n, t in theta.items()}, train_loss=float(p)))
    strategy = make(train_metrics_aggr_fn=measure, min_gain=float("inf"))
    result = start(strategy, InProcessGrid(app, 3), theta)
    assert strategy.inner.train_metrics_aggr_fn is measure
    assert result.train_metrics_clientapp[1]["train_loss"] == pytest.approx(1.0)
    factors = sorted(float(model[f"vit.{NORM}"][0] / theta[f"vit.{NORM}"][0]) for model in seen)
    assert factors == pytest.approx([1, 2, 3], rel=1e-2)
    for model, kept in zip(seen, copies, strict=True):
        assert list(model) == [f"vit.{name}" for name in THETA] and {tensor.dtype for tensor in model.values()} == {
            torch.float32
        }
        # A copy outlives the round.
        assert all(torch.equal(t, model[n]) for n, t in to_state_dict(kept.array_records["arrays"]).items())


def test_a_strategy_that_takes_no_mean_gets_all_replies_aligned_in_order_and_wide() -> None:
    got: list[dict[str, Tensor]] = []

    class Recording(FedMedian):  # type: ignore[misc]
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            replies = list(replies)
            got.extend(to_state_dict(reply.content.array_records["arrays"]) for reply in replies)
            return super().aggregate_train(server_round, replies)

    def answer(message: Message, partition: int) -> Message:
        received = to_state_dict(message.content.array_records["arrays"])
        return reply_to(message, dict(sorted(turned(partition, received).items())))

    wide = {f"vit.{name}": tensor for name, tensor in THETA.items()}
    theta = {**{name: tensor.half() for name, tensor in wide.items()}, "flag": torch.tensor([True])}
    start(AlignedStrategy(Recording(), SPEC, anchor="global"), InProcessGrid(client_app(answer), 3), theta)
    assert len(got) == 3
    for params in got:
        assert list(params) == list(wide) and {tensor.dtype for tensor in params.values()} == {torch.float32}
        assert relative_distance(params, wide) < 2e-3


# --- one by one ------------------------------------------------------------------------------------------------------


class Watched(InProcessGrid):
    """Counts how many replies have their arrays in memory at once; loses the replies of some nodes."""

    def __init__(self, lost: Iterable[int] = ()) -> None:
        super().__init__(TURNED, CLIENTS)
        self.lost = set(lost)
        self.replies: list[list[weakref.ref[Array]]] = []
        self.most = 0

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        for message_id in message_ids:
            waiting = self._waiting.get(message_id)
            if waiting is not None and waiting.metadata.dst_node_id in self.lost:
                continue
            for reply in super().pull_messages([message_id]):
                self.replies += [[weakref.ref(a) for r in reply.content.array_records.values() for a in r.values()]]
                self.most = max(self.most, sum(any(ref() for ref in refs) for refs in self.replies))
                yield reply
                del reply


@pytest.mark.parametrize("around", [lambda grid: grid, lambda grid: OrderedGrid(grid, streams=True)])
def test_no_more_than_one_reply_is_in_memory_at_once(around: Callable[[InProcessGrid], Any]) -> None:
    grid, strategy = Watched(), spilling()
    start(strategy, around(grid))
    assert len(strategy.reports[0].clients) == CLIENTS
    assert len(grid.replies) == CLIENTS and grid.most == 1
    inside = AlignedStrategy(FedProx(proximal_mu=0.1, fraction_evaluate=0.0), SPEC, replies_in_memory=0)
    start(inside, around(again := Watched()))
    assert len(inside.reports[0].clients) == CLIENTS and again.most == 1
    # Flower's own strategies hold all.
    start(FedAvg(fraction_evaluate=0.0), control := Watched())
    assert control.most == CLIENTS


@pytest.mark.parametrize("around", [lambda grid: grid, lambda grid: OrderedGrid(grid, streams=True)])
def test_a_node_that_never_answers_is_named_and_the_round_goes_on(around: Callable[[InProcessGrid], Any]) -> None:
    strategy = spilling()
    found = to_state_dict(start(strategy, around(Watched(lost=[102]))).arrays)
    assert strategy.reports[0].refused == {102: "no reply before the timeout"}
    assert sorted(client.node_id for client in strategy.reports[0].clients) == [101, 103, 104]
    assert relative_distance(found, THETA) < 1e-5


@pytest.mark.parametrize("strategy", [FedAvg, lambda: RotFedAvg(SPEC)])
def test_a_round_of_the_apps_that_nobody_answers_ends_the_run(strategy: Callable[[], Strategy]) -> None:
    made = strategy()
    grid = OrderedGrid(Watched(lost=range(101, 105)), streams=isinstance(made, RotFedAvg))
    with pytest.raises(RoundFailedError, match=r"none of 4 clients replied in time: expected replies within 0\.2 s"):
        start(made, grid)


# --- the file --------------------------------------------------------------------------------------------------------


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc")


@needs_proc
@pytest.mark.parametrize("fails", [False, True])
def test_the_file_has_no_name_and_goes_with_its_round(fails: bool, tmp_path: Path) -> None:
    during: list[tuple[int, list[Path]]] = []

    def look(contents: list[RecordDict], weighted_by: str) -> MetricRecord:
        during.append((_links(tmp_path), list(tmp_path.iterdir())))
        if fails:
            raise RuntimeError("out of memory")
        return aggregate_metricrecords(contents, weighted_by)

    strategy = spilling(tmp_path, train_metrics_aggr_fn=look)
    assert _links(tmp_path) == 0
    if fails:
        with pytest.raises(RuntimeError, match="out of memory"):
            start(strategy, InProcessGrid(TURNED, CLIENTS))
    else:
        start(strategy, InProcessGrid(TURNED, CLIENTS))
    assert during == [(1, [])]
    assert _links(tmp_path) == 0 and not list(tmp_path.iterdir())


def _links(folder: Path) -> int:
    """Return how many files of a folder this process has open, also those without a name."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            found += os.readlink(link).startswith(f"{folder}/")
        except FileNotFoundError:  # the descriptor by which the folder itself was read
            continue
    return found


@needs_proc
def test_nothing_is_left_of_the_file_where_the_process_is_killed(tmp_path: Path) -> None:
    script = """
        import os, signal, sys
        from pathlib import Path
        from simulations.grid import InProcessGrid
        from tests.test_flower import client_app, reply_to, turned
        from tests.test_rounds import _links, spilling, start

        folder = Path(sys.argv[1])

        def answer(message, partition):
            if partition == 2:
                print(_links(folder), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            return reply_to(message, turned(partition))

        import random
        random.sample = lambda population, k: sorted(population)[:k]
        start(spilling(folder), InProcessGrid(client_app(answer), 4))
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert ended.stdout.split() == ["1"]
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_to_is_refused_when_the_strategy_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file := tmp_path / "file").touch()
    for folder in (tmp_path / "nowhere", file):
        with pytest.raises(
            RecordError, match=f"spill_folder: expected a folder that can be written to, found {folder}"
        ):
            spilling(folder)

    # Modes keep nobody out where tests run as root.
    def locked(dir: Any, **_: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr(tempfile, "TemporaryFile", locked)
    for make in (lambda: spilling(tmp_path), lambda: AlignedStrategy(FedProx(proximal_mu=0.1), SPEC)):
        with pytest.raises(RecordError, match=r"spill_folder: .*\(Permission denied\); name another"):
            make()
    AlignedStrategy(FedMedian(), SPEC)
