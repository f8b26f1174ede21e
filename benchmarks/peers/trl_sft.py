"""SFT steps of TRL 1.16.0 on a policy and texts from files; notes when each ended.

Runs in an environment of its own: see `make bench-peers`.

    python trl_sft.py MATERIAL WORKLOAD ROWS_PER_STEP THREADS FOLDER
"""

import sys
import tempfile
import time
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer


class StepClock(TrainerCallback):
    def __init__(self, file):
        self.file = file

    def on_step_end(self, *args, **kwargs):
        with self.file.open("a") as ends:
            ends.write(f"{time.time()}\n")


def main(material, workload, rows_per_step, threads, output_folder):
    torch.set_num_threads(int(threads))
    folder = Path(material)
    rows = load_dataset("json", data_files=str(folder / f"{workload}.jsonl"), split="train")
    with tempfile.TemporaryDirectory() as output:
        trainer = SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32),
            args=SFTConfig(
                output_dir=output,
                per_device_train_batch_size=int(rows_per_step),
                gradient_accumulation_steps=1,
                num_train_epochs=1,
                learning_rate=1e-6,
                max_length=128,
                completion_only_loss=True,
                gradient_checkpointing=False,
                train_sampling_strategy="group_by_length",
                report_to=[],
                use_cpu=True,
                bf16=False,
                logging_strategy="no",
                save_strategy="no",
            ),
            processing_class=AutoTokenizer.from_pretrained(folder / "policy"),
            train_dataset=rows.remove_columns("response"),
            callbacks=[StepClock(Path(output_folder) / "step_ends.txt")],
        )
        trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
