"""The shape of the library: imports run one way, and only one part knows Flower."""

import ast
from pathlib import Path

import rotfed

ROOT = Path(rotfed.__file__).parent
LAYERS = [
    {"errors"},
    {"axes", "solvers", "tensors", "flower.reports"},
    {"groups", "adapters.factors"},
    {"spec", "specfile"},
    {"layout"},
    {"transform", "adapters.spec"},
    {"moments"},
    {"matching"},
    {"align"},
    {"mergers"},
    {"residual", "barrier", "adapters.aggregate", "adapters.client"},
    {"library", "adapters.__init__"},
    {"checks", "nearest"},
    {"examples"},
    {"frames", "learned"},
    {"frames_differ", "flower.records", "checkpoints.weights"},
    {"checkpoints.folder", "checkpoints.writing"},
    {"checkpoints.common", "checkpoints.models"},
    {"checkpoints.form", "checkpoints.measuring"},
    {"checkpoints.merging"},
    {"checkpoints.__init__"},
    {"adapters.folders"},
    {"flower.replies"},
    {"flower.spill"},
    {"flower.wrapper"},
    {"flower.mods", "flower.party"},
    {"flower.adapters", "flower.strategy", "flower.multi_party"},
    {"__init__", "flower.__init__"},
    {"cli.adapters", "cli.console"},
    {"cli.barrier", "cli.check", "cli.merge"},
    {"cli.__init__"},
]
HEIGHT = {module: height for height, layer in enumerate(LAYERS) for module in layer}


def modules() -> dict[str, ast.Module]:
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text())
        for path in ROOT.rglob("*.py")
        if path.parent.name != "specs"
    }


def imported(tree: ast.Module) -> set[str]:
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    return names | {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}


def test_every_module_has_its_place() -> None:
    assert set(modules()) == set(HEIGHT)


def test_imports_run_one_way() -> None:
    checked = 0
    for module, tree in modules().items():
        for name in imported(tree):
            if name.split(".")[0] != "rotfed":
                continue
            target = name.removeprefix("rotfed").lstrip(".") or "__init__"
            target = target if target in HEIGHT else f"{target}.__init__"
            assert target in HEIGHT, f"{module} imports {target}, which is not there"
            assert HEIGHT[target] < HEIGHT[module], f"{module} imports {target}"
            checked += 1
    assert checked > 20


def test_only_the_flower_layer_imports_flower_and_nothing_imports_the_apps() -> None:
    for module, tree in modules().items():
        packages = {name.split(".")[0] for name in imported(tree)}
        assert not packages & {"server", "client", "simulations", "tests"}, module
        assert "flwr" not in packages or module.startswith("flower."), module
