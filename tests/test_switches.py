"""Configurations: a switch that changes the symmetry is honoured or refused, and what is unknown is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from typer.testing import CliRunner

import rotfed
from rotfed.checks import example_inputs, outputs
from rotfed.cli import app
from rotfed.examples import Example, examples
from rotfed.layout import lay_out
from rotfed.library import spec_files, supported_model_types

FIRST = {example.model_type: example for example in reversed(examples().values())}
BASE = transformers.PretrainedConfig().to_dict()

# Switches with which transformers cannot build or run some tiny model. Any other one has to be kept or refused.
NOT_BUILT = {
    *("add_cross_attention", "add_fpn", "is_encoder", "is_hybrid", "key_query_shared_bottleneck", "pre_norm"),
    *("use_absolute_embeddings", "use_bottleneck"),
}


def switches(example: Example) -> dict[str, Any]:
    """Every boolean of a configuration that its class adds to the common ones, the other way round."""
    values = example.config().to_dict()
    own = {name: not value for name, value in values.items() if isinstance(value, bool) and name not in BASE}
    return {**own, "tie_word_embeddings": not values.get("tie_word_embeddings", True)}


def verdict(example: Example, change: dict[str, Any]) -> str:
    """What becomes of a changed configuration: refused, kept, or not to be built by transformers."""
    try:
        model = example.model(**change)
        inputs = example_inputs(model, torch.Generator().manual_seed(0))
        outputs(model, dict(model.state_dict()), inputs)
    except Exception:  # whatever a model raises on a configuration that it was not made for
        return "not built"
    try:
        spec = rotfed.load_spec(model.config)
        lay_out(model.state_dict(), spec)
    except rotfed.SpecError:
        return "refused"
    # Raises FunctionChangedError where a switch changes the symmetry and the spec does not know.
    rotfed.check_spec(spec, model, inputs=inputs)
    return "kept"


@pytest.mark.parametrize("example", FIRST.values(), ids=lambda example: example.model_type)
def test_every_switch_of_a_configuration_is_honoured_or_refused(example: Example) -> None:
    found = {name: verdict(example, {name: value}) for name, value in switches(example).items()}
    assert {name for name, became in found.items() if became == "not built"} <= NOT_BUILT
    assert found["tie_word_embeddings"] == "kept"


REFUSALS = [
    pytest.param(family, number, id=f"{family}-{number}")
    for family, file in spec_files().items()
    for number in range(len(file.refuse))
]


@pytest.mark.parametrize(("family", "number"), REFUSALS)
def test_every_refusal_is_reached_by_its_own_example(family: str, number: int) -> None:
    file = spec_files()[family]
    rule = file.refuse[number]
    change = dict(rule.config)
    example = FIRST[change.pop("model_type", file.model_type[0])]
    with pytest.raises(rotfed.SpecError) as caught:
        rotfed.load_spec(example.config(**change))
    assert str(caught.value) == f"{example.model_type}: {rule.because}"
    assert "\n" not in rule.because and len(rule.because) > 20


def test_every_configuration_of_transformers_is_supported_or_clearly_refused(tmp_path: Path) -> None:
    known = supported_model_types()
    tried: dict[bool, list[str]] = {True: [], False: []}
    for model_type, config_class in CONFIG_MAPPING.items():
        try:
            values = json.loads(config_class().to_json_string(use_diff=False))
        except Exception:
            # Composites that cannot be built without their parts, packages that are missing here.
            continue
        (tmp_path / "config.json").write_text(json.dumps(values))
        result = CliRunner().invoke(app, ["check", str(tmp_path)])
        tried[values["model_type"] in known].append(model_type)
        assert result.exit_code in (0, 1), (model_type, result.exception)
        if result.exit_code == 0:
            assert values["model_type"] in known, model_type
            assert result.stdout.startswith(f"{values['model_type']}: specs/{known[values['model_type']]}.toml")
        else:
            assert result.stdout == "" and result.stderr.count("\n") == 1, (model_type, result.stderr)
            expected = f"refused: {values['model_type']}: "
            assert result.stderr.startswith(expected), (model_type, result.stderr)
            if values["model_type"] not in known:
                assert result.stderr.startswith(f"{expected}no spec for this model_type")
    assert len(tried[True]) >= 40 and len(tried[False]) >= 200
