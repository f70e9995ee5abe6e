"""Specs: axis strings, spec files, binding to configurations, and what a bound spec refuses."""

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rotfed
from rotfed.axes import Atom, Concat, cuts, parse_axes
from rotfed.layout import lay_out
from rotfed.library import bind_spec, spec_files
from rotfed.nearest import nearest_spec
from rotfed.specfile import ParamTable, parse_spec_file
from tests.models import _SMALL, EXAMPLES, assert_same, backbone, renamed, small_params, small_spec

Params = dict[str, Tensor]


def test_axis_strings_parse() -> None:
    heads, qk, vo = (Atom(name) for name in ("heads", "qk", "vo"))
    assert parse_axes("(heads qk*s/t) _") == ((heads, Atom("qk", (("s", False), ("t", True)))), (Atom("_"),))
    assert parse_axes("[heads qk | vo]") == ((Concat(((heads, qk), (vo,))),),)
    assert parse_axes("(heads [qk | vo])") == ((heads, Concat(((qk,), (vo,)))),)
    assert parse_axes("[heads [qk | vo] | vo]") == ((Concat(((heads, Concat(((qk,), (vo,)))), (vo,))),),)
    assert parse_axes("") == ()


def test_a_spec_is_shown_in_one_line() -> None:
    assert repr(small_spec()).count("\n") == 0 and len(repr(small_spec())) < 200 and "qk" in repr(small_spec())


def test_cuts_lead_to_views_of_every_part() -> None:
    sizes = {"heads": 2, "qk": 3, "vo": 4, "none": 0}
    (axis,) = parse_axes("[heads [qk | none | vo] | vo]")
    found = cuts(axis, 1, lambda atom: sizes[atom.name])
    assert [tuple(atom.name for atom in atoms) for atoms, _ in found] == [("heads", "qk"), ("heads", "vo"), ("vo",)]
    matrix = torch.arange(18).expand(5, 18).clone()
    for (_, steps), expected in zip(
        found, [[[0, 1, 2], [7, 8, 9]], [[3, 4, 5, 6], [10, 11, 12, 13]], [14, 15, 16, 17]], strict=True
    ):
        view = matrix
        for step in steps:
            view = view.narrow(step.dim, step.start, step.length).unflatten(step.dim, step.sizes)
        assert view[0].tolist() == expected
        view.zero_()
    assert not matrix.any()


MALFORMED = [
    "(a b",
    "a)",
    "[a | ]",
    "a*",
    "*a",
    "a b|c",
    "()",
    "a-b",
    "[a",
    "(a (b))",
    "a \N{ARABIC-INDIC DIGIT THREE}",
]
HOSTILE = ["[" * 600 + "a" + "]" * 600, "[a | a] " * 40, "9" * 5000]


@pytest.mark.parametrize("text", [*MALFORMED, *HOSTILE], ids=lambda text: text[:10])
def test_malformed_axis_strings_are_refused(text: str) -> None:
    with pytest.raises(rotfed.SpecError, match="axis string"):
        parse_axes(text)


