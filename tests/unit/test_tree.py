"""The shape of the source tree: which folder may import which, and what code must not call.

The rules are functions over a folder; the last tests plant violations in a copy and see them found.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "src" / "trunkline"
MAX_MODULE_LINES = 500

# Folder -> what it may import beside the standard library, itself and `ALLOWED_ANYWHERE`.
# Modules at the top of the package are named with their suffix.
SHELL = {"core", "ports", "kv"}
ARROWS: dict[str, set[str]] = {
    "native": set(),
    "core": {"native"},
    "ports": {"core"},
    "kv": {"core", "ports"},
    "adapters": {"core", "ports"},
    "gateway": SHELL | {"native"},
    "control": SHELL,
    "worker": SHELL,
    "connectors": SHELL,
    "replay": SHELL,
    "sim": SHELL | {"replay"},
    "plan": SHELL | {"replay", "sim"},
    "errors.py": set(),
    "setting.py": set(),
    "written.py": set(),
    "foreign.py": set(),
    "config.py": {"setting.py", "config_access.py", "config_models.py", "config_discovery.py"},
    "config_access.py": {"setting.py"},
    "config_models.py": {"setting.py"},
    "config_discovery.py": {"setting.py"},
    "worker_url.py": set(),
    "observe.py": set(),
}
ALLOWED_ANYWHERE = {"errors.py", "config.py", "observe.py", "worker_url.py", "written.py"}
PURE = {"core", "native"}
"""Only the standard library beside their arrows: no settings, no errors of the edge, no logs."""

WIRING = {
    *(
        "wiring.py",
        "lifetime.py",
        "authority.py",
        "registry_store.py",
        "one_tenant.py",
        "rehearsal.py",
        "assembly.py",
        "cli.py",
    ),
    *(
        "settings.py",
        *("reload.py", "reload_record.py"),
        "engines.py",
        "completion.py",
        "effects.py",
        "leaf.py",
        "model_tables.py",
        "model_half.py",
        "reference.py",
        "worker_specs.py",
        "texts.py",
        "discovery_side.py",
        "fleet_side.py",
        "proxy_side.py",
    ),
    *(
        "parent.py",
        *("parent_admin.py", "parent_answers.py"),
        "parent_joins.py",
        "parent_dashboard.py",
        "child.py",
        "seat.py",
    ),
    *("monitoring.py", "panels.py", "alerts.py", "promql.py", "trace_side.py"),
    *("operations.py", "overview_side.py", "__main__.py", "__init__.py"),
    *("administration.py", "administration_reach.py", "administration_views.py"),
    *("administration_fleet.py", "administration_pace.py", "administration_audit.py"),
    "audit_answers.py",
    *(
        "admin_client.py",
        "tenant_commands.py",
        "tenant_answers.py",
        *("terminal.py", "words.py", "public_answers.py", "receipt_text.py"),
        *(
            "doctor.py",
            *("top.py", "top_frame.py"),
            *("doctor_here.py", "sound_settings.py", "checkup.py"),
            "explain.py",
            "errand_side.py",
            "tenant_side.py",
            "tenant_policies.py",
            "unfinished.py",
        ),
    ),
}
"""The top of a process. May import everything, but of these only `NAMES_ADAPTERS` the adapters."""
ENGINE = "connectors/vllm.py"
"""The top of what runs inside an engine, and the only module that may import one."""

THIRD_PARTY = {
    *("uvloop", "httptools", "msgspec", "fastokens", "tokenizers", "jinja2", "zmq"),
    *("prometheus_client", "starlette", "uvicorn", "matplotlib", "xxhash", "cryptography"),
    *("jwt", "nats", "opentelemetry"),
}
NAMES_ADAPTERS = {
    *("wiring.py", "texts.py", "worker_specs.py", "authority.py", "rehearsal.py", "cli.py"),
    *("discovery_side.py", "fleet_side.py", "registry_store.py", "parent.py", "child.py", ENGINE),
    "trace_side.py",
    "proxy_side.py",
}
ENGINES = {"vllm", "torch", "huggingface_hub"}
"""Of an engine's own environment, never of ours."""
MAY_LOOK_AT_THE_WORLD = NAMES_ADAPTERS | {"config.py", "settings.py", "native/_choice.py"}
WORLD = re.compile(
    r"""\b(?:time|_time)\.(?!struct_time)[a-z_]+\b
      | \brandom\.(?!Random\b)[a-z]\w*
      | (?:datetime\.)?(?:datetime|date)\.(?:now|utcnow|today)\b
      | \buuid\.?(?:uuid)?[14]\b
      | \bos\.(?:environ|getenv|urandom)\b
      | \bsecrets\.\w+""",
    re.VERBOSE,
)
WORLD_MODULES = {"time", "secrets", "uuid"}
"""Imported at all, they are a clock or a source of chance; `random` is for the type `Random`."""

