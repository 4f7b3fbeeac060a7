"""Make the checkpoints that the demos start from: write the model folder, run ``hybridrl sft`` on it, store in bf16.

    python scripts/make_demo_checkpoints.py [calc] [reverse]

The model folder holds an architecture and a tokenizer but no weights: those are drawn from the configuration's seed.
Making a checkpoint again replaces it, once the new one is whole.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from hybridrl.data.tasks.demo_tokenizer import BOS, EOS, PAD, VOCAB_SIZE, demo_vocabulary, write_demo_tokenizer

DEMO = Path(__file__).resolve().parent.parent / "configs" / "demo"
TASKS = ("calc", "reverse")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", type=_task, default=TASKS, help="both when none is named")
    tasks = parser.parse_args().tasks
    write_model_folder(DEMO / "model")
    for task in tasks:
        make_checkpoint(task)


def _task(name: str) -> str:
    if name not in TASKS:
        raise argparse.ArgumentTypeError(f"got {name!r}, expected one of {', '.join(TASKS)}")
    return name


def write_model_folder(folder: Path) -> None:
    """Write the Qwen3-MoE configuration of the demos and its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model_config(), indent=2) + "\n", encoding="utf-8")
    write_demo_tokenizer(folder)


def model_config() -> dict[str, object]:
    """Return a Qwen3-MoE of 1.005 million parameters: 4 layers of 8 experts, 2 of them active."""
    vocabulary = demo_vocabulary()
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 256,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "dtype": "bfloat16",
        "pad_token_id": vocabulary[PAD],
        "bos_token_id": vocabulary[BOS],
        "eos_token_id": vocabulary[EOS],
    }


def make_checkpoint(task: str) -> None:
    """Run the supervised stage of one task and put its result under ``configs/demo/checkpoints``."""
    with tempfile.TemporaryDirectory() as scratch:
        trained = Path(scratch) / task
        overrides = [f"sft.output_path={trained}", f"runs_dir={scratch}/runs"]
        command = [sys.executable, "-m", "hybridrl.cli.main", "sft", str(DEMO / f"{task}-sft.yaml"), *overrides]
        subprocess.run(command, check=True)
        store_in_bfloat16(trained)
        target = DEMO / "checkpoints" / task
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(trained, target)
    print(f"{target}: {sum(file.stat().st_size for file in target.iterdir()):,} bytes")


def store_in_bfloat16(folder: Path) -> None:
    """Rewrite a checkpoint's weights in half the bytes."""
    import torch
    from safetensors.torch import load_file, save_file

    for path in folder.glob("*.safetensors"):
        tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})


if __name__ == "__main__":
    main()