RESIDUAL = "[residual]\nkind = 'none'\n"


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ('layers = "2"', "", "expected the keys layers"),
        ('layers = "2"', 'layers = "2"\nlayer = "2"', "unknown key 'layer'"),
        (
            'kind = "permutation"',
            'kind = "shuffle"',
            "expected one of orthogonal, centred_orthogonal, rope_planes, permutation, scale, sign",
        ),
        ('"embed" = "_ shared"', '"embed" = "_ sharde"', "'sharde' is neither in"),
        ('"embed" = "_ shared"', '"embed" = "_ shared*gone"', "'gone' after"),
        ('"embed" = "_ shared"', '"embed" = "_ (_ shared)"', "whole axis"),
        ('"embed" = "_ shared"', '"embed" = { axes = "_ shared", optional = true }', "cannot be optional"),
        ('"embed" = "_ shared"', '"embed" = "ff _"', "differs by layer"),
        ('"h.{layer}.up" = "ff unit"', '"h.{layer}.up" = "qk unit"', "differs by heads"),
        ('"h.{layer}.up" = "ff unit"', '"h.{layer}.up" = "ff*unit _"', "do not commute"),
        ("[sizes]", "[sizes", "expected TOML"),
        ('model_type = ["small"]', 'model_type = "small"', "model_type: expected a list"),
        ('kind = "permutation", axis = "d_ff"', 'kind = "permutation", axis = "d_fff"', "d_fff not in"),
        ('kind = "orthogonal", axis = "d_model"', 'kind = "orthogonal"', "expected the axis"),
        ("ff = {", "q = 5\nff = {", "groups.q: expected a table, found 5"),
        ("ff = {", 'q = { kind = "scale", per = ["layer", "d_model"] }\nff = {', "mixed by the group shared"),
        ('"embed" = "_ shared"', '"embed" = 5', "expected a table, found 5"),
        ('"embed" = "_ shared"', '"embed" = { when = "true" }', "params.embed: expected the keys axes, not found"),
        ('"embed" = "_ shared"', '"embed" = "shared shared"', "acts twice"),
        ('"embed" = "_ shared"', '"embed.{heads}" = "d_model shared"', "expected the size heads as the first axis"),
        ("[sizes]", "refuse = [3]\n[sizes]", "expected a table, found 3"),
        (
            '"embed" = "_ shared"',
            '"embed" = "_ (shared"',
            r"small.toml: params\.embed\.axes: axis string '_ .shared': expected '.'",
        ),
        ('"embed" = "_ shared"', '"embed" = { axes = "_ shared", stack = "a" }', "embed: expected no stack"),
        ('per = ["layer", "heads"] }\nqk', "per = [1] }\nqk", r"groups\.qk\.per\[0\]: expected a string, found 1"),
        (
            'per = ["layer", "heads"] }\nqk',
            'per = ["layer", ["heads"]] }\nqk',
            r"groups\.qk\.per\[1\]: expected a string, found \['heads'\]",
        ),
        ('per = ["layer", "heads"] }\nqk', 'per = ["layer", "layer"] }\nqk', "each index once.*found layer"),
        ('per = ["layer", "heads"] }\nqk', 'per = ["layer", "head_dim"] }\nqk', "group's own axis, found head_dim"),
        ('d_unit = "6"', "'2' = '6'", "'2': expected letters"),
        ("d_unit", "layer", "'layer': expected letters"),
        ("[sizes]", "[aliases]\nold = 3\n[sizes]", "aliases.old: expected a table"),
        ("[sizes]", "[aliases.old]\nh = 3\n[sizes]", "aliases.old.h: expected a string, found 3"),
        ("[sizes]", "[aliases.current]\n[sizes]", "aliases.current: expected a name of its own"),
        ("[sizes]", "[residual]\nkind = 'none'\n[sizes]", "residual: expected the keys folds, head"),
        ("[sizes]", f"{RESIDUAL}axes = ['x']\nhead = {{}}\nfolds = {{}}\n[sizes]", "residual.axes: expected names"),
        (
            "[sizes]",
            f"{RESIDUAL}head = {{}}\nfolds = {{ a = 'b' }}\n[sizes]",
            "residual.folds.a: expected a list, found 'b'",
        ),
        ("[sizes]", f"{RESIDUAL}folds = {{}}\nhead = {{ a = 3 }}\n[sizes]", "residual.head.a: expected a table"),
        ("[sizes]", f"{RESIDUAL}folds = {{}}\nhead = {{ a = 'x' }}\n[sizes]", "residual.head.a: 'x' is neither"),
        ("[sizes]", f"x = {'[' * 5000}", "expected TOML"),
        ("[sizes]", f"x = {'9' * 5000}\n[sizes]", "expected TOML"),
        ("[sizes]", 'refuse = [{ when = "true" }]\n[sizes]', "expected the keys because"),
    ],
)
def test_faults_in_a_spec_file_are_named(old: str, new: str, error: str) -> None:
    assert old in _SMALL
    with pytest.raises(rotfed.SpecError, match=error):
        parse_spec_file(_SMALL.replace(old, new), "small.toml")