UNSAFE_CALLS = {"eval", "exec", "hash", "compile", "__import__"}
UNSAFE_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
UNSAFE_ATTRIBUTES = {("yaml", "load"), ("yaml", "unsafe_load"), ("zmq", "recv_pyobj")}
BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}

Rule = Callable[[Path], Iterator[str]]


def modules(package: Path) -> Iterator[tuple[str, ast.Module, str]]:
    """Path inside the package, syntax tree and text of every module, in order."""
    for path in sorted(package.rglob("*.py")):
        text = path.read_text("utf-8")
        yield path.relative_to(package).as_posix(), ast.parse(text), text


def part_of(path: str) -> str:
    return path.split("/", 1)[0]


def imports_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def target_of(name: str, package: Path) -> str | None:
    """The folder or top module that `trunkline.x.y` names; None for the package itself."""
    parts = name.split(".")
    if len(parts) < 2 or parts[1] in ("", "__version__"):
        return None
    return parts[1] if (package / parts[1]).is_dir() else f"{parts[1]}.py"


def arrows_point_back(package: Path) -> Iterator[str]:
    for path, tree, _ in modules(package):
        source = part_of(path)
        if source in WIRING or path == ENGINE:
            continue
        allowed = ARROWS.get(source)
        if allowed is None:
            yield f"{path}: no rule for {source}; add it to ARROWS with a reason"
            continue
        allowed = allowed | {source} | (set() if source in PURE else ALLOWED_ANYWHERE)
        for line, name in imports_of(tree):
            if not name.startswith("trunkline"):
                continue
            target = target_of(name, package)
            if target is not None and target not in allowed:
                yield f"{path}:{line}: {source} imports {name}"


def adapters_are_named_outside_wiring(package: Path) -> Iterator[str]:
    for path, tree, _ in modules(package):
        if path in NAMES_ADAPTERS or part_of(path) == "adapters":
            continue
        for line, name in imports_of(tree):
            if name.startswith("trunkline.adapters"):
                yield f"{path}:{line}: only {sorted(NAMES_ADAPTERS)} name adapters"


def foreign_imports(package: Path) -> Iterator[str]:
    for path, tree, _ in modules(package):
        allowed: set[str] = set() if part_of(path) in PURE else THIRD_PARTY
        allowed = allowed | ENGINES if path == ENGINE else allowed
        for line, name in imports_of(tree):
            top = name.split(".")[0]
            if top == "":
                yield f"{path}:{line}: relative import"
            elif top != "trunkline" and top not in sys.stdlib_module_names | allowed:
                yield f"{path}:{line}: {top} is not among the dependencies allowed here"


def asks_the_world(package: Path) -> Iterator[str]:
    """Clocks, chance and environment, which belong into arguments."""
    for path, tree, _ in modules(package):
        if path in MAY_LOOK_AT_THE_WORLD or part_of(path) == "adapters":
            continue
        for line, name in imports_of(tree):
            is_chance = name.startswith("random.") and name != "random.Random"
            if is_chance or name.split(".")[0] in WORLD_MODULES:
                yield f"{path}:{line}: imports {name}"
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                found = WORLD.fullmatch(ast.unparse(node))
                if found is not None:
                    yield f"{path}:{node.lineno}: uses {found[0]}"


def core_is_impure(package: Path) -> Iterator[str]:
    """Sockets, files, loops and threads inside the pure folders."""
    banned = {"socket", "asyncio", "threading", "subprocess", "logging", "selectors", "tempfile"}
    for path, tree, _ in modules(package):
        if part_of(path) not in PURE:
            continue
        for line, name in imports_of(tree):
            if name.split(".")[0] in banned:
                yield f"{path}:{line}: imports {name}"
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("open", "print", "input"):
                yield f"{path}:{node.lineno}: calls {ast.unparse(node.func)}"
            if isinstance(node, ast.AsyncFunctionDef):
                yield f"{path}:{node.lineno}: async def {node.name}"


