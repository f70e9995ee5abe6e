"""Alignment on the client: a mod that lets nothing but an aligned model leave."""

from collections.abc import Callable, Sequence

from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import Tensor

from rotfed.adapters import AdapterSpec, aggregate_adapters
from rotfed.adapters.aggregate import check_rotation
from rotfed.align import DEFAULTS, AlignOptions
from rotfed.errors import RecordError, SpecError
from rotfed.flower.records import to_record, to_state_dict
from rotfed.flower.replies import match_params
from rotfed.flower.wrapper import check_is_adapter_spec, selected
from rotfed.frames_differ import MIN_GAIN, align_where_frames_differ, check_min_gain
from rotfed.matching import Anchor
from rotfed.residual import folded
from rotfed.spec import SymmetrySpec
from rotfed.tensors import Params

# The records in which Flower's legacy API (NumPyClient, SecAgg+) carries what it sends out and gets back.
_LEGACY_SENT, _LEGACY_RETURNED = "fitins.parameters", "fitres.parameters"


def align_mod(
    spec: SymmetrySpec,
    options: AlignOptions = DEFAULTS,
    min_gain: float = MIN_GAIN,
    own_models: bool = False,
    names: Sequence[str] | None = None,
) -> Mod:
    """A client mod that aligns the trained model to the one received, before anything else sees it.

    Parameters: `spec`, `options` and `min_gain` as in `AlignedStrategy`; `own_models`, for rounds in which clients
    answer with models that they trained apart, in place of what was sent. It allows a spec with the residual stream:
    both models are then folded (`rotfed.fold_norms`), and what leaves is folded, too, so that the mean is
    `rotfed.merge(models, spec, anchor=received)`; `names`, the parameters' names in order, needed only for the legacy
    API (NumPyClient), which sends arrays without names: `list(model.state_dict())`.

    Works with plain messages and, in the legacy layout, under secure aggregation. The first mod listed is outermost, so
    it comes last: `mods=[fixedclipping_mod, align_mod(spec)]`, `[LocalDpMod(...), align_mod(spec)]`,
    `[secaggplus_mod, align_mod(spec, names=...)]`. Raises a RotfedError inside the client, which reaches the server as
    that client's error, where the trained model cannot be aligned.
    """
    selected(spec, options, "adapter_mod(spec)")
    least = check_min_gain(min_gain)
    if not own_models and spec.residual is not None and spec.residual.folded:
        raise SpecError(
            "spec: expected one that works on models as they are trained, found one that rotates the residual "
            "stream, for which norms have to be folded; load it with residual='permutation' or without, pass "
            "own_models=True for models trained apart, or align on the server, with RotFedAvg(spec)"
        )

    def moved(trained: Params, received: Params) -> Params:
        anchor = Anchor(folded(received, spec), spec)
        found = align_where_frames_differ([dict(folded(trained, spec))], spec, "global", [1.0], anchor, least, options)
        return found.alignments[0].params

    return _mod(moved, names)


def adapter_mod(
    spec: AdapterSpec, reflections: bool = True, strength: float = 1.0, names: Sequence[str] | None = None
) -> Mod:
    """A client mod that turns the factors of a trained LoRA adapter to those received; otherwise as `align_mod`.

    Parameters: `spec`, from `rotfed.load_adapter_spec`; `reflections` and `strength`, those of `"rotation"` (see
    `rotfed.aggregate_adapters`).
    """
    check_is_adapter_spec(spec, "align_mod(spec)")
    check_rotation(reflections, strength)

    def turned(trained: Params, received: Params) -> Params:
        chosen = {"reflections": reflections, "strength": strength}
        return aggregate_adapters([trained], spec, "rotation", None, received, **chosen).params  # type: ignore[arg-type]

    return _mod(turned, names)


def _mod(moved: Callable[[Params, Params], Params], names: Sequence[str] | None) -> Mod:
    """Return a mod that puts the trained parameters, moved by what was received, into the reply."""

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