WHOLE = f"""{_SMALL}
[aliases.old]
h = "layers"
[residual]
kind = "'permutation'"
[residual.folds]
norm = ["h.{{layer}}.up"]
[residual.head]
"head.weight" = {{ axes = "_ d_model", pooled = "_ _" }}
[[refuse]]
when = "false"
because = "never"
[[examples]]
model_type = "small"
"""
UP = 'params."h.{layer}.up"'


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        (
            'layers = "2"',
            'layers = "2"\nextra = 1',
            "unknown key 'extra'; expected some of aliases, examples, groups, ",
        ),
        (
            '{ kind = "permutation"',
            '{ extra = 1, kind = "permutation"',
            "groups.ff: unknown key 'extra'; expected some",
        ),
        ('"ff unit"', '{ axes = "ff unit", extra = 1 }', f"{UP}: unknown key 'extra'; expected some of axes, head, "),
        ("[residual]", "[residual]\nextra = 1", "residual: unknown key 'extra'; expected some of axes, folds, head, "),
        ("pooled", "extra", "residual.head.\"head.weight\": unknown key 'extra'; expected some of axes, pooled"),
        (
            "[[refuse]]",
            "[[refuse]]\nextra = 1",
            "refuse[0]: unknown key 'extra'; expected some of because, config, when",
        ),
        ("[[examples]]", "[[examples]]\nextra = 1", "examples[0]: unknown key 'extra'; expected some of classes, "),
        ('layers = "2"', "layers = 2", "layers: expected a string, found 2"),
        ('d_ff = "4"', "d_ff = 4", "sizes.d_ff: expected a string, found 4"),
        ('axis = "d_ff"', "axis = []", "groups.ff.axis: expected a string, found []"),
        ('"ff unit"', '{ axes = "ff unit", when = true }', f"{UP}.when: expected a string, found True"),
        ('"ff unit"', '{ axes = "ff unit", optional = 1 }', f"{UP}.optional: expected true or false, found 1"),
        ('h = "layers"', '"h.0" = 3', 'aliases.old."h.0": expected a string, found 3'),
        ("[residual]", "[residual]\nshared = 'no'", "residual.shared: expected true or false, found 'no'"),
        ('norm = ["h.{layer}.up"]', "norm = [3]", "residual.folds.norm[0]: expected a string, found 3"),
        ('pooled = "_ _"', "pooled = 3", 'residual.head."head.weight".pooled: expected a string, found 3'),
        ('because = "never"', "because = 3", "refuse[0].because: expected a string, found 3"),
        ("[[examples]]", "[[examples]]\nclasses = [3]", "examples[0].classes[0]: expected a string, found 3"),
        ("[[examples]]", "[[examples]]\nconfig = 3", "examples[0].config: expected a table, found 3"),
        ('\nmodel_type = "small"', '\nmodel_type = "s"', "examples[0].model_type: expected one of small, found 's'"),
    ],
)
def test_unknown_keys_and_wrong_types_are_named_in_every_table(old: str, new: str, error: str) -> None:
    assert parse_spec_file(WHOLE, "small.toml") and WHOLE.count(old) == 1
    with pytest.raises(rotfed.SpecError) as caught:
        parse_spec_file(WHOLE.replace(old, new), "small.toml")
    assert str(caught.value).startswith(f"small.toml: {error}")


@pytest.mark.parametrize(
    ("new", "error"),
    [
        ('layers = "0"', "small: expected at least one layer, found none"),
        ('layers = "10 ** 9"', "layers: expected at most 10,000, found 1,000,000,000"),
        *((f'layers = "2"\nstacks = "{stacks}"', "stacks: expected a list") for stacks in ("3", "none", "[[1]]")),
        ('layers = "2"\nstacks = "[1, 1]"', "stacks: expected a list .* each once"),
        ('layers = "2"\nstacks = "[]"', "expected at least one layer"),
        ('layers = "2"\naliases.old = { "h.{layer}.q" = "h.{layer}.k" }', "h.{layer}.q and .*k are both named"),
        ('layers = "2"\naliases.old = { "h.{layer}.k" = "h.{layer}.q" }', "h.{layer}.q and .*k are both named"),
    ],
)
def test_faults_that_a_configuration_brings_out_are_named(new: str, error: str) -> None:
    file = parse_spec_file(_SMALL.replace('layers = "2"', new), "small.toml")
    with pytest.raises(rotfed.SpecError, match=error):
        bind_spec(file, "small", "small", {})


# What the project promises, by the names that transformers gives them.
PROMISED = """
albert bart beit bert bloom camembert clip cohere deberta deberta-v2 deit dinov2 distilbert electra falcon gemma gemma2
gemma3_text gpt2 gpt_neo gpt_neox gptj granite llama mbart mistral mixtral modernbert mpnet mt5 olmo2 opt pegasus phi
phi3 qwen2 qwen2_moe qwen3 qwen3_moe roberta siglip stablelm swin t5 vit wav2vec2 whisper xlm-roberta
"""


