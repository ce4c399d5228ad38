# SPDX-License-Identifier: Apache-2.0
"""The house: layout, one-way imports, public names, and what every file must have."""

import ast
import doctest
import functools
import graphlib
import importlib
import inspect
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import nnx_norm

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "nnx_norm"
CORE = sorted(p for p in PACKAGE.glob("*.py") if p.name != "__init__.py")
EXAMPLES = sorted((PACKAGE / "examples").rglob("*.py"))
SHIPPED = [PACKAGE / "__init__.py", *CORE, *EXAMPLES]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

TOP_LEVEL = "pyproject.toml README.md LICENSE nnx_norm tests benchmarks".split()

# The files that the design names, bottom to top. None reaches, through whatever helper
# files, another of its own level or one above.
LEVELS = [
    {"moments"},
    {"distributed", "modules"},
    {"normalizer", "rewards", "running"},
    {"interop"},
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}

COLLECTIVES = {
    "all_gather",
    "all_gather_invariant",
    "all_to_all",
    "broadcast_one_to_all",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "process_allgather",
    "psum",
    "psum_scatter",
}


def stem(path: Path) -> str:
    return str(path.relative_to(ROOT))


def per_file(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=stem)


def tracked() -> list[Path]:
    """Every file of the project, whether already committed or not."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listing.returncode == 0:
        found = (ROOT / name for name in listing.stdout.split("\0") if name)
    else:  # an unpacked sdist, with the metadata that its build added
        found = (p for p in ROOT.rglob("*") if p.name != "PKG-INFO")
    return sorted(p for p in found if p.is_file() and "__pycache__" not in p.parts)


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a tree without what stands under `if TYPE_CHECKING:`."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        guarded = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(
            child.test
        )
        if not guarded:
            yield from runtime_nodes(child)


@functools.cache
def imported(path: Path) -> set[str]:
    """Dotted names of the modules that a file imports when it runs."""
    package = ["nnx_norm", *path.relative_to(PACKAGE).parts[:-1]]
    names = set()
    for node in runtime_nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            # `from nnx_norm import moments` imports nnx_norm.moments.
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def own(path: Path) -> set[str]:
    """Names of the core files, and `examples`, that a file imports."""
    found = (name.split(".") for name in imported(path))
    return {parts[1] for parts in found if parts[0] == "nnx_norm" and len(parts) > 1}


@functools.cache
def import_graph() -> dict[str, set[str]]:
    """For each core file the core files that it imports."""
    modules = {p.stem for p in CORE}
    return {p.stem: own(p) & modules - {p.stem} for p in CORE}


def reached(name: str, graph: dict[str, set[str]]) -> set[str]:
    """Core files that importing one of them loads."""
    found, waiting = set(), [name]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def public(module: ModuleType) -> dict[str, object]:
    """Public names of a module but for other modules."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }


