"""The documentation agrees with the code, and its examples can be used.

What needs vLLM to be imported is read from its source instead, so these tests run without vLLM.
"""

import ast
import importlib.util
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import pytest

from vllm_pacer import ConfigError, OutputRateLimiter, PacerConfig, Quota, llm_kwargs
from vllm_pacer.__main__ import main
from vllm_pacer.config import (
    MAX_BURST_SECONDS,
    MAX_RATE,
    MAX_USER_NAME_LENGTH,
    MAX_WEIGHT,
    MIN_RATE,
    MIN_WEIGHT,
    check_user_name,
    config_from_file,
    config_from_flags,
    make_config,
)

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src/vllm_pacer"
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
NS_PER_MS = 1_000_000

DEFAULT_FLAG = "--default-user-output-tokens-per-second"
USERS_FLAG = "--user-output-tokens-per-second"
FILE_FLAG = "--user-output-rate-config"


def text_of(page: str) -> str:
    """Return a page, named by its path in the repository."""
    return (ROOT / page).read_text(encoding="utf-8")


def table(text: str, marker: str) -> list[list[str]]:
    """Return the cells below the head of the table between two markers, without back-ticks."""
    body = text.split(f"<!-- {marker} -->")[1].split(f"<!-- /{marker} -->")[0]
    return rows(body)[1:]


def table_after(text: str, heading: str) -> list[list[str]]:
    """Return all cells of the first table after a heading, its head included."""
    lines = text.split(f"\n{heading}\n")[1].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    end = next(n for n, line in enumerate(lines[start:], start) if not line.startswith("|"))
    return rows("\n".join(lines[start:end]))


