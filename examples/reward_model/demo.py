"""From preference pairs to a policy, on a CPU in about two minutes: pairs, reward model, PPO.

    python examples/reward_model/demo.py --output /tmp/calm [key=value ...]

Made-up people like calm replies and dislike SHOUTED ones. Their pairs have the schema of hh-rlhf, so every step is
the one that real pairs would take. The model is tiny and knows nothing: what it learns, it learns from the reward.
"""

import argparse
import json
import random
import string
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from paceline.cli import main as paceline

LETTERS = string.ascii_letters + ".!?"
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_model(folder, seed=1):
    """A Qwen2 of 60,000 random weights over single letters."""
    special = ["<pad>", "<end>", "<user>", "<assistant>"]
    vocabulary = {token: number for number, token in enumerate([*special, *LETTERS, "Ġ"])}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        unk_token="<pad>",
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=special[2:],
        chat_template=TEMPLATE,
    )
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_pairs(file, count, seed):
    """Replies of random words: chosen as they are, rejected in capitals."""
    rng = random.Random(seed)

    def words():
        return " ".join("".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 5))) for _ in range(3))

    with file.open("w") as stream:
        for _ in range(count):
            prompt, reply = f"\n\nHuman: {words()}?\n\nAssistant:", words()
            stream.write(json.dumps({"prompt": prompt, "chosen": reply, "rejected": reply.upper()}) + "\n")


def main(output, overrides):
    """Make data, train the reward model, then PPO with it."""
    raw = output / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    make_model(output / "base")
    make_pairs(raw / "train.jsonl", 512, seed=1)
    make_pairs(raw / "test.jsonl", 32, seed=2)
    for purpose in ("rm", "rl"):
        prepared = str(output / purpose)
        paceline(["data", "full_hh_rlhf", "--input", str(raw), "--output", prepared, "--for", purpose])

    paceline(
        [
            "reward-model",
            f"data.train_files={output}/rm/train.parquet",
            f"data.val_files={output}/rm/test.parquet",
            "data.max_length=128",
            f"model.path={output}/base",
            f"trainer.default_local_dir={output}/reward_model",
            "optim.lr=3e-3",
            "trainer.logger=[console]",
        ]
    )

    return paceline(
        [
            "train",
            f"data.train_files={output}/rl/train.parquet",
            f"data.val_files={output}/rl/test.parquet",
            f"actor_rollout_ref.model.path={output}/base",
            "reward_model.enable=True",
            f"reward_model.model.path={output}/reward_model/model",
            f"trainer.default_local_dir={output}/run",
            "data.train_batch_size=64",
            "data.max_prompt_length=64",
            "data.max_response_length=12",
            "actor_rollout_ref.actor.ppo_mini_batch_size=32",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32",
            "actor_rollout_ref.actor.optim.lr=2e-3",
            "actor_rollout_ref.actor.strategy=local",
            "critic.optim.lr=2e-3",
            "critic.strategy=local",
            "reward_model.strategy=local",
            "trainer.threads_per_worker=1",
            "trainer.total_training_steps=20",
            "trainer.test_freq=10",
            "trainer.logger=[console]",
            *overrides,
        ]
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for everything that is made")
    arguments, further = parser.parse_known_args()
    raise SystemExit(main(arguments.output, further))
