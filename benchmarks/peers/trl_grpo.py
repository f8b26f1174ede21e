"""GRPO steps of TRL 1.16.0 on a policy and prompts from files; notes when each ended.

Runs in an environment of its own: see `make bench-peers`.

    python trl_grpo.py MATERIAL WORKLOAD PROMPTS_PER_STEP THREADS FOLDER
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

GROUP = 8
RESPONSE_TOKENS = 64  # the longest of the workload


class StepClock(TrainerCallback):
    def __init__(self, file):
        self.file = file

    def on_step_end(self, *args, **kwargs):
        with self.file.open("a") as ends:
            ends.write(f"{time.time()}\n")


def count_vowels(completions, **kwargs):
    return [float(sum(character in "aeiou" for character in text)) for text in completions]


def main(material, workload, prompts_per_step, threads, output_folder):
    torch.set_num_threads(int(threads))
    folder = Path(material)
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy", padding_side="left")
    prompts = tokenizer.batch_decode(json.loads((folder / f"{workload}.json").read_text()))
    policy = AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32)
    rows = int(prompts_per_step) * GROUP
    with tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            model=policy,
            reward_funcs=count_vowels,
            args=GRPOConfig(
                output_dir=output,
                # One generation and one optimizer step on all of it, as in the other loop.
                per_device_train_batch_size=rows,
                gradient_accumulation_steps=1,
                num_generations=GROUP,
                num_iterations=1,
                num_train_epochs=1,
                max_completion_length=RESPONSE_TOKENS,
                temperature=1.0,
                beta=0.0,
                loss_type="dapo",  # a mean over all tokens, as loss_agg_mode=token-mean
                learning_rate=1e-6,
                gradient_checkpointing=False,
                shuffle_dataset=False,
                report_to=[],
                use_cpu=True,
                bf16=False,
                logging_strategy="no",
                save_strategy="no",
            ),
            processing_class=tokenizer,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            callbacks=[StepClock(Path(output_folder) / "step_ends.txt")],
        )
        trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