def unsafe_calls(package: Path) -> Iterator[str]:
    """S9: nothing that turns data into code, and no hash that differs between processes."""
    for path, tree, _ in modules(package):
        for line, name in imports_of(tree):
            if name.split(".")[0] in UNSAFE_MODULES:
                yield f"{path}:{line}: imports {name}"
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id in UNSAFE_CALLS:
                    yield f"{path}:{node.lineno}: calls {node.func.id}()"
            elif isinstance(node, ast.Attribute):
                base = ast.unparse(node.value)
                if (base, node.attr) in UNSAFE_ATTRIBUTES or node.attr.endswith("_pyobj"):
                    yield f"{path}:{node.lineno}: uses {base}.{node.attr}"


def open_binds(package: Path) -> Iterator[str]:
    """S9: no listener on all interfaces unless the operator writes it.

    An address that is only recognised (in a set, or compared with) or named in a sentence is fine.
    """
    address = re.compile(r"(?:\w+://)?(?:0\.0\.0\.0|\*)(?::\d*)?")
    for path, tree, _ in modules(package):
        recognised = {
            id(child)
            for node in ast.walk(tree)
            if isinstance(node, ast.Set | ast.Compare)
            for child in ast.walk(node)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Constant) or id(node) in recognised:
                continue
            value = node.value
            if isinstance(value, str) and value != "*" and address.fullmatch(value):
                yield f"{path}:{node.lineno}: names all interfaces"


def long_modules(folder: Path) -> Iterator[str]:
    """In tests as in sources."""
    for path, _, text in modules(folder):
        line_count = text.count("\n")
        if line_count > MAX_MODULE_LINES:
            yield f"{path}: {line_count} lines, at most {MAX_MODULE_LINES}"


def ill_shaped_modules(package: Path) -> Iterator[str]:
    for path, tree, text in modules(package):
        name = Path(path).stem
        if text.strip() and not ast.get_docstring(tree):
            yield f"{path}: no module docstring"
        if set(name.strip("_").split("_")) & BANNED_NAMES or part_of(path) in BANNED_NAMES:
            yield f"{path}: {name} says nothing about what is in it"


RULES: list[Rule] = [
    arrows_point_back,
    adapters_are_named_outside_wiring,
    foreign_imports,
    asks_the_world,
    core_is_impure,
    unsafe_calls,
    open_binds,
    long_modules,
    ill_shaped_modules,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps_the_rule(rule: Rule) -> None:
    assert sorted(rule(PACKAGE)) == []


def test_no_test_is_longer_than_a_module_may_be() -> None:
    assert list(long_modules(REPOSITORY / "tests")) == []


def test_no_two_modules_of_tests_have_one_name() -> None:
    """They are imported by their name alone: the second one would be taken for the first. A
    conftest is found by its folder.
    """
    found = (path.name for path in (REPOSITORY / "tests").rglob("*.py"))
    names = [name for name in found if name != "conftest.py"]
    assert [name for name in set(names) if names.count(name) > 1] == []


def test_every_folder_of_the_design_has_a_rule() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir()} - {"__pycache__"}
    assert {name for name in folders if list((PACKAGE / name).glob("*.py"))} <= set(ARROWS)


