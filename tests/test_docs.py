"""What the documentation names exists: links, configs, tools, their flags, tests, Python names."""

import contextlib
import importlib
import io
import itertools
import re
import runpy
import sys
from pathlib import Path

import pytest
import yaml

import sw_detectron
from sw_detectron.config import config_folder, find_config

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(page: Path) -> list[str]:
    """The lines of a page's code, fenced and inline; continued lines are one."""
    text = page.read_text()
    fenced = "\n".join(FENCED.findall(text)).replace("\\\n", " ").splitlines()
    return [*fenced, *re.findall(r"`([^`]+)`", FENCED.sub("", text))]


def alternatives(pattern: str) -> list[str]:
    """`a_{x,y}_*` as a shell expands its braces."""
    parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
    return ["".join(choice) for choice in itertools.product(*parts)]


@each_page
def test_links_lead_somewhere(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", page.read_text())):
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        if "://" in target:
            continue
        if not path.is_file() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert not broken


def test_every_page_is_in_the_index():
    folder = ROOT / "docs"
    index = (folder / "README.md").read_text()
    others = {page.name for page in folder.glob("*.md")} - {"README.md"}
    assert [name for name in sorted(others) if f"({name})" not in index] == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@each_page
def test_configs_are_there(page):
    code = "\n".join(commands(page))
    named = set(re.findall(r"(?:--config|--config-file|_BASE_:) +(\S+\.(?:yaml|py))", code))
    # In tables, with * for any schedule and {a,b} for one of several.
    named |= set(re.findall(r"^[\w{},*]+_[\w{},*]*\.yaml$", code, re.MULTILINE))
    for name in itertools.chain.from_iterable(map(alternatives, sorted(named))):
        if "*" in name:
            assert any(config_folder().rglob(name)), name
        else:
            find_config(name)  # raises if there is none


@each_page
def test_scripts_and_tests_are_there(page):
    code = "\n".join(commands(page))
    paths = set(re.findall(r"(?<![\w/])(?:tools|tests)/\w+\.py", code))
    assert [path for path in sorted(paths) if not (ROOT / path).is_file()] == []


@pytest.fixture(scope="module")
def flags_of():
    """The flags that a tool's --help lists, by the tool and its sub-command."""
    known = {}

    def flags(tool: str, *subcommand: str) -> set[str]:
        if (tool, subcommand) not in known:
            text, arguments = io.StringIO(), sys.argv
            try:
                sys.argv = [tool, *subcommand, "--help"]
                with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
                    runpy.run_path(str(ROOT / tool), run_name="__main__")
            finally:
                sys.argv = arguments
            description, _, _ = text.getvalue().partition("\nexamples:")
            known[tool, subcommand] = set(re.findall(r"--[a-z][\w-]*", description))
        return known[tool, subcommand]

    return flags


@each_page
def test_tools_know_the_flags(page, flags_of):
    unknown = []
    for command in commands(page):
        if found := re.search(
            r"(?<![\w/])(tools/\w+\.py)((?: +layers| +models| +flops)?)", command
        ):
            used = re.findall(r"(?<=\s)--[a-z][\w-]*", command[found.end() :].partition("#")[0])
            if used:
                known = flags_of(found[1], *found[2].split())
                unknown += [(found[1], flag) for flag in used if flag not in known]
    assert not unknown


@each_page
def test_python_names_are_there(page):
    for command in commands(page):
        if found := re.match(r"sw_detectron((?:\.\w+)+)(?:\(.*\))?$", command):
            thing, name = sw_detectron, "sw_detectron"
            for part in found[1][1:].split("."):
                name = f"{name}.{part}"
                if not hasattr(thing, part):
                    importlib.import_module(name)
                thing = getattr(thing, part)


def test_the_citation_is_that_of_this_version_and_of_the_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == sw_detectron.__version__
    assert citation["license"] == "Apache-2.0"
    authors = [author["family-names"] for author in citation["preferred-citation"]["authors"]]
    assert authors == ["Pan", "Zhan", "Shi", "Tang", "Luo"]
