"""Train a reward model on preference pairs, as `paceline data full_hh_rlhf --for rm` writes them.

    python examples/reward_model/train_reward_model.py --pairs train.parquet --model BASE --output RM

The loss is that of Bradley and Terry: -log sigmoid(score of the chosen reply - score of the rejected one). The score
head is new, the rest starts from BASE, any Hugging Face decoder with a chat template. RM is a Hugging Face folder (a
sequence classifier and its tokenizer): what `reward_model.model.path` takes.
"""

import argparse
import random

import pyarrow.parquet as pq
import torch
from torch.nn.functional import logsigmoid

from paceline.config import ModelConfig, OptimConfig
from paceline.data.tokenizer import load_tokenizer
from paceline.engine import EngineSpec
from paceline.engine.backends.local_engine import LocalEngine
from paceline.protocol import DataProto


def tokenise(tokenizer, pairs, max_length):
    """Rows chosen, rejected, chosen, rejected, ...: a pair always shares a micro-batch of even size."""
    texts = [
        tokenizer.apply_chat_template([*pair["prompt"], {"role": "assistant", "content": pair[kind]}], tokenize=False)
        for pair in pairs
        for kind in ("chosen", "rejected")
    ]
    rows = [ids[-max_length:] for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    width = max(map(len, rows))
    input_ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    for row, ids in enumerate(rows):
        input_ids[row, width - len(ids) :] = torch.tensor(ids)
        attention_mask[row, width - len(ids) :] = 1
    position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    return DataProto.from_dict({"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids})


def bradley_terry(num_pairs):
    """The loss of a micro-batch as its share of `num_pairs` pairs, and how many of its pairs are ordered right."""

    def loss_fn(output, micro_batch):
        margin = output["scores"][0::2] - output["scores"][1::2]
        return -logsigmoid(margin).sum() / num_pairs, {"right": (margin > 0).sum() / num_pairs}

    return loss_fn


def train(pairs_file, base, output, *, epochs=1, batch_size=64, lr=1e-5, max_length=1024, seed=1):
    """Write the reward model to `output`; gives the share of pairs that it ordered right in the last tenth of steps."""
    torch.manual_seed(seed)  # draws the score head
    tokenizer = load_tokenizer(base)
    engine = LocalEngine(
        EngineSpec(
            model=ModelConfig(path=str(base)),
            kind="sequence_classification",
            optim=OptimConfig(lr=lr, weight_decay=0.0),
        )
    )
    engine.initialize()
    pairs = pq.read_table(pairs_file, columns=["prompt", "chosen", "rejected"]).to_pylist()
    shares = []
    for epoch in range(epochs):
        random.Random(seed + epoch).shuffle(pairs)
        for start in range(0, len(pairs), batch_size):
            batch = pairs[start : start + batch_size]
            data = tokenise(tokenizer, batch, max_length)
            metrics = engine.train_batch(data, bradley_terry(len(batch)), micro_batch_size=16)
            shares.append(metrics["right"])
            if start // batch_size % 10 == 0:
                done = epoch * len(pairs) + start + len(batch)
                print(f"{done}/{epochs * len(pairs)} pairs, loss {metrics['loss']:.3f}, right {metrics['right']:.2f}")
    engine.save(output)
    tokenizer.save_pretrained(output)
    last = shares[-max(1, len(shares) // 10) :]
    return sum(last) / len(last)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", required=True, help="parquet with the columns prompt, chosen, rejected")
    parser.add_argument("--model", required=True, help="folder or hub id of the model to start from")
    parser.add_argument("--output", required=True, help="folder for the reward model")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64, help="pairs per optimizer step")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--max-length", type=int, default=1024, help="tokens; longer dialogues lose their beginning")
    arguments = parser.parse_args()
    right = train(
        arguments.pairs,
        arguments.model,
        arguments.output,
        epochs=arguments.epochs,
        batch_size=arguments.batch_size,
        lr=arguments.lr,
        max_length=arguments.max_length,
    )
    print(f"reward model in {arguments.output}: {right:.2f} of the last pairs in the right order")
