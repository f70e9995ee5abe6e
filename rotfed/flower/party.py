"""A party of a multi-party start: the client's side, and the messages that both sides speak.

Queries with actions of their own, so that the app's `train` and `evaluate` stay free:

| message type | from the server | from the party |
|---|---|---|
| `query.rotfed_submit` | nothing | its own model, as it is |
| `query.rotfed_align` | `anchor`, `source`, their weights, `keeps-source` | how it moved the source, or the moved |
| `query.rotfed_keep` | the models of all parties, near one frame, and their weights | that it keeps them |
| `query.rotfed_descend` | the parameters of the alignment of all | the same after steps on its own data |

Without `source` a party moves its own model; without `anchor` its own frame is the common one. A server that keeps the
source gets the elements of the transform, which it applies itself: nobody can put other parameters in the place of
those that others handed in.
Every reply states its weight, `num-examples`.
"""

from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod

from rotfed.align import Alignment, AlignOptions, align
from rotfed.errors import RecordError
from rotfed.flower.records import to_record, to_state_dict
from rotfed.frames import AlignPair
from rotfed.learned import LearnedAlignment
from rotfed.residual import folded
from rotfed.spec import SymmetrySpec, check_is_spec
from rotfed.tensors import Params

SUBMIT, ALIGN, KEEP, DESCEND = (f"query.rotfed_{action}" for action in ("submit", "align", "keep", "descend"))

WEIGHT = "num-examples"
FIGURES = ("distance-before", "distance-after", "identity-permutations")
"""The metrics of a reply to `query.rotfed_align`, beside its weight."""

UNMOVED = dict(zip(FIGURES, (0.0, 0.0, 1.0), strict=True))
"""The figures of the model whose own frame is the common one."""

_KEPT = "rotfed.kept"
"""Name, or its beginning, of the records in the node's state that hold the models whose alignment is trained."""

PartyModel = Callable[[Context], tuple[Params, int]]
Descent = Callable[[LearnedAlignment], object]


