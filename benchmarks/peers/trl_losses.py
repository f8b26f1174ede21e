"""Loss and gradients that TRL 1.16.0 has of one batch: all rows of a file, as text.

Runs in an environment of its own: see `make bench-peers`. tests/learn/test_trl_losses.py compares them with ours.

    python trl_losses.py sft|dpo|reward MODEL REFERENCE ROWS.jsonl OUTPUT.safetensors '{"beta": 0.1}'
"""

import json
import sys
import tempfile

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer


def make_trainer(kind, model_folder, reference_folder, rows, settings):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    common = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": len(rows),
        "gradient_checkpointing": False,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "max_length": None,
        **settings,
    }
    read = AutoModelForSequenceClassification if kind == "reward" else AutoModelForCausalLM
    extra = {"num_labels": 1} if kind == "reward" else {}
    model = read.from_pretrained(model_folder, dtype=torch.float32, **extra)
    data = {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer}
    if kind == "sft":
        return SFTTrainer(model=model, args=SFTConfig(**common, completion_only_loss=True), **data)
    if kind == "reward":
        return RewardTrainer(model=model, args=RewardConfig(**common), **data)
    reference = AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.float32)
    return DPOTrainer(model=model, ref_model=reference, args=DPOConfig(**common), **data)


def main(kind, model_folder, reference_folder, rows_file, output, settings):
    with open(rows_file) as lines:
        rows = [json.loads(line) for line in lines]
    trainer = make_trainer(kind, model_folder, reference_folder, rows, json.loads(settings))
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.eval()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in trainer.model.named_parameters()
        if parameter.grad is not None
    }
    save_file({"loss": loss.detach().reshape(1), **gradients}, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
