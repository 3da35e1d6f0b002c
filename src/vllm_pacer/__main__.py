"""`vllm-pacer check FILE`: says what a file of limits means, without starting a server."""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from io import TextIOWrapper

from vllm_pacer import __version__
from vllm_pacer.config import ConfigError, PacerConfig, config_from_file, format_rate
from vllm_pacer.quota import ANONYMOUS_USER


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the limits in a file; end with status 2 and the reason if it cannot be used."""
    parser = argparse.ArgumentParser(prog="vllm-pacer", description="Look after limits of users.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="say what a file of limits means")
    check.add_argument("file", metavar="FILE", help="what --user-output-rate-config would be given")
    try:
        config = config_from_file(parser.parse_args(arguments).file)
    except ConfigError as error:
        parser.exit(2, f"vllm-pacer: {error}\n")
    try:
        _print("".join(f"{fact}\n" for fact in facts(config)))
    except OSError as error:
        # What is left in the buffer must not be tried again at the end of the process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # else nobody wants to read the rest
            parser.exit(2, f"vllm-pacer: cannot print: {error.strerror}\n")
    return 0


def _print(text: str) -> None:
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name may be in any script
    sys.stdout.write(text)
    sys.stdout.flush()


def facts(config: PacerConfig) -> Iterator[str]:
    """Yield what holds under a configuration, one fact in a line."""
    anonymous = config.users.get(ANONYMOUS_USER, config.default)
    yield f"each user that is not named: {format_rate(config.default)}"
    yield f"all requests without a user ({ANONYMOUS_USER}): {format_rate(anonymous)}"
    for user, rate in config.users.items():
        if user != ANONYMOUS_USER:
            yield f"user {user}: {format_rate(rate)}"
    yield f"burst: {float(config.burst):g} s"
    yield f"fairness: {'on' if config.fairness else 'off'}"
    for user, weight in config.weights.items():
        yield f"weight of {user}: {float(weight):g}"
    for warning in config.warnings():
        yield f"warning: {warning}"


if __name__ == "__main__":
    raise SystemExit(main())