def register_party(
    app: ClientApp,
    party_model: PartyModel,
    spec: SymmetrySpec | Callable[[Context], SymmetrySpec],
    refine: Callable[[Context], AlignPair] | None = None,
    descend: Callable[[Context, int], Descent] | None = None,
    mods: list[Mod] | None = None,
) -> None:
    """Let a ClientApp take part in a `MultiPartyStart`.

    Parameters
    ----------
    app
        The ClientApp; its functions for training and evaluation are not touched. Mods of the whole app see these
        messages, too: give a mod that clips, or adds noise to, what is trained to `@app.train(mods=...)`.
    party_model
        From the context to the party's own model and the number of its examples. Called for every message that needs
        the model, maybe in a process of its own: keep what took long to train in a file or in `context.state`.
    spec
        The bound spec of the model, or how to load it for a context.
    refine
        From the context to what aligns a source to an anchor on this party's data, with the source's share in their
        average: `lambda source, anchor, share: refine(source, anchor, spec, loss, batches, share=share).alignment`
        with `refine` of `rotfed.learned`. Needed where the server asks for `learned="own"`.
    descend
        From the context and the number of the round to what improves a `LearnedAlignment` in place on this party's
        data: `lambda alignment: alignment.train(loss, batches, max_steps=10, decay=False)`. Needed where the server
        asks for `learned="together"`.
    mods
        Mods of these messages alone.
    """

    if not callable(spec):
        check_is_spec(spec)

    def bound(context: Context) -> SymmetrySpec:
        return spec if isinstance(spec, SymmetrySpec) else spec(context)

    @app.query(_action(SUBMIT), mods=mods)
    def submit(message: Message, context: Context) -> Message:
        params, examples = party_model(context)
        return _reply(message, examples, params)

    @app.query(_action(ALIGN), mods=mods)
    def align_source(message: Message, context: Context) -> Message:
        own_spec = bound(context)
        config = message.content.config_records["config"]
        params: Params
        weight: float
        if "source" in message.content.array_records:
            params, weight = to_state_dict(message.content.array_records["source"]), _number(config, "source-weight")
        else:
            params, weight = party_model(context)
        source = folded(params, own_spec)
        if "anchor" not in message.content.array_records:
            return _reply(message, weight, source, **UNMOVED)
        anchor = to_state_dict(message.content.array_records["anchor"])
        anchor_weight = _number(config, "anchor-weight")
        if config["refine"] and anchor_weight > 0:
            if refine is None:
                raise RecordError("refine: expected by the server, not given; pass refine to register_party")
            alignment = refine(context)(source, anchor, weight / (weight + anchor_weight))
        else:
            alignment = align(source, anchor, own_spec, read_options(config))
        moved: Params = alignment.transform.elements if config["keeps-source"] else alignment.params
        return _reply(message, weight, moved, **figures(alignment))

    @app.query(_action(KEEP), mods=mods)
    def keep_models(message: Message, context: Context) -> Message:
        weights, examples = message.content.config_records["config"]["weights"], party_model(context)[1]
        context.state[_KEPT] = ConfigRecord({"weights": weights, "examples": examples})
        for key, record in message.content.array_records.items():
            context.state[f"{_KEPT}.{key}"] = record
        return _reply(message, examples)

    @app.query(_action(DESCEND), mods=mods)
    def descend_together(message: Message, context: Context) -> Message:
        config = message.content.config_records["config"]
        server_round = int(_number(config, "server-round"))
        try:
            return descended(message, context, server_round)
        finally:
            if server_round == config["rounds"]:
                # The state travels to the app with every message that follows.
                for key in [key for key in context.state if key.startswith(_KEPT)]:
                    del context.state[key]

    def descended(message: Message, context: Context, server_round: int) -> Message:
        if descend is None:
            raise RecordError("descend: expected by the server, not given; pass descend to register_party")
        if _KEPT not in context.state:
            raise RecordError("models: expected from the server before the parameters of their alignment, found none")
        kept = context.state.config_records[_KEPT]
        weights = kept["weights"]
        assert isinstance(weights, list)
        models = [
            to_state_dict(context.state.array_records[f"{_KEPT}.{model_key(number)}"]) for number in range(len(weights))
        ]
        alignment = LearnedAlignment(models, bound(context), weights=[float(weight) for weight in weights])
        alignment.load(to_state_dict(message.content.array_records["arrays"]))
        descend(context, server_round)(alignment)
        return _reply(message, _number(kept, "examples"), alignment.parameters)


def model_key(number: int) -> str:
    """The name of the record that holds one of the models whose alignment is trained together."""
    return f"model-{number}"


def figures(alignment: Alignment) -> dict[str, float]:
    """An alignment's figures under the names that they have in a MetricRecord."""
    found = (alignment.distance_before, alignment.distance_after, alignment.identity_permutations)
    return dict(zip(FIGURES, found, strict=True))


def write_options(options: AlignOptions) -> dict[str, Any]:
    """Return options of alignment as entries of a ConfigRecord; those that are None are left out."""
    entries = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(options).items()}
    return {name: value for name, value in entries.items() if value is not None}


def read_options(config: ConfigRecord) -> AlignOptions:
    """Return the options of alignment that `write_options` wrote."""
    return AlignOptions(**{field.name: config[field.name] for field in fields(AlignOptions) if field.name in config})  # type: ignore[arg-type]


def _action(message_type: str) -> str:
    return message_type.split(".")[1]


def _number(config: ConfigRecord, key: str) -> float:
    value = config.get(key)
    if not isinstance(value, int | float):
        raise RecordError(f"{key}: expected a number in the server's message, found {value!r}; use one rotfed on both")
    return float(value)


def _reply(message: Message, weight: float, arrays: Params | None = None, **metrics: float) -> Message:
    content = RecordDict({"metrics": MetricRecord({WEIGHT: weight, **metrics})})
    if arrays is not None:
        content["arrays"] = to_record(arrays)
    return Message(content, reply_to=message)