def test_all_shipped_specs_parse_and_cover_what_is_promised() -> None:
    assert set(PROMISED.split()) <= set(rotfed.supported_model_types())
    listed = [(model_type, family) for family, file in spec_files().items() for model_type in file.model_type]
    assert listed == list(rotfed.supported_model_types().items())


def test_a_spec_is_loaded_without_the_files_of_other_families(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = []
    monkeypatch.setattr(rotfed.library, "parse_spec_file", lambda text, name: parsed.append(name) or parse(text, name))
    parse = parse_spec_file
    rotfed.library._spec_file.cache_clear()
    rotfed.load_spec({"model_type": "gpt2"})
    assert parsed == ["gpt2.toml"]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda name: f"vit.{name}",
        lambda name: f"module.vit.{name}",
        lambda name: f"_orig_mod.{name}",
        lambda name: f"my_backbone.{name}",
        lambda name: f"base_model.model.vit.{name}",
    ],
)
def test_any_prefix_is_found_and_what_is_outside_is_left_alone(wrap: Callable[[str], str]) -> None:
    spec, theta = backbone("vit")
    params = {**renamed(theta, wrap), "classifier.weight": torch.ones(2)}
    layout = lay_out(params, spec)
    assert layout.prefix == wrap("")
    assert layout.unmatched == ("classifier.weight",)
    moved = rotfed.random_transform(spec, torch.Generator().manual_seed(0)).apply(params)
    assert moved["classifier.weight"] is params["classifier.weight"]
    torch.testing.assert_close(rotfed.align(moved, theta, spec).params[wrap("layernorm.bias")], theta["layernorm.bias"])


QUERY = "layers.0.attention.q_proj.weight"


def jagged() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


