"""The rooms of the package: imports go one way, and no file is too long to read."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "sw_detectron"
# A room imports those before it, and itself.
ORDER = (
    *(
        "errors",
        "quiet",
        "files",
        "cli",
        "layers",
        "modeling",
        "data",
        "task",
        "config",
        "checkpoint",
    ),
    *("analysis", "report", "engine", "tasks", "detectron2_patches", "benchmark", "run"),
)
# What a task takes of another, on which it is built.
BUILT_ON = {"domain_adaptation": {"segmentation"}}
FILES = [p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py"]


def imported(path):
    """The package's modules that a file imports, as paths of names such as ("engine", "setup")."""
    here = path.relative_to(PACKAGE).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = here[: len(here) - node.level + 1]
            module = tuple(node.module.split(".")) if node.module else ()
            if module:
                yield base + module
            else:
                yield from (base + (alias.name,) for alias in node.names)


def room(parts):
    return parts[0]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    lower = ORDER[: ORDER.index(room(parts)) + 1]
    assert [name for name in imported(path) if room(name) not in lower] == []
    if parts[0] == "tasks" and len(parts) > 2:
        allowed = {parts[1]} | BUILT_ON.get(parts[1], set())
        tasks = {name[1] for name in imported(path) if name[0] == "tasks"}
        assert tasks <= allowed


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_circle_inside_of_a_room(path):
    start = path.relative_to(PACKAGE).with_suffix("").parts
    seen, todo = set(), [start]
    while todo:
        file = PACKAGE.joinpath(*todo.pop()).with_suffix(".py")
        for name in imported(file) if file.is_file() else ():
            assert name != start, f"{'.'.join(start)} imports itself through {file}"
            if name not in seen and name[0] == start[0]:
                seen.add(name)
                todo.append(name)


def test_layers_know_nothing_of_detectron2():
    for path in (PACKAGE / "layers").rglob("*.py"):
        assert "detectron2" not in path.read_text().replace("sw_detectron", ""), path


def test_files_can_be_read_in_one_go():
    lengths = {p: len(p.read_text().splitlines()) for p in PACKAGE.rglob("*.py")}
    assert {str(p): n for p, n in lengths.items() if n > 350} == {}