def rows(body: str) -> list[list[str]]:
    """Return the cells of a table, the rule below its head left out."""
    cells = [
        [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        for line in body.strip().splitlines()
    ]
    return [row for row in cells if not set("".join(row)) <= set("-:")]


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """Give every code block in a language, with the name of its page."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            yield page.name, match[1]


def flag_values(words: list[str]) -> list[str | None]:
    """Return the values of this package's three flags on a command line."""
    return [
        words[words.index(flag) + 1] if flag in words else None
        for flag in (DEFAULT_FLAG, USERS_FLAG, FILE_FLAG)
    ]


def constants(tree: ast.Module) -> dict[str, object]:
    """Return the constants that a module assigns to a name."""
    return {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }


def defined_flags() -> dict[str, str]:
    """Return the flags that `engine/flags.py` defines, with their metavariables."""
    tree = ast.parse((SOURCE / "engine/flags.py").read_text(encoding="utf-8"))
    names = constants(tree)
    flags = {}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(".add_argument"):
            # The name is written as an f-string around one of the constants.
            name = next(node.id for node in ast.walk(call.args[0]) if isinstance(node, ast.Name))
            metavar = next(each.value for each in call.keywords if each.arg == "metavar")
            flags["--" + str(names[name]).replace("_", "-")] = ast.literal_eval(metavar)
    return flags


def defined_metrics() -> dict[str, str]:
    """Return the metrics that `engine/frontend.py` exposes, with their types."""
    tree = ast.parse((SOURCE / "engine/frontend.py").read_text(encoding="utf-8"))
    metrics = {}
    for call in ast.walk(tree):
        family = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
        if family.endswith("MetricFamily"):
            kind = family.removesuffix("MetricFamily").lower()
            name = ast.literal_eval(call.args[0])
            metrics[f"{name}_total" if kind == "counter" else name] = kind
    return metrics


def load_generator() -> ModuleType:
    """Import the script that writes the generated tables."""
    spec = importlib.util.spec_from_file_location("generate_tables", DOCS / "generate_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- tables ---------------------------------------------------------------------------------------


def test_the_flags_table_names_the_flags_that_exist() -> None:
    """Every flag of the parser stands in the table with its metavariable, and no other."""
    documented = {
        flag: value for flag, value, _ in table(text_of("docs/configuration.md"), "flags")
    }
    assert documented == defined_flags()
    assert set(documented) == {DEFAULT_FLAG, USERS_FLAG, FILE_FLAG}


def test_the_keys_table_names_the_fields_and_their_defaults() -> None:
    """The keys of the file are the fields of `PacerConfig`, in order and with their defaults."""
    documented = {key: value for key, value, _ in table(text_of("docs/configuration.md"), "keys")}
    assert list(documented) == list(PacerConfig.model_fields)
    for name, field in PacerConfig.model_fields.items():
        if field.is_required():
            assert documented[name] == "required"
        else:
            assert json.loads(documented[name], parse_float=Fraction) == field.default


def test_the_ranges_table_is_what_the_code_accepts() -> None:
    """The least and greatest values documented are the ones in the code."""
    documented = [
        (Fraction(lowest), Fraction(highest))
        for _, lowest, highest in table(text_of("docs/configuration.md"), "ranges")
    ]
    assert documented == [
        (MIN_RATE, MAX_RATE),
        (0, MAX_BURST_SECONDS),
        (MIN_WEIGHT, MAX_WEIGHT),
        (1, MAX_USER_NAME_LENGTH),
    ]


def test_the_metrics_table_names_the_metrics_that_exist() -> None:
    """Every metric stands in the table with its type, and no other."""
    documented = {name: kind for name, kind, _ in table(text_of("docs/operations.md"), "metrics")}
    assert documented == defined_metrics()


def test_every_mention_of_a_metric_of_ours_exists() -> None:
    """No page names a metric that is not exposed."""
    mentioned = {
        name
        for page in PAGES
        for name in re.findall(r"vllm_pacer:\w+", page.read_text(encoding="utf-8"))
    }
    assert mentioned == set(defined_metrics())


def test_the_modes_table_is_generated_from_the_refusals() -> None:
    """modes.md is up to date; if not, run `python docs/generate_tables.py`."""
    generator = load_generator()
    source = generator.REFUSALS.read_text(encoding="utf-8")
    page = text_of("docs/modes.md")
    assert page == generator.with_modes_table(page, source)
    assert len(generator.refused_modes(source)) == source.count("    Refusal(\n") > 0
    assert len(generator.supported_modes(source)) == source.count("    Support(") > 0


def test_every_supported_mode_has_a_proof() -> None:
    """The test that a row of the table names is there."""
    generator = load_generator()
    source = generator.REFUSALS.read_text(encoding="utf-8")
    for _, _, proof in generator.supported_modes(source):
        path, _, name = proof.partition("::")
        assert f"\ndef {name}(" in text_of(path), proof


def test_the_versions_named_are_the_ones_accepted() -> None:
    """README and seams agree on the lowest version and on the one above the highest."""
    seams = (SOURCE / "engine/seams.py").read_text(encoding="utf-8")
    lowest, below = re.findall(r'_VLLM = Version\("(\d+\.\d+\.\d+)', seams)
    named = re.search(r"vLLM (0\.\d+\.\d+) and (0\.\d+\.\d+),", text_of("README.md"))
    assert named is not None
    assert named[1] == lowest
    assert int(named[2].split(".")[1]) + 1 == int(below.split(".")[1])


def test_modules_import_only_from_those_above_them() -> None:
    """The layout table names every module, in an order in which imports point upwards only."""
    order = [row[0] for row in table_after(text_of("CONTRIBUTING.md"), "## Layout")[1:]]
    modules = {
        str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if path.name != "__init__.py"
    }
    assert set(order) == modules
    for number, module in enumerate(order):
        source = (SOURCE / module).read_text(encoding="utf-8")
        for imported in re.findall(r"from vllm_pacer\.([\w.]+) import", source):
            path = imported.replace(".", "/") + ".py"
            # The plugin's and the factory's imports stand inside functions; they point up as well.
            assert order.index(path) < number, f"{module} imports {path}"
        if not module.startswith("engine/"):
            assert not re.search(r"^\s*(import|from) vllm\b", source, re.MULTILINE)


# --- examples -------------------------------------------------------------------------------------


def test_commands_in_the_documentation_are_accepted() -> None:
    """Every `vllm serve` with limits that is shown gives a valid configuration."""
    commands = [
        shlex.split(command.replace("\\\n", " "))
        for _, block in blocks("bash")
        for command in re.findall(r"^vllm serve .*?(?<!\\)$", block, re.DOTALL | re.MULTILINE)
    ]
    assert len(commands) >= 3
    for command in commands:
        config_from_flags(*flag_values(command))


def test_make_commands_in_the_documentation_exist() -> None:
    """Every `make` command that is shown is a target of the Makefile."""
    targets = set(re.findall(r"^([a-z]+):", text_of("Makefile"), re.MULTILINE))
    shown = {
        command
        for page in PAGES
        for command in re.findall(r"(?:^|`)make ([a-z]+)", page.read_text("utf-8"), re.MULTILINE)
    }
    assert {"check", "test", "bench", "demo"} <= shown <= targets


@pytest.mark.parametrize(("page", "example"), blocks("yaml"))
def test_yaml_files_in_the_documentation_are_accepted(
    page: str, example: str, tmp_path: Path
) -> None:
    """Every YAML file that is shown is a valid configuration."""
    file = tmp_path / "limits.yaml"
    file.write_text(example, encoding="utf-8")
    config_from_file(file)


@pytest.mark.parametrize(("page", "example"), blocks("json"))
def test_json_in_the_documentation_is_accepted(page: str, example: str, tmp_path: Path) -> None:
    """Every JSON that is shown is a valid configuration, or a request with a valid user."""
    shown = json.loads(example)
    if "vllm_xargs" in shown:
        assert list(shown["vllm_xargs"]) == ["output_rate_user"]
        check_user_name(shown["vllm_xargs"]["output_rate_user"])
    else:
        file = tmp_path / "limits.json"
        file.write_text(example, encoding="utf-8")
        config_from_file(file)


def test_the_same_limits_are_shown_as_flags_as_yaml_and_as_json(tmp_path: Path) -> None:
    """The three first examples of the configuration page mean the same."""
    page = text_of("docs/configuration.md")
    command, as_yaml, as_json = (
        re.search(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[1]  # type: ignore[index]
        for language in ("bash", "yaml", "json")
    )
    (tmp_path / "limits.yaml").write_text(as_yaml, encoding="utf-8")
    (tmp_path / "limits.json").write_text(as_json, encoding="utf-8")
    by_flags = config_from_flags(*flag_values(shlex.split(command.replace("\\\n", " "))))
    assert by_flags == config_from_file(tmp_path / "limits.yaml")
    assert by_flags == config_from_file(tmp_path / "limits.json")


def test_what_check_prints_is_shown_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The meaning shown below the first file is what the command prints of it."""
    page = text_of("docs/configuration.md")
    example = re.search(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    shown = re.search(r"<!-- check -->\n```text\n(.*?)```", page, re.DOTALL)
    assert example is not None
    assert shown is not None
    (tmp_path / "limits.yaml").write_text(example[1], encoding="utf-8")
    assert main(["check", str(tmp_path / "limits.yaml")]) == 0
    assert capsys.readouterr().out == shown[1]


def test_the_field_shown_is_the_field_read() -> None:
    """The name of the field that carries the user is the one in `engine/identity.py`."""
    tree = ast.parse((SOURCE / "engine/identity.py").read_text(encoding="utf-8"))
    field = constants(tree)["FIELD"]
    requests = [block for _, block in blocks("bash") if "curl" in block]
    assert requests
    for request in requests:
        body = json.loads(shlex.split(request.replace("\\\n", " "))[-1])
        assert list(body["vllm_xargs"]) == [field]
    for _, block in blocks("python"):
        assert f'"{field}"' in block


def test_python_examples_call_what_exists() -> None:
    """Python examples compile, and what they give to `llm_kwargs` is a valid configuration."""
    calls = [
        {each.arg: ast.literal_eval(each.value) for each in node.keywords}
        for page, block in blocks("python")
        for node in ast.walk(ast.parse(block, page))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "llm_kwargs"
    ]
    accepted = set(llm_kwargs.__annotations__) - {"return"}
    assert calls
    for settings in calls:
        assert set(settings) <= accepted
        make_config(settings, "llm_kwargs")


def test_error_messages_are_quoted_as_they_are() -> None:
    """What is documented as bad input is refused, with the message that is documented."""
    documented = table(text_of("docs/configuration.md"), "errors")
    assert documented
    for arguments, message in documented:
        with pytest.raises(ConfigError, match=re.escape(message)):
            config_from_flags(*flag_values(shlex.split(arguments)))


# --- figures --------------------------------------------------------------------------------------


def test_the_worked_example_is_what_the_limiter_does() -> None:
    """Limit 10, burst 0.1 s, four streams, steps of 30 ms: the grants in the table."""
    steps, granted = table_after(text_of("docs/how-it-works.md"), "### A worked example")
    limiter = OutputRateLimiter(lambda _: Quota.per_second(10))
    for at, tokens in zip(steps[1:], granted[1:], strict=True):
        at_ms = int(at.removesuffix(" ms"))
        limiter.end_step(limiter.begin_step(at_ms * NS_PER_MS))
        assert sum(limiter.try_take("user") for _ in range(4)) == int(tokens), at
    assert [int(at.removesuffix(" ms")) for at in steps[1:]] == list(range(0, 301, 30))


@pytest.mark.parametrize(
    ("limit", "burst", "window", "most"),
    table_after(text_of("docs/how-it-works.md"), "## The upper bound")[1:],
)
def test_the_bounds_shown_are_met_and_reached(
    limit: str, burst: str, window: str, most: str
) -> None:
    """A user that asks all the time gets, in a window of this length, exactly what is shown."""
    config = PacerConfig(default=Fraction(limit), burst=Fraction(burst))
    limiter = OutputRateLimiter(config.quotas().of)
    window_ns = int(Fraction(window) * 1_000_000_000)
    tokens = 0
    # A window is closed at both ends, so its last instant counts.
    for now_ns in range(0, window_ns + 1, NS_PER_MS):
        limiter.end_step(limiter.begin_step(now_ns))
        while limiter.try_take("user"):
            tokens += 1
    assert tokens == int(most)
    assert tokens == (Fraction(window) + Fraction(burst)) * Fraction(limit) // 1 + 1


def test_the_example_of_a_short_burst_is_what_the_limiter_does() -> None:
    """Limit 100 and steps of 200 ms: 11 tokens a step, 55 a second; and 100 with a longer burst."""
    example = re.search(
        r"limit (\d+), burst 0\.1 s, steps of (\d+) ms\. A step grants at most (\d+) tokens, "
        r"so the user would get at most (\d+) tokens per second",
        text_of("docs/operations.md"),
    )
    assert example is not None
    limit, step_ms, per_step, per_second = map(int, example.groups())
    limiter = OutputRateLimiter(lambda _: Quota.per_second(limit))
    for number in range(10):
        limiter.end_step(limiter.begin_step(number * step_ms * NS_PER_MS))
        assert sum(limiter.try_take("user") for _ in range(1_000)) == per_step
    assert per_step * 1_000 == per_second * step_ms
    limiter.set_least_burst(step_ms * NS_PER_MS)
    tokens = 0
    for number in range(10, 60):
        limiter.end_step(limiter.begin_step(number * step_ms * NS_PER_MS))
        tokens += sum(limiter.try_take("user") for _ in range(1_000))
    assert tokens - limit * 50 * step_ms // 1_000 in (0, 1)


# --- links ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link is a file of this repository, and its anchor a heading there."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.is_file(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", each).lower().replace(" ", "-") for each in headings}
            assert anchor in slugs, target


def test_links_of_the_package_page_lead_into_the_repository() -> None:
    """Links in the packaged README are absolute; they and the project's own lead to real files."""
    metadata = tomllib.loads(text_of("pyproject.toml"))
    page = text_of("README.md")
    for each in metadata["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"][
        "substitutions"
    ]:
        page = re.sub(each["pattern"], each["replacement"], page)
    links = re.findall(r"\]\(([^)\s]+)\)", page)
    assert len(links) == len(re.findall(r"\]\(([^)\s]+)\)", text_of("README.md")))
    assert all(link.startswith("https://") for link in links)
    home = metadata["project"]["urls"]["Homepage"]
    raw = home.replace("github.com", "raw.githubusercontent.com")
    assert any(link.startswith(f"{raw}/main/") for link in links)
    for link in (*links, *metadata["project"]["urls"].values()):
        for start in (f"{home}/blob/main/", f"{raw}/main/"):
            if link.startswith(start):
                assert (ROOT / link.removeprefix(start).partition("#")[0]).is_file(), link
    assert "(docs/" not in page


def test_every_page_is_in_the_navigation() -> None:
    """mkdocs.yml lists each page of the documentation once."""
    listed = re.findall(r"^  - (\S+\.md)$", text_of("mkdocs.yml"), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in DOCS.glob("*.md"))