def defined(path: Path) -> list[str]:
    """Public functions and classes that a file defines."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    body = ast.parse(path.read_text()).body
    return [n.name for n in body if isinstance(n, kinds) and n.name[0] != "_"]


def test_top_level_holds_nothing_but_the_layout():
    top = {p.relative_to(ROOT).parts[0] for p in tracked()}
    assert {name for name in top if not name.startswith(".")} == set(TOP_LEVEL)


def test_package_holds_modules_examples_and_their_papers():
    other = {
        p.relative_to(PACKAGE).parts[0]
        for p in tracked()
        if p.is_relative_to(PACKAGE) and p.suffix != ".py"
    }
    folders = {p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name[0] != "_"}
    assert other - folders == {"py.typed", "CHANGELOG.md"}
    assert folders <= {"examples"}


@pytest.mark.parametrize("path", [p for p in CORE if p.stem in LEVEL], ids=stem)
def test_imports_point_one_way(path: Path):
    loaded = reached(path.stem, import_graph()) & LEVEL.keys()
    upward = {name for name in loaded if LEVEL[name] >= LEVEL[path.stem]}
    assert not upward, f"{path.name} loads {upward}, not below it"


def test_imports_have_no_cycle():
    graphlib.TopologicalSorter(import_graph()).prepare()  # raises CycleError


@per_file([PACKAGE / "__init__.py", *CORE])
def test_nothing_imports_the_examples(path: Path):
    assert "examples" not in own(path)


@per_file([PACKAGE / "__init__.py", *CORE])
def test_core_imports_jax_flax_and_numpy_only(path: Path):
    roots = {name.split(".")[0] for name in imported(path)}
    allowed = {"jax"} if path.stem == "moments" else {"jax", "flax", "numpy"}
    if path.stem in ("plot", "vector_env"):  # extras: `import nnx_norm` loads neither
        allowed |= {"gymnasium", "matplotlib"}
    assert roots - sys.stdlib_module_names - {"nnx_norm"} <= allowed


def test_importing_the_package_loads_no_extra():
    extras = "chex gymnasium gymnax matplotlib nnx_ppo nnx_norm.examples tqdm".split()
    code = f"import sys, nnx_norm; print([m for m in {extras} if m in sys.modules])"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stdout.strip(), run.stderr) == (0, "[]", "")


@per_file([p for p in SHIPPED if p.name != "distributed.py"])
def test_collectives_are_said_in_distributed_only(path: Path):
    tree = ast.parse(path.read_text())
    said = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    said |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    said |= {name.split(".")[-1] for name in imported(path)}
    assert not said & COLLECTIVES


def test_all_is_sorted_and_equals_the_public_names():
    assert nnx_norm.__all__ == sorted(public(nnx_norm))


def test_init_holds_no_code():
    body = ast.parse((PACKAGE / "__init__.py").read_text()).body
    kinds = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.Expr)
    odd = [ast.unparse(node) for node in body if not isinstance(node, kinds)]
    assigned = [n for n in body if isinstance(n, (ast.Assign, ast.AnnAssign))]
    assert not odd
    assert ["__all__" in ast.unparse(n) for n in assigned] == [True]


def test_every_name_of_the_core_modules_is_reexported_from_where_it_is_defined():
    for name in nnx_norm.__all__:
        module = getattr(nnx_norm, name).__module__
        assert module.startswith("nnx_norm."), f"{name} comes from {module}"
        assert "examples" not in module


@pytest.mark.parametrize("path", [p for p in CORE if p.stem in LEVEL], ids=stem)
def test_every_name_of_the_contract_shows_an_example(path: Path):
    module = importlib.import_module(f"nnx_norm.{path.stem}")
    parser = doctest.DocTestParser()
    bare = [
        name
        for name in defined(path)
        if not parser.get_examples(inspect.getdoc(getattr(module, name)) or "")
    ]
    assert not bare, f"no >>> in the docstring of {bare}"


def test_every_reexported_name_shows_an_example():
    parser = doctest.DocTestParser()
    docs = {n: inspect.getdoc(getattr(nnx_norm, n)) or "" for n in nnx_norm.__all__}
    assert not [name for name, doc in docs.items() if not parser.get_examples(doc)]


@per_file(SHIPPED)
def test_no_assert_in_the_package(path: Path):
    nodes = ast.walk(ast.parse(path.read_text()))
    lines = [node.lineno for node in nodes if isinstance(node, ast.Assert)]
    assert not lines, f"{path.name} asserts in lines {lines}; raise ValueError"


@per_file(CORE)
def test_every_module_has_its_tests(path: Path):
    assert (ROOT / "tests" / f"test_{path.stem.lstrip('_')}.py").is_file()


@per_file(SHIPPED)
def test_files_hold_one_concept(path: Path):
    assert len(path.read_text().splitlines()) <= 300


@per_file([p for p in tracked() if p.suffix in {".py", ".toml"} or p.name == "run"])
def test_first_lines_name_the_licence(path: Path):
    lines = path.read_text().splitlines()
    first = lines[1] if lines and lines[0].startswith("#!") else lines[0]
    assert first == "# SPDX-License-Identifier: Apache-2.0"


@per_file([p for p in tracked() if p.suffix != ".png"])
def test_no_file_names_a_path_of_one_machine(path: Path):
    found = re.findall(r"(?<![\w.])/(?:tmp|work|root|home)/\S*", path.read_text())
    assert not found


def test_licence_is_apache_2():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["project"]["license"] == "Apache-2.0"


def test_version_stands_in_one_place():
    version = PROJECT["project"]["version"]
    assert nnx_norm.__version__ == version
    said = [p.name for p in SHIPPED if f'"{version}"' in p.read_text()]
    assert not said, f"{said} say the version, which pyproject.toml has"
    assert f"\n## {version}" in (PACKAGE / "CHANGELOG.md").read_text()


def test_core_depends_on_jax_flax_and_numpy():
    names = {re.split(r"\W", d)[0] for d in PROJECT["project"]["dependencies"]}
    assert names == {"jax", "flax", "numpy"}


def readme_commands() -> list[str]:
    """Shell lines of the README that set everything up and run a module."""
    text = (ROOT / "README.md").read_text()
    return re.findall(r"^python3 -m venv .* -m .*$", text, re.MULTILINE)


def test_readme_has_one_command_to_train_and_one_to_test():
    modules = [re.findall(r" -m (\S+)", line)[-1] for line in readme_commands()]
    demo = ["nnx_norm.examples.ppo"] * (PACKAGE / "examples/ppo.py").exists()
    assert modules == [*demo, "pytest"]


def test_readme_commands_install_what_they_need():
    for line in readme_commands():
        extras = re.search(r"pip install -e '\.\[(.*)\]'", line)
        assert extras, line
        known = PROJECT["project"]["optional-dependencies"]
        assert set(extras[1].split(",")) <= set(known)
        assert "examples" in extras[1].split(",")


def test_ci_runs_the_test_command_of_the_readme():
    script = (ROOT / ".ci/run").read_text()
    pattern = re.search(r"^test_command=\$\(grep -E '(.*)' README.md\)$", script, re.M)
    assert pattern, ".ci/run takes its test command from README.md"
    lines = (ROOT / "README.md").read_text().splitlines()
    taken = [line for line in lines if re.search(pattern[1], line)]
    assert taken == [readme_commands()[-1]]
    assert 'bash -c "$test_command"' in script
    assert os.access(ROOT / ".ci/run", os.X_OK)
