"""Alignment on the client: a mod that lets nothing but an aligned model leave."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import Tensor

from rotfed.adapters import AdapterSpec, aggregate_adapters
from rotfed.adapters.aggregate import check_rotation
from rotfed.align import check_options, select
from rotfed.descent import Anchor
from rotfed.errors import AlignmentError, RecordError, SpecError
from rotfed.evidence import MIN_GAIN, align_where_frames_differ, check_min_gain
from rotfed.flower.records import to_record, to_state_dict
from rotfed.flower.replies import match_params
from rotfed.residual import fold_norms
from rotfed.spec import SymmetrySpec, check_is_spec

# The records in which Flower's legacy API (NumPyClient, SecAgg+) carries what it sends out and gets back.
_LEGACY_SENT, _LEGACY_RETURNED = "fitins.parameters", "fitres.parameters"


def refuse_options(what: str, **options: object) -> None:
    """Raise AlignmentError for an option that is set and that a kind of spec does not have."""
    if given := [name for name, value in options.items() if value is not None]:
        raise AlignmentError(f"{given[0]}: expected unset for {what}, found {options[given[0]]!r}; leave it out")


def folded(params: Mapping[str, Tensor], spec: SymmetrySpec) -> Mapping[str, Tensor]:
    """Parameters as `spec` needs them: with folded norms where it has the residual stream."""
    return fold_norms(params, spec) if spec.residual else params


def align_options(
    spec: SymmetrySpec,
    groups: Iterable[str] | None,
    layers: Iterable[int] | None,
    proper: bool,
    strength: float,
    max_sweeps: int,
) -> dict[str, Any]:
    """The options of `rotfed.align` as keywords, checked. Raises RotfedError for those that no alignment can take."""
    check_is_spec(spec)
    check_options(strength, max_sweeps)
    if not isinstance(proper, bool):
        raise AlignmentError(f"proper: expected True or False, found {proper!r}")
    numbers, chosen = select(spec, groups, layers)
    return {
        "groups": chosen,
        "layers": numbers,
        "proper": proper,
        "strength": strength,
        "max_sweeps": max_sweeps,
    }


def align_mod(
    spec: SymmetrySpec | AdapterSpec,
    groups: Iterable[str] | None = None,
    layers: Iterable[int] | None = None,
    proper: bool = False,
    strength: float = 1.0,
    max_sweeps: int = 20,
    names: Sequence[str] | None = None,
    own_models: bool = False,
    min_gain: float | None = None,
) -> Mod:
    """A client mod that aligns the trained model to the one received, before anything else sees it.

    Parameters: `spec` and the options of `rotfed.align`; `names`, the parameters' names in order, needed only for the
    legacy API (NumPyClient), which sends arrays without names: `list(model.state_dict())`; `own_models`, for rounds in
    which clients answer with models that they trained apart, in place of what was sent. It allows a spec with the
    residual stream: both models are then folded (`rotfed.fold_norms`), and what leaves is folded, too, so that the mean
    is `rotfed.merge(models, spec, anchor=received)`; `min_gain`, as in `AlignedStrategy`. With an adapter's spec
    (`rotfed.load_adapter_spec`) the adapter's factors are turned to those received; `proper` and `strength` are those
    of `"rotation"`.

    Works with plain messages and, in the legacy layout, under secure aggregation. The first mod listed is outermost, so
    it comes last: `mods=[fixedclipping_mod, align_mod(spec)]`, `[LocalDpMod(...), align_mod(spec)]`,
    `[secaggplus_mod, align_mod(spec, names=...)]`. Raises a RotfedError inside the client, which reaches the server as
    that client's error, where the trained model cannot be aligned.
    """
    moved: Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Mapping[str, Tensor]]
    if isinstance(spec, AdapterSpec):
        refuse_options("an adapter", groups=groups, layers=layers, own_models=own_models or None, min_gain=min_gain)
        check_rotation(proper, strength, max_sweeps)

        def moved(trained: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            turned = aggregate_adapters([trained], spec, "rotation", None, received, proper=proper, strength=strength)
            return turned.params
    else:
        options = align_options(spec, groups, layers, proper, strength, max_sweeps)
        least = check_min_gain(MIN_GAIN if min_gain is None else min_gain)
        if not own_models and spec.residual is not None and spec.residual.folded:
            raise SpecError(
                "spec: expected one that works on models as they are trained, found one that rotates the residual "
                "stream, for which norms have to be folded; load it with residual='permutation' or without, pass "
                "own_models=True for models trained apart, or align on the server, with RotFedAvg(spec)"
            )

        def moved(trained: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            anchor = Anchor(folded(received, spec), spec)
            found = align_where_frames_differ([folded(trained, spec)], spec, "global", [1.0], anchor, least, **options)
            return found.alignments[0].params

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if message.metadata.message_type.split(".")[0] != "train" or not message.content.array_records:
            return call_next(message, context)
        _, record = _only_record(message, "message")
        received = _named(record, names)
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        key, returned = _only_record(reply, "reply")
        aligned = to_record(moved(match_params(_named(returned, names), received), received))
        if _is_legacy(returned):
            aligned = ArrayRecord({str(i): array for i, array in enumerate(aligned.values())})
        reply.content[key] = aligned
        return reply

    return mod


def _only_record(message: Message, role: str) -> tuple[str, ArrayRecord]:
    """The one ArrayRecord of a message, in either API's layout."""
    records = message.content.array_records
    for key in (_LEGACY_SENT, _LEGACY_RETURNED):
        if key in records:
            return key, records[key]
    if len(records) != 1:
        raise RecordError(f"align_mod: expected one ArrayRecord in the {role}, found {len(records)}")
    return next(iter(records.items()))


def _is_legacy(record: ArrayRecord) -> bool:
    return bool(record) and all(array.dtype == "" for array in record.values())


def _named(record: ArrayRecord, names: Sequence[str] | None) -> dict[str, Tensor]:
    params = to_state_dict(record)
    if not _is_legacy(record):
        return params
    if names is None:
        raise RecordError(
            "align_mod: expected the parameters' names for the legacy API, whose arrays have none, found none; "
            "pass names=list(model.state_dict())"
        )
    if len(names) != len(params):
        raise RecordError(
            f"align_mod: expected {len(names)} arrays, one for each of names, found {len(params)}; "
            "pass names=list(model.state_dict()) of the model that is trained"
        )
    return dict(zip(names, params.values(), strict=True))