SPOILS: dict[str, tuple[Callable[[Params], Any], str]] = {
    "missing": (
        lambda p: {n: t for n, t in p.items() if n != QUERY.replace("0", "1")},
        "layers.1.*expected by specs/vit",
    ),
    "unknown": (
        lambda p: {**p, "layers.0.attention.q_norm.weight": torch.ones(4)},
        "q_norm.weight: no entry in specs/vit",
    ),
    "adapter": (
        lambda p: {**p, "layers.0.attention.q_proj.lora_A.default.weight": torch.ones(2, 12)},
        "lora_A.*found an adapter's parameter.*merge_and_unload",
    ),
    "adapted layer": (
        lambda p: renamed(p, lambda n: n.replace("v_proj.", "v_proj.base_layer.")),
        r"v_proj\.base_layer.*found an adapter's parameter",
    ),
    "prefix tuning": (
        lambda p: {**renamed(p, lambda n: f"base_model.{n}"), "prompt_encoder.default.embedding.weight": torch.ones(3)},
        "prompt_encoder.*found an adapter's parameter",
    ),
    "tied layers": (
        lambda p: {**p, "layers.1.attention.q_proj.weight": p["layers.0.attention.q_proj.weight"]},
        r"layers\.1\.attention\.q_proj\.weight: shares its values with layers\.0",
    ),
    "overlapping layers": (
        lambda p: {
            **p,
            "layers.0.mlp.fc1.bias": (buffer := torch.zeros(15))[:10],
            "layers.1.mlp.fc1.bias": buffer[5:],
        },
        r"layers\.1\.mlp\.fc1\.bias: shares its values with layers\.0",
    ),
    "sparse": (lambda p: {**p, QUERY: torch.eye(12).to_sparse()}, "expected a dense"),
    "quantised tensor": (
        lambda p: {**p, QUERY: torch.quantize_per_tensor(p[QUERY].float(), 0.1, 0, torch.qint8)},
        "quantised",
    ),
    "jagged": (lambda p: {**p, QUERY: jagged()}, f"{QUERY}: .* a NestedTensor"),
    "lazy": (lambda p: {**p, QUERY: nn.parameter.UninitializedParameter()}, f"{QUERY}: .* an? UninitializedParameter"),
    "meta": (lambda p: {**p, QUERY: p[QUERY].to("meta")}, f"{QUERY}: expected values, found a meta tensor"),
    "odd name": (lambda p: {**p, 3: p[QUERY]}, "3: expected a string as a parameter's name"),
    "module": (lambda p: nn.Linear(2, 2), r"found Linear; pass its state_dict\(\)"),
    "list": (lambda p: list(p.items()), "expected a mapping from name to tensor, found list"),
    "none": (lambda p: None, "expected a mapping from name to tensor, found NoneType"),
    "numpy": (lambda p: {**p, QUERY: p[QUERY].numpy()}, "found ndarray"),
    "shape": (lambda p: {**p, QUERY: torch.ones(12, 13)}, r"expected shape \(12, 12\).*found \(12, 13\)"),
    "dimensions": (lambda p: {**p, QUERY: torch.ones(144)}, r"found \(144,\)"),
    "quantised": (lambda p: {**p, QUERY: torch.ones(12, 12, dtype=torch.int8)}, "found torch.int8.*dequantise"),
    "float8": (lambda p: {**p, QUERY: torch.ones(12, 12).to(torch.float8_e4m3fn)}, "float8.*dequantise"),
    "two backbones": (lambda p: {**p, **renamed(p, lambda n: f"b.{n}")}, "more than one place"),
    "nothing": (lambda p: {}, "no parameter at all"),
    "stranger": (lambda p: {"weight": torch.ones(1)}, "does not fit"),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", SPOILS)
def test_parameters_that_the_spec_does_not_cover_are_refused_by_name(name: str) -> None:
    spec, theta = backbone("vit")
    spoil, error = SPOILS[name]
    with pytest.raises(rotfed.SpecError, match=error):
        lay_out(spoil(theta), spec)
    with pytest.raises(rotfed.SpecError, match=error):
        rotfed.align(spoil(theta), theta, spec)


def test_views_of_one_buffer_that_do_not_overlap_are_parameters_like_others() -> None:
    spec, theta = backbone("vit")
    flat = torch.cat([tensor.reshape(-1) for tensor in theta.values()])
    cut = flat.split([tensor.numel() for tensor in theta.values()])
    params = {name: part.view(theta[name].shape) for name, part in zip(theta, cut, strict=True)}
    # Two columns of one matrix span the same memory, too.
    sides = torch.cat([params[QUERY], params["layers.0.attention.k_proj.weight"]], 1)
    params[QUERY], params["layers.0.attention.k_proj.weight"] = sides[:, :12], sides[:, 12:]
    transform = rotfed.random_transform(spec, torch.Generator().manual_seed(0))
    assert_same(transform.apply(params), transform.apply(theta))


def test_groups_and_layers_are_checked() -> None:
    spec, theta = backbone("vit")
    for options, error in [
        ({"groups": ["qk", "kq"]}, "kq not in specs/vit.toml"),
        ({"groups": "qk"}, "expected a list"),
        ({"layers": [0, 2]}, "expected numbers from 0 to 1"),
        ({"groups": 5}, "expected a list of names, found 5"),
        ({"layers": 1}, "write"),
        ({"layers": 1.5}, "expected layer numbers, found 1.5"),
        ({"layers": [[0]]}, "expected numbers from 0 to 1"),
    ]:
        with pytest.raises(rotfed.SpecError, match=error):
            rotfed.align(theta, theta, spec, rotfed.AlignOptions(**options))


def test_coupled_groups_form_one_component() -> None:
    assert small_spec().components(["qk", "qk_scale", "unit", "ff"]) == [("qk", "qk_scale"), ("unit", "ff")]
    assert backbone("gpt2")[0].components(["qk", "d_ff", "vo"]) == [("qk",), ("vo",), ("d_ff",)]


def test_transforms_of_the_small_spec_compose_and_invert() -> None:
    generator = torch.Generator().manual_seed(5)
    spec, params = small_spec(), small_params(generator)
    before = copy.deepcopy(params)
    one, two = (rotfed.random_transform(spec, generator) for _ in range(2))
    for found, expected in [
        (one.compose(two).apply(params), one.apply(two.apply(params))),
        (one.inverse().apply(one.apply(params)), params),
        (params, before),
    ]:
        for name in params:
            torch.testing.assert_close(found[name], expected[name])
    with pytest.raises(rotfed.TransformError, match="different specs"):
        one.compose(rotfed.random_transform(backbone("vit")[0]))
    for bad in (lambda: one.compose(3), lambda: rotfed.Transform(spec, None), lambda: rotfed.Transform(None, {})):
        with pytest.raises(rotfed.RotfedError, match=r"expected|different"):
            bad()
    wrong = (3, [1.0], one.elements["qk"].to("meta"), one.elements["qk"].to(torch.float8_e4m3fn))
    for element in (*wrong, one.elements["qk"].to_sparse()):
        with pytest.raises(rotfed.TransformError, match=r"qk: expected a dense torch\.Tensor"):
            rotfed.Transform(spec, {"qk": element})


def test_load_spec_takes_what_users_have(tmp_path: Path) -> None:
    model = EXAMPLES["vit"].model()
    expected = rotfed.load_spec(model)
    model.save_pretrained(tmp_path)

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    sources: list[Any] = [model.config, model.config.to_dict(), Wrapper(model), tmp_path, str(tmp_path)]
    for source in [*sources, tmp_path / "config.json"]:
        assert rotfed.load_spec(source) == expected


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"model_type": "mamba"}, "mamba: no spec for this model_type; 'rotfed specs' lists"),
        ({"hidden_size": 4}, "expected the key 'model_type'"),
        ({"model_type": "bert", "position_embedding_type": "relative_key"}, "must be 'absolute'"),
        ({"model_type": "big_bird", "is_decoder": True, "add_cross_attention": True}, "add_cross_attention is set"),
        ({"model_type": "albert", "inner_group_num": 2}, "inner_group_num"),
    ],
)
def test_configurations_without_the_symmetry_are_refused(values: dict[str, Any], error: str, tmp_path: Path) -> None:
    with pytest.raises(rotfed.SpecError, match=error):
        rotfed.load_spec(values)
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(rotfed.SpecError, match=error):
        rotfed.load_spec(tmp_path)


