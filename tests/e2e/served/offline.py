"""Generate offline with limits and print what happened, as JSON.

Usage: `python offline.py MODEL`. The environment says whether the engine has a process of its own.
"""

import json
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from vllm import LLM

RATES = {"slow": 10, "fast": 40, "frozen": 0.1}
TOKENS = {"slow": 81, "fast": 322}
STREAMS = {"slow": 1, "fast": 2}
FROZEN_SECONDS = 9.9
"""How long a user with 0.1 tokens/s and a burst of 0.1 s waits for its second token."""


def main(model: str) -> None:
    """Run two users beside each other, then one that waits; print tokens and processor time."""
    from vllm import LLM

    from vllm_pacer import llm_kwargs

    llm = LLM(
        model,
        load_format="dummy",
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=64,
        enforce_eager=True,
        **llm_kwargs(default=None, users=RATES),
    )
    generate(llm, ["nobody"], 4)  # the first steps are slower
    users = [user for user in TOKENS for _ in range(STREAMS[user])]
    tokens = {
        user: sum(len(output.outputs[0].token_ids) for output in outputs)
        for user, outputs in generate(llm, users).items()
    }
    print(json.dumps({"tokens": tokens, "paused_load": load_while_paused(llm)}))


def generate(llm: "LLM", users: list[str], max_tokens: int = 0) -> dict[str, list[Any]]:
    """Generate for each user in the list, and return the outputs by user."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=0,
            ignore_eos=True,
            max_tokens=max_tokens or TOKENS[user] // STREAMS[user],
            extra_args={"output_rate_user": user},
        )
        for user in users
    ]
    outputs = llm.generate([f"Hi {index}" for index in range(len(users))], params, use_tqdm=False)
    by_user: dict[str, list[Any]] = {}
    for user, output in zip(users, outputs, strict=True):
        by_user.setdefault(user, []).append(output)
    return by_user


def load_while_paused(llm: "LLM") -> float:
    """Return the processor time used per second, by all processes, while everybody is paused."""
    loads: list[float] = []

    def measure() -> None:
        # A worker spins for a second after its last step.
        time.sleep(2)
        before, start = cpu_seconds(), time.monotonic()
        time.sleep(FROZEN_SECONDS - 3)
        loads.append((cpu_seconds() - before) / (time.monotonic() - start))

    thread = threading.Thread(target=measure)
    thread.start()
    generate(llm, ["frozen"], 2)
    thread.join()
    return loads[0]


def cpu_seconds() -> float:
    """Return the processor time of this process and its children so far."""
    own = psutil.Process()
    times = [process.cpu_times() for process in [own, *own.children(recursive=True)]]
    return sum(each.user + each.system for each in times)


if __name__ == "__main__":
    main(sys.argv[1])
