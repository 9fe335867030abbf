"""The rules of docs/architecture.md, read off the source: who imports whom, sizes, names."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("search_r1", "retriever_server", "data_prep")
"""Packages that are installed; benchmarks and examples follow the size rules too."""

LAYERS = {
    "types": 0, "protocols": 0, "errors": 0, "prompts": 0, "config": 0, "config_checks": 0,
    "legacy_keys": 0, "llamafactory_keys": 0, "redaction": 0, "sft_config": 0,
    "algorithms": 1, "rewards": 1, "rollout": 1, "environments": 1, "data": 1,
    "engines": 2, "backends": 2,
    "cluster": 3,
    "trainer": 4, "report": 4,
    "compose": 5, "main": 5, "merge_adapter": 5, "evaluate": 5, "infer": 5, "sft": 5, "doctor": 5,
}  # fmt: skip
"""A module imports its own layer or one below."""

LIGHT_L4 = ("trainer", "report")
"""Packages of layer 4 that see layers 0 and 1 only ..."""
COMPOSERS = ("search_r1/trainer/build.py", "search_r1/trainer/build_sft.py")
"""... except for the files that compose."""

OWNERS = {
    "ray": ("search_r1/cluster/", "retriever_server/serve_ray.py"),
    "vllm": ("search_r1/engines/vllm_", "search_r1/engines/shm_weight_transfer.py"),
    "peft": ("search_r1/backends/lora.py",),
    "flash_attn": ("search_r1/backends/",),
    "wandb": ("search_r1/trainer/tracking.py",),
    "tensorboard": ("search_r1/trainer/tracking.py",),
    "hydra": ("search_r1/compose.py",),
    "omegaconf": ("search_r1/compose.py",),
    "httpx": ("search_r1/environments/", "search_r1/doctor.py", "retriever_server/"),
    "jinja2": ("search_r1/report/", "search_r1/data/"),
    "langgraph": ("search_r1/environments/",),
    "langchain_core": ("search_r1/environments/",),
    "jnius": ("retriever_server/lucene",),
    "faiss": ("retriever_server/",),
    "fastapi": ("retriever_server/",),
}
"""Heavy third-party packages and the only places that import them."""

NOT_PINNED = {"flash_attn"}
"""Optional packages outside requirements/cpu.txt."""

TORCH_FREE = ("search_r1/types.py", "search_r1/protocols.py", "search_r1/errors.py", "search_r1/config.py",
              "search_r1/prompts.py", "search_r1/rewards/", "search_r1/rollout/", "search_r1/environments/",
              "search_r1/report/")  # fmt: skip
"""At run time; annotations may name a Tensor."""

LAZY = {
    "search_r1/trainer/tracking.py": "wandb and tensorboard, only where configured",
    "search_r1/trainer/build.py": "only the engine and the launcher that the config chose",
    "search_r1/trainer/build_sft.py": "likewise",
    "search_r1/cluster/": "what a worker builds, in the worker",
    "search_r1/engines/vllm_": "vllm takes seconds to import",
    "search_r1/backends/": "peft, flash_attn and gguf, only where configured",
    "search_r1/environments/": "langgraph is an extra",
    "search_r1/data/": "pyarrow and jinja2, only where a file or a template is read",
    "search_r1/merge_adapter.py": "--help answers before torch is loaded",
    "search_r1/main.py": "a mistake in the configuration is told before torch is loaded",
    "search_r1/evaluate.py": "likewise",
    "search_r1/infer.py": "likewise",
    "search_r1/sft.py": "likewise",
    "search_r1/doctor.py": "it reports what does not import",
    "retriever_server/": "each back end with its own heavy package; a command line that answers --help at once",
    "data_prep/": "datasets, only when rows are fetched by name",
}
"""Files and packages with imports inside functions, with the reason. Nowhere else."""

TOP_LEVEL = (
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "Makefile", "setup.py", "pyproject.toml",
    "quickstart.sh", "train_ppo.sh", "train_grpo.sh", "evaluate.sh", "retrieval_launch.sh",
    "requirements/cpu.txt", "requirements/gpu.txt",
)  # fmt: skip


@dataclass(frozen=True)
class Import:
    file: str
    line: int
    target: str
    lazy: bool
    typing_only: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.target}"


def sources(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[Import]:
    """Every import of a file, with where it stands: in a function, or under TYPE_CHECKING."""

    def walk(node: ast.AST, lazy: bool, typing_only: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                for target in _targets(child):
                    yield Import(relative(path), child.lineno, target, lazy, typing_only)
            inside = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            typing_block = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from walk(child, inside, typing_only or typing_block)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), lazy=False, typing_only=False)


def _targets(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert node.level == 0, f"relative import on line {node.lineno}: name the package"
    base = node.module or ""
    submodule = [alias.name for alias in node.names if (ROOT / base.replace(".", "/") / f"{alias.name}.py").exists()]
    return [f"{base}.{name}" for name in submodule] or [base]


def layer_of(module: str) -> int:
    """Layer of a dotted name below search_r1; the package itself (its version) is the ground."""
    parts = module.split(".")
    return LAYERS[parts[1]] if len(parts) > 1 else 0


IMPORTS = [found for path in sources(*PRODUCT) for found in imports_of(path)]


def test_every_module_of_search_r1_has_a_layer() -> None:
    names = {module_name(path).split(".")[1] for path in sources("search_r1") if path.parent != ROOT / "search_r1"}
    names |= {path.stem for path in (ROOT / "search_r1").glob("*.py")} - {"__init__"}
    assert names <= set(LAYERS), f"no layer for {sorted(names - set(LAYERS))}"


def test_imports_point_down() -> None:
    upward = []
    for found in IMPORTS:
        if found.file.startswith("search_r1/") and found.target.split(".")[0] == "search_r1":
            source = module_name(ROOT / found.file)
            if layer_of(found.target) > layer_of(source):
                upward.append(f"{found} (L{layer_of(source)} -> L{layer_of(found.target)})")
    assert not upward, "\n".join(upward)


def test_only_the_composer_of_layer_4_knows_an_implementation() -> None:
    wrong = [
        str(found)
        for found in IMPORTS
        if found.file.startswith(tuple(f"search_r1/{package}/" for package in LIGHT_L4))
        and found.file not in COMPOSERS
        and found.target.startswith("search_r1.")
        and layer_of(found.target) in (2, 3)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_retrieval_server_and_the_trainer_never_import_each_other() -> None:
    wrong = []
    for found in IMPORTS:
        here, there = found.file.split("/")[0], found.target.split(".")[0]
        if there in PRODUCT and here != there and here != "data_prep":
            wrong.append(str(found))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", sorted(OWNERS))
def test_a_heavy_package_is_imported_by_its_owner_alone(package: str) -> None:
    wrong = [
        str(found)
        for found in IMPORTS
        if found.target.split(".")[0] == package
        and not found.typing_only
        and not found.file.startswith(OWNERS[package])
    ]
    assert not wrong, "\n".join(wrong)


def test_rewards_rollouts_and_environments_need_no_torch() -> None:
    heavy = ("torch", "transformers")
    wrong = [
        str(found)
        for found in IMPORTS
        if found.file.startswith(TORCH_FREE) and not found.typing_only and found.target.split(".")[0] in heavy
    ]
    assert not wrong, "\n".join(wrong)


def test_every_package_the_product_imports_is_pinned() -> None:
    pinned = set(re.findall(r"^([\w.-]+)==", (ROOT / "requirements/cpu.txt").read_text().lower(), re.MULTILINE))
    distributions = importlib.metadata.packages_distributions()
    loose = set()
    for found in IMPORTS:
        name = found.target.split(".")[0]
        if name in sys.stdlib_module_names or name in PRODUCT or name in NOT_PINNED or found.typing_only:
            continue
        if not pinned & {distribution.lower() for distribution in distributions.get(name, [])}:
            loose.add(str(found))
    assert not loose, "\n".join(sorted(loose))


def test_imports_stand_at_the_top_of_the_file() -> None:
    wrong = [str(found) for found in IMPORTS if found.lazy and not found.file.startswith(tuple(LAZY))]
    assert not wrong, "\n".join(wrong)


def test_files_stay_under_400_lines_and_functions_under_60() -> None:
    too_long = []
    for path in sources(*PRODUCT, "benchmarks", "examples"):
        text = path.read_text(encoding="utf-8")
        if (lines := text.count("\n")) >= 400:
            too_long.append(f"{relative(path)}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length >= 60:
                    too_long.append(f"{relative(path)}:{node.lineno} {node.name}: {length} lines")
    assert not too_long, "\n".join(too_long)


def test_the_product_stays_under_15500_lines_of_code() -> None:
    """Blank lines, comments and docstrings are free, so that nobody saves on them."""
    assert sum(lines_of_code(path.read_text(encoding="utf-8")) for path in sources(*PRODUCT)) < 15_500


def lines_of_code(text: str) -> int:
    prose = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(map(str.strip, text.splitlines()), start=1)
    return sum(bool(line) and not line.startswith("#") and number not in prose for number, line in lines)


def test_nothing_prints() -> None:
    wrong = []
    for path in sources(*PRODUCT):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                wrong.append(f"{relative(path)}:{node.lineno}")
    assert not wrong, f"log, or write to the console of an entry point: {wrong}"


def test_no_file_is_a_drawer_for_everything() -> None:
    drawers = re.compile(r"^(utils?|common|helpers?|misc)$")
    names = [path for path in sources(*PRODUCT, "tests") if drawers.match(path.stem) or drawers.match(path.parent.name)]
    assert not names, [relative(path) for path in names]


def test_importing_search_r1_is_light() -> None:
    code = "import search_r1, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert set(loaded.split()).isdisjoint({"torch", "ray", "vllm", "transformers", "numpy", "hydra", "httpx"})


def test_types_protocols_and_config_load_without_torch() -> None:
    code = "import search_r1.types, search_r1.protocols, search_r1.config, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert set(loaded.split()).isdisjoint({"torch", "ray", "vllm", "transformers"})


def test_the_house_is_complete_and_its_scripts_are_strict() -> None:
    assert [name for name in TOP_LEVEL if not (ROOT / name).is_file()] == []
    scripts = [name for name in TOP_LEVEL if name.endswith(".sh")] + [".ci/run", ".ci/setup.sh"]
    for name in scripts:
        assert os.access(ROOT / name, os.X_OK), f"{name} is not executable"
        assert "\nset -euo pipefail\n" in (ROOT / name).read_text(encoding="utf-8"), name


def test_scripts_read_only_variables_that_are_set() -> None:
    """`bash -n` for syntax; every $NAME is set in the script, comes with a default, or is the shell's own."""
    shared = (ROOT / ".ci/env.sh").read_text(encoding="utf-8")
    for path in sorted(ROOT.glob("*.sh")):
        text = path.read_text(encoding="utf-8")
        subprocess.run(["bash", "-n", str(path)], check=True)
        known = {"BASH_SOURCE", "SECONDS", *re.findall(r"\b([A-Za-z_]\w*)=", text + shared)}
        known |= set(re.findall(r"\bfor \(*(\w+)", text)) | set(re.findall(r"\blocal (\w+)", text))
        assert set(re.findall(r"\$\{?([A-Za-z_]\w*)(?!\w*[:-])", text)) <= known, path.name
