"""PPO steps of TRL 1.16.0 on a policy, a reward model and prompts from files; notes when each ended.

Runs in an environment of its own: see `make bench-peers`.

    python trl_ppo.py MATERIAL WORKLOAD PROMPTS_PER_STEP THREADS FOLDER
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer

RESPONSE_TOKENS = 64  # the longest of the workload


class StepClock(TrainerCallback):
    def __init__(self, file):
        self.file = file

    def on_step_end(self, *args, **kwargs):
        with self.file.open("a") as ends:
            ends.write(f"{time.time()}\n")


def main(material, workload, prompts_per_step, threads, output_folder):
    torch.set_num_threads(int(threads))
    folder = Path(material)
    prompts = json.loads((folder / f"{workload}.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy", padding_side="left")
    data = Dataset.from_dict({"input_ids": prompts})
    policy, reference = (AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32) for _ in range(2))
    judge = AutoModelForSequenceClassification.from_pretrained(folder / "judge", dtype=torch.float32)
    critic = AutoModelForSequenceClassification.from_pretrained(folder / "policy", num_labels=1, dtype=torch.float32)
    clock = StepClock(Path(output_folder) / "step_ends.txt")
    rows = int(prompts_per_step)
    with tempfile.TemporaryDirectory() as output:
        trainer = PPOTrainer(
            args=PPOConfig(
                output_dir=output,
                # With these three, an optimizer step follows each half of the rows, as in the other loops.
                per_device_train_batch_size=rows,
                gradient_accumulation_steps=1,
                num_mini_batches=2,
                num_ppo_epochs=1,
                total_episodes=len(prompts),
                response_length=RESPONSE_TOKENS,
                local_rollout_forward_batch_size=rows,
                stop_token="eos",
                temperature=1.0,
                learning_rate=1e-6,
                report_to=[],
                use_cpu=True,
                bf16=False,
                logging_strategy="no",
                save_strategy="no",
                num_sample_generations=0,
            ),
            processing_class=tokenizer,
            model=policy,
            ref_model=reference,
            reward_model=judge,
            value_model=critic,
            train_dataset=data,
            eval_dataset=data,
            callbacks=[clock],
        )
        trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