PLANTED: list[tuple[Rule, str, str]] = [
    (arrows_point_back, "core/x.py", "from trunkline.gateway import front"),
    (arrows_point_back, "core/x.py", "from trunkline import errors"),
    (arrows_point_back, "ports/x.py", "def f() -> None:\n    import trunkline.kv.store"),
    (arrows_point_back, "gateway/x.py", "from trunkline.control.registry import Registry"),
    (arrows_point_back, "worker/x.py", "from trunkline.native import chain_keys"),
    (arrows_point_back, "replay/x.py", "from trunkline.sim import clock"),
    (arrows_point_back, "adapters/x.py", "from trunkline.gateway import front"),
    (arrows_point_back, "novel/x.py", "x = 1"),
    (adapters_are_named_outside_wiring, "settings.py", "from trunkline.adapters import vllm"),
    (adapters_are_named_outside_wiring, "control/x.py", "import trunkline.adapters.vllm"),
    (foreign_imports, "core/x.py", "import msgspec"),
    (foreign_imports, "gateway/x.py", "import requests"),
    (foreign_imports, "gateway/x.py", "from . import front"),
    (foreign_imports, "connectors/x.py", "import torch"),
    (foreign_imports, "worker/x.py", "from vllm import config"),
    (arrows_point_back, "connectors/x.py", "from trunkline.worker import ticket"),
    (arrows_point_back, "gateway/x.py", "from trunkline.connectors import plan"),
    (adapters_are_named_outside_wiring, "connectors/x.py", "import trunkline.adapters.clock"),
    (asks_the_world, "gateway/x.py", "import time"),
    (asks_the_world, "gateway/x.py", "from time import monotonic"),
    (asks_the_world, "sim/x.py", "import random\nx = random.random()"),
    (asks_the_world, "sim/x.py", "from random import choice"),
    (asks_the_world, "core/x.py", "import os\nx = os.environ"),
    (asks_the_world, "core/x.py", "import os\nx = os.urandom(3)"),
    (asks_the_world, "core/x.py", "import datetime\nx = datetime.datetime.now()"),
    (asks_the_world, "core/x.py", "from datetime import datetime\nx = datetime.now()"),
    (asks_the_world, "control/x.py", "import uuid\nx = uuid.uuid4()"),
    (asks_the_world, "control/x.py", "import secrets"),
    (core_is_impure, "core/x.py", "import asyncio"),
    (core_is_impure, "core/x.py", "x = open('/etc/hosts')"),
    (core_is_impure, "core/x.py", "async def f() -> None: ..."),
    (unsafe_calls, "adapters/x.py", "import pickle"),
    (unsafe_calls, "adapters/x.py", "from marshal import loads"),
    (unsafe_calls, "adapters/x.py", "import yaml\nyaml.load('x')"),
    (unsafe_calls, "adapters/x.py", "def f(s):\n    return s.recv_pyobj()"),
    (unsafe_calls, "core/x.py", "x = hash('a')"),
    (unsafe_calls, "core/x.py", "x = eval('1')"),
    (unsafe_calls, "core/x.py", "exec('1')"),
    (open_binds, "config.py", "host = '0.0.0.0'"),
    (open_binds, "config.py", "endpoint = 'tcp://*:5557'"),
    (open_binds, "worker/x.py", "address = f'tcp://0.0.0.0:{1}'"),
    (long_modules, "core/x.py", "x = 1\n" * 500),
    (ill_shaped_modules, "core/utils.py", "x = 1"),
    (ill_shaped_modules, "gateway/pool_manager.py", "x = 1"),
]


@pytest.mark.parametrize(("rule", "path", "code"), PLANTED)
def test_a_planted_violation_is_found(rule: Rule, path: str, code: str, tmp_path: Path) -> None:
    for folder in ARROWS:
        if not folder.endswith(".py"):
            (tmp_path / folder).mkdir()
    planted = tmp_path / path
    planted.parent.mkdir(exist_ok=True)
    planted.write_text(f'"""A module."""\n\n{code}\n')
    assert any(found.startswith(path) for found in rule(tmp_path))


def test_a_module_without_docstring_is_found_and_an_empty_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("x = 1\n")
    (tmp_path / "__init__.py").write_text("")
    assert list(ill_shaped_modules(tmp_path)) == ["x.py: no module docstring"]


@pytest.mark.parametrize(
    "code",
    [
        "import random\n\ndef f(draw: random.Random) -> float:\n    return draw.random()",
        "from random import Random\nx = Random(1).random()",
        "def f(loop, first_byte_time):\n    return loop.time() - first_byte_time",
        "from trunkline.core.keys import chain\nfrom trunkline import errors, config",
        "import datetime\nx = datetime.timedelta(days=1)",
        "class Key:\n    def __hash__(self) -> int:\n        return 1",
        "x = '10.0.0.0/8'",
        "def f(host: str) -> bool:\n    return host in {'0.0.0.0', '::'}",
    ],
)
def test_good_code_passes_every_rule(code: str, tmp_path: Path) -> None:
    for folder in ("gateway", "core"):
        (tmp_path / folder).mkdir()
    (tmp_path / "gateway" / "x.py").write_text(f'"""A module."""\n\n{code}\n')
    assert [found for rule in RULES for found in rule(tmp_path)] == []
