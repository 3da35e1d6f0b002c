"""Run the benchmarks, store the results as JSON and put their tables into the documentation.

Usage: `python benchmarks/run.py [step_cost] [serving] [isolation] [sharing] [replay]`.
All if none is named.
"""

import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests" / "e2e"), str(HERE.parent / "tools")]  # for `served`
RESULTS = HERE / "results"
PAGE = HERE.parent / "docs" / "benchmarks.md"
BENCHMARKS = ("step_cost", "serving", "isolation", "sharing", "replay")
BEGIN, END = "<!-- generated -->\n", "<!-- /generated -->"

Result = dict[str, Any]


def circumstances(name: str) -> Result:
    """Return where and with what a result was measured."""
    from importlib.metadata import version

    import vllm

    return {
        "command": f"python benchmarks/run.py {name}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _output("git", "describe", "--always", "--dirty"),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "vllm": vllm.__version__,
        "vllm-pacer": version("vllm-pacer"),
    }


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=HERE, capture_output=True, text=True).stdout.strip()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def tables(results: dict[str, Result]) -> str:
    """Return the results as Markdown."""
    parts = []
    for name, result in results.items():
        where = result["circumstances"]
        parts.append(
            f"`{where['command']}` on {where['date'][:10]}: vLLM {where['vllm']}, Python "
            f"{where['python']}, {where['cores']} cores of {where['processor']}, at commit "
            f"{where['commit']}.\n"
        )
        parts += [table.of(result[part]) for part, table in _TABLES[name].items() if part in result]
    return "\n".join(parts)


@dataclass(frozen=True)
class Table:
    """A table of a result's rows: each column's header, and the format of its cells."""

    title: str
    columns: dict[str, str]

    def of(self, rows: list[Result]) -> str:
        """Return the table as Markdown; an older result may lack columns."""
        names = [cell.partition(":")[0].strip("{}") for cell in self.columns.values()]
        lines = [
            f"### {self.title}\n",
            "| " + " | ".join(self.columns) + " |",
            "|" + "---|" * len(self.columns),
        ]
        for row in rows:
            cells = [
                cell.format_map(row) if name in row else ""
                for name, cell in zip(names, self.columns.values(), strict=True)
            ]
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(lines) + "\n"

    def check(self, rows: list[Result]) -> None:
        """Raise `ValueError` if a column is empty: the benchmark calls it by another name."""
        names = [cell.partition(":")[0].strip("{}") for cell in self.columns.values()]
        if missing := [name for name in names if not any(name in row for row in rows)]:
            raise ValueError(f"{self.title}: no row has {', '.join(missing)}")


_BESIDE = {
    "First token p50, ms": "{first_token_p50_ms:.1f}",
    "p99, ms": "{first_token_p99_ms:.1f}",
    "Gap p50, ms": "{gap_p50_ms:.1f}",
    "Gap p99, ms": "{gap_p99_ms:.1f}",
}
_AGAINST_ONE_STREAM = {
    "First token p99 ÷ one stream": "{first_token_p99_ratio:.2f}",
    "Gap p99 ÷ one stream": "{gap_p99_ratio:.2f}",
}
_NEIGHBOUR = {"Neighbour, tokens/s": "{neighbour_tokens_per_second:.2f}", "Errors": "{errors}"}

