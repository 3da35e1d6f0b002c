"""Start vLLM's API server many times, each with other arguments, in forks of one process.

Importing vLLM takes seconds, and these servers are meant to end before they serve. Reads a JSON
list of argument lists and prints a JSON list of exit statuses and printed texts.
"""

import json
import os
import sys
import tempfile


def start(arguments: list[str]) -> tuple[int, str]:
    """Run the API server's main function in a fork; return its exit status and what it printed."""
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            sys.argv = ["api_server", *arguments]
            _serve_and_exit()
        _, status = os.waitpid(child, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read().decode(errors="replace")


def _serve_and_exit() -> None:
    import traceback

    status = 0
    try:
        main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.entry import main

    assert AsyncEngineArgs
    print(json.dumps([start(arguments) for arguments in json.load(sys.stdin)]))