def test_bad_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(rotfed.SpecError, match="found nothing there"):
        rotfed.load_spec(tmp_path / "gone")
    with pytest.raises(rotfed.SpecError, match=r"no config\.json"):
        rotfed.load_spec(tmp_path)
    for text in ("{", "3", "null", "[1]", "", '{"model_type": ["bert"]}', '{"model_type": "bert", "hidden_size": "a"}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(rotfed.SpecError, match=r"expected (a transformers|a|the) (configuration|key)"):
            rotfed.load_spec(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(rotfed.SpecError, match="found another file"):
        rotfed.load_spec(tmp_path / "model.bin")
    with pytest.raises(rotfed.SpecError, match="File name too long"):
        rotfed.load_spec("a" * 300)
    for config in ({"quantization_config": 3}, {"num_hidden_layers": 10**9}, {"num_hidden_layers": 0}):
        with pytest.raises(rotfed.SpecError, match="expected"):
            rotfed.load_spec({"model_type": "bert", **config})
    with pytest.raises(rotfed.SpecError, match="expected at most 1,000,000 names, found 1,000,000,000 experts"):
        rotfed.load_spec({"model_type": "qwen2_moe", "num_experts": 10**9})
    with pytest.raises(rotfed.SpecError, match="without a 'config'"):
        rotfed.load_spec(nn.Linear(2, 2))
    with pytest.raises(rotfed.SpecError, match="found int"):
        rotfed.load_spec(3)


def test_optional_parameters_are_not_lacking_under_older_names_either() -> None:
    nearest = nearest_spec(EXAMPLES["data2vec-vision"].model().state_dict())
    assert nearest is not None and nearest.family == "beit" and "layernorm.weight" in nearest.lacking
    assert not any("relative_position_index" in name for name in nearest.lacking)


def test_a_wrong_spec_is_caught_with_its_parameter() -> None:
    model = EXAMPLES["gpt2"].model("AutoModelForCausalLM")
    file = spec_files()["gpt2"]
    # Reading Conv1D as a linear layer swaps its axes.
    swapped = {"h.{layer}.attn.c_proj.weight": ParamTable(parse_axes("d_model (heads vo/vo_scale)"))}
    file = dataclasses.replace(file, params={**file.params, **swapped})
    spec = bind_spec(file, "gpt2", "gpt2", model.config.to_dict())
    with pytest.raises(rotfed.FunctionChangedError, match=r"transformer\.h\.\d\.attn\.c_proj.* changed the outputs"):
        rotfed.check_spec(spec, model)
