"""Run the benchmarks, store the results as JSON and put their tables into the documentation.

Usage: `python benchmarks/run.py [step_cost] [serving]`; all of them if none is named.
"""

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PAGE = HERE.parent / "docs" / "benchmarks.md"
BENCHMARKS = ("step_cost", "serving")
BEGIN, END = "<!-- generated -->\n", "<!-- /generated -->"

Result = dict[str, Any]


def circumstances(name: str) -> Result:
    """Return where and with what a result was measured."""
    from importlib.metadata import version

    import vllm

    return {
        "command": f"python benchmarks/run.py {name}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _output("git", "rev-parse", "--short", "HEAD"),
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
        parts += [make(result[part]) for part, make in _TABLES[name].items()]
    return "\n".join(parts)


def _table(title: str, header: list[str], rows: list[list[str]]) -> str:
    lines = [f"### {title}\n", "| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _scheduled(rows: list[Result]) -> str:
    return _table(
        "What limits that do not bind add to a step",
        ["Scheduling", "Requests", "Users", "Limits", "Stock µs", "Ours µs", "Added ns/request"],
        [
            [
                row["scheduling"],
                str(row["requests"]),
                str(row["users"]),
                "far away" if row["limited"] else "none",
                f"{row['stock_us']:.0f}",
                f"{row['ours_us']:.0f}",
                f"{row['added_ns_per_request']:.0f}",
            ]
            for row in rows
        ],
    )


def _paused(rows: list[Result]) -> str:
    return _table(
        "What paused residents add to a step",
        ["Paused", "Of users", "Running", "Alone µs", "Beside µs", "Added ns/paused"],
        [
            [
                str(row["paused"]),
                str(row["paused_users"]),
                str(row["running"]),
                f"{row['alone_us']:.0f}",
                f"{row['beside_us']:.0f}",
                f"{row['added_ns_per_paused']:.0f}",
            ]
            for row in rows
        ],
    )


def _flooded(rows: list[Result]) -> str:
    return _table(
        "The step beside a flood, against stock with only those that run",
        ["Waiting", "Residents", "Running", "Stock µs", "Ours µs", "Ratio"],
        [
            [
                f"{row['waiting']:,}",
                f"{row['residents']:,}",
                str(row["running"]),
                f"{row['stock_us']:.0f}",
                f"{row['ours_us']:.0f}",
                f"{row['ratio']:.2f}",
            ]
            for row in rows
        ],
    )


def _absent(rows: list[Result]) -> str:
    return _table(
        "What known users without requests add to a step",
        ["Known users", "Median µs", "Longest step µs"],
        [
            [
                f"{row['known_users']:,}",
                f"{row['median_added_us']:+.1f}",
                f"{row['longest_added_us']:+.0f}",
            ]
            for row in rows
        ],
    )


def _rates(rows: list[Result]) -> str:
    return _table(
        "Users at their limits, all at once, by the client's clock",
        ["Scheduling", "Limit, tokens/s", "Streams", "Tokens", "Measured, tokens/s"],
        [
            [
                row["scheduling"],
                str(row["limit"]),
                str(row["streams"]),
                str(row["tokens"]),
                f"{row['rate']:.2f}",
            ]
            for row in rows
        ],
    )


def _throughput(rows: list[Result]) -> str:
    return _table(
        "Throughput of the served engine, best of alternating runs",
        ["Scheduling", "Runs each", "Stock, tokens/s", "Ours, tokens/s", "Ratio"],
        [
            [
                row["scheduling"],
                str(len(row["tokens_per_second"]["stock"])),
                f"{row['best_stock']:.0f}",
                f"{row['best_ours']:.0f}",
                f"{row['ratio']:.3f}",
            ]
            for row in rows
        ],
    )


_TABLES = {
    "step_cost": {
        "scheduled": _scheduled,
        "paused": _paused,
        "flooded": _flooded,
        "absent": _absent,
    },
    "serving": {"rates": _rates, "throughput": _throughput},
}


def main(names: list[str]) -> None:
    """Run the named benchmarks and regenerate the page from all stored results."""
    RESULTS.mkdir(exist_ok=True)
    for name in names or BENCHMARKS:
        print(f"{name} …", flush=True)
        result = {"circumstances": circumstances(name), **import_module(name).measure()}
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
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