_TABLES = {
    "step_cost": {
        "scheduled": Table(
            "What limits that do not bind add to a step",
            {
                "Scheduling": "{scheduling}",
                "Requests": "{requests}",
                "Users": "{users}",
                "Requests that change": "{changing}",
                "Limits": "{limits}",
                "Stock µs": "{stock_us:.0f}",
                "Ours µs": "{ours_us:.0f}",
                "Added ns/request": "{added_ns_per_request:.0f}",
            },
        ),
        "paused": Table(
            "What paused residents add to a step",
            {
                "Paused": "{paused}",
                "Of users": "{paused_users}",
                "Running": "{running}",
                "Alone µs": "{alone_us:.0f}",
                "Beside µs": "{beside_us:.0f}",
                "Added ns/paused": "{added_ns_per_paused:.0f}",
            },
        ),
        "flooded": Table(
            "The step beside a flood, against stock with only those that run",
            {
                "Waiting": "{waiting:,}",
                "Residents": "{residents:,}",
                "Running": "{running}",
                "Stock µs": "{stock_us:.0f}",
                "Ours µs": "{ours_us:.0f}",
                "Ratio": "{ratio:.2f}",
            },
        ),
        "crowded": Table(
            "A full house for which users wait with one request each",
            {
                "Waiting": "{waiting:,}",
                "Residents": "{residents}",
                "Stock µs": "{stock_us:.0f}",
                "Ours µs": "{ours_us:.0f}",
                "Added µs": "{added_us:.0f}",
            },
        ),
        "absent": Table(
            "What known users without requests add to a step",
            {
                "Known users": "{known_users:,}",
                "Median µs": "{median_added_us:+.1f}",
                "Longest step µs": "{longest_added_us:+.0f}",
            },
        ),
    },
    "serving": {
        "rates": Table(
            "Users at their limits, all at once, by the client's clock",
            {
                "Scheduling": "{scheduling}",
                "Limit, tokens/s": "{limit}",
                "Streams": "{streams}",
                "Tokens": "{tokens}",
                "Measured, tokens/s": "{rate:.2f}",
            },
        ),
        "throughput": Table(
            "Throughput of the served engine, best of alternating runs",
            {
                "Scheduling": "{scheduling}",
                "Runs each": "{runs}",
                "Stock, tokens/s": "{best_stock:.0f}",
                "Ours, tokens/s": "{best_ours:.0f}",
                "Ratio": "{ratio:.3f}",
            },
        ),
    },
    "isolation": {
        "streams": Table(
            "A quiet user beside a neighbour limited to 40 tokens/s",
            {
                "Neighbour's streams": "{streams}",
                **_BESIDE,
                **_AGAINST_ONE_STREAM,
                "Most steps that the quiet user's requests waited": "{most_steps_waited}",
                **_NEIGHBOUR,
                "Finished in the end": "{finished}",
            },
        ),
    },
    "sharing": {
        "long_prompts": Table(
            "A quiet user beside 64 prompts of 800 tokens, in chunks of 256",
            {
                "A chunk's step p50, ms": "{chunk_p50_ms:.1f}",
                "A chunk's step p99, ms": "{chunk_p99_ms:.1f}",
                "Most chunks in the steps to a first token": "{most_chunks_to_first}",
                "Most chunks in the steps between two tokens": "{most_chunks_in_gap}",
                **_BESIDE,
                **_NEIGHBOUR,
            },
        ),
        "full_cache": Table(
            "A quiet user while paused requests hold all KV blocks and slots are free",
            {"Neighbour's streams": "{streams}", **_BESIDE, **_AGAINST_ONE_STREAM, **_NEIGHBOUR},
        ),
        "ten_users": Table(
            "Nine quiet users beside a tenth with 64 streams, against the same with one",
            {
                "Calm, pooled p95, ms": "{calm_p95_ms:.1f}",
                "Flooded, pooled p95, ms": "{flooded_p95_ms:.1f}",
                "Ratio": "{pooled_p95_ratio:.2f}",
                "Greatest ratio of one user's p50": "{worst_p50_ratio:.2f}",
            },
        ),
        "shares": Table(
            "Nobody limited, all backlogged",
            {
                "User": "{user}",
                "Weight": "{weight}",
                "Tokens": "{tokens:,}",
                "Part": "{part:.3f}",
                "Of its share": "{of_its_share:.3f}",
            },
        ),
        "throughput": Table(
            "Throughput with weights, best of alternating runs",
            {
                "Runs each": "{runs}",
                "Stock, tokens/s": "{best_stock:.0f}",
                "Ours, tokens/s": "{best_ours:.0f}",
                "Ratio": "{ratio:.3f}",
            },
        ),
    },
    "replay": {
        "replays": Table(
            "A trace of 27 users, more than the engine can serve",
            {
                "Order": "{order}",
                "Average service difference": "{difference:.1f}",
                "÷ first come": "{of_first_come:.3f}",
                "Tokens/s": "{tokens_per_second:.1f}",
                "Finished": "{finished:,}",
            },
        ),
    },
}


def main(names: list[str]) -> None:
    """Run the named benchmarks and regenerate the page from all stored results."""
    RESULTS.mkdir(exist_ok=True)
    for name in names or BENCHMARKS:
        print(f"{name} …", flush=True)
        result = {"circumstances": circumstances(name), **import_module(name).measure()}
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
        for part, table in _TABLES[name].items():
            table.check(result[part])
    write_page()


def write_page() -> None:
    """Put the tables of all stored results into the documentation."""
    stored = {
        name: json.loads((RESULTS / f"{name}.json").read_text())
        for name in BENCHMARKS
        if (RESULTS / f"{name}.json").exists()
    }
    head, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(head + BEGIN + tables(stored) + END + rest.partition(END)[2])
    print(tables(stored))


if __name__ == "__main__":
    main(sys.argv[1:])
