"""PPO steps of TRL 1.12.0 on a policy, a reward model and prompts from files; prints their seconds as JSON.

Runs in an environment of its own: see `make bench-peers`.

    python trl_ppo.py MATERIAL WORKLOAD PROMPTS_PER_STEP RESPONSE_TOKENS THREADS
"""

import json
import sys
import tempfile
import time
from itertools import pairwise
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


class StepClock(TrainerCallback):
    def __init__(self):
        self.ends = []

    def on_step_end(self, *args, **kwargs):
        self.ends.append(time.perf_counter())


def main(material, workload, prompts_per_step, response_tokens, threads):
    torch.set_num_threads(int(threads))
    folder = Path(material)
    prompts = json.loads((folder / f"{workload}.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy", padding_side="left")
    data = Dataset.from_dict({"input_ids": prompts})
    policy, reference = (AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32) for _ in range(2))
    judge = AutoModelForSequenceClassification.from_pretrained(folder / "judge", dtype=torch.float32)
    critic = AutoModelForSequenceClassification.from_pretrained(folder / "policy", num_labels=1, dtype=torch.float32)
    clock = StepClock()
    rows = int(prompts_per_step)
    with tempfile.TemporaryDirectory() as output:
        trainer = PPOTrainer(
            args=PPOConfig(
                output_dir=output,
                per_device_train_batch_size=rows // 2,
                gradient_accumulation_steps=2,
                num_mini_batches=2,
                num_ppo_epochs=1,
                total_episodes=len(prompts),
                response_length=int(response_tokens),
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
        start = time.perf_counter()
        trainer.train()
    ends = [start, *clock.ends]
    print(json.dumps({"seconds": [after - before for before, after in pairwise(ends)][1:]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
