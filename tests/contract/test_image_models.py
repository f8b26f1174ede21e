"""Models of images and text: what a rollout says of its tokens, and what an engine learns, are transformers' own."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoModelForImageTextToText

from paceline.config import DataConfig, OptimConfig, TrainedModelConfig
from paceline.data import RLHFDataset, collate_fn, load_tokenizer
from paceline.data.prompt_images import PromptImages
from paceline.engine import Engine, EngineSpec, get_engine
from paceline.engine.hf_models import build_model
from paceline.engine.training_state import full_tensor
from paceline.errors import ConfigError, PacelineError
from paceline.protocol import DataProto
from paceline.protocol.image_columns import image_inputs
from paceline.rollout.hf import HfRollout
from paceline.rollout.native import NativeRollout
from paceline.rollout.postprocess import prompt_images, prompt_token_lists, to_batch
from paceline.rollout.rollout_interface import SamplingParams
from tests.tiny_vl import SIDE, make_tiny_vl_model, write_colours

KINDS = ("qwen2_vl", "qwen2_5_vl")
TEMPERATURE = 0.7
ROWS, PROMPT, RESPONSE = 5, 32, 6


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_vl_model(tmp_path_factory.mktemp("vl"), request.param)
    write_colours(folder / "rows.parquet", ROWS, sizes=(SIDE, 2 * SIDE, 3 * SIDE), most_images=2)
    return folder


def read_prompts(folder: Path) -> DataProto:
    config = DataConfig(max_prompt_length=PROMPT, image_key="images", cache_dir="")
    rows = RLHFDataset(folder / "rows.parquet", load_tokenizer(str(folder)), config, images=PromptImages(str(folder)))
    return DataProto.from_single_dict(collate_fn([rows[number] for number in range(ROWS)]))


def sample(folder: Path, max_num_seqs: int = 256) -> DataProto:
    prompts = read_prompts(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    rollout = HfRollout(model, {1}, 0, max_num_seqs)
    completions = rollout.generate(
        prompt_token_lists(prompts),
        SamplingParams(max_tokens=RESPONSE, temperature=TEMPERATURE),
        list(range(ROWS)),
        prompt_images(prompts),
    )
    batch = to_batch(prompts, completions, RESPONSE, 0)
    dice = torch.Generator().manual_seed(3)
    batch.batch["advantages"] = torch.randn(ROWS, RESPONSE, generator=dice) * batch.batch["response_mask"]
    return batch


def loss_of(output: dict[str, Tensor], micro_batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
    return -(micro_batch["advantages"] * output["log_probs"]).sum() / 10, {}


def build_engine(folder: Path, strategy: str = "local", **model: Any) -> Engine:
    spec = EngineSpec(
        model=TrainedModelConfig(path=str(folder), **model),
        kind="causal_lm",
        optim=OptimConfig(lr=1e-3),
        total_optimizer_steps=3,
        device="cpu",
    )
    engine = get_engine(strategy)(spec)
    engine.initialize()
    return engine


def plain_log_probs(model: Any, batch: DataProto) -> Tensor:
    """transformers itself, one row after the other without padding."""
    rows = []
    for row in batch.batch:
        ids = row["input_ids"][row["attention_mask"].bool()][None]
        images = image_inputs(row["pixel_values"][None], row["image_grid_thw"][None])
        logits = model(
            input_ids=ids,
            mm_token_type_ids=(ids == model.config.image_token_id).int(),
            pixel_values=images.pixel_values,
            image_grid_thw=images.grids,
        ).logits[0]
        count = int(row["response_mask"].sum())
        own = (logits / TEMPERATURE).log_softmax(-1)[-count - 1 : -1].gather(-1, ids[0, -count:, None])[:, 0]
        rows.append(torch.nn.functional.pad(own, (0, RESPONSE - count)))
    return torch.stack(rows)


def gradients(engine: Any, batch: DataProto, **sizes: int) -> dict[str, Tensor]:
    """Those of one update, before they are clipped."""
    found: dict[str, Tensor] = {}

    def note(_: float) -> Tensor:
        for name, parameter in engine.model.named_parameters():
            found[name] = full_tensor(parameter.grad).clone() if parameter.grad is not None else None
        return torch.tensor(0.0)

    engine._clip_grad_norm = note
    engine.train_batch(batch, loss_of, temperature=TEMPERATURE, **sizes)
    return found


def test_log_probs_of_the_rollout_are_those_of_transformers(folder: Path) -> None:
    batch = sample(folder)
    plain = plain_log_probs(AutoModelForImageTextToText.from_pretrained(folder).eval(), batch)
    assert torch.allclose(batch.batch["rollout_log_probs"], plain, atol=1e-5)
    assert len({tuple(grid) for grid in batch.batch["image_grid_thw"].flatten(0, 1).tolist()}) > 1, "one size only"


def test_an_image_has_a_part_in_what_is_said(folder: Path) -> None:
    batch = sample(folder)
    engine = build_engine(folder)
    before = engine.infer_batch(batch, temperature=TEMPERATURE, micro_batch_size=2)["log_probs"]
    batch.batch["pixel_values"] = -batch.batch["pixel_values"]
    assert (
        engine.infer_batch(batch, temperature=TEMPERATURE, micro_batch_size=2)["log_probs"] - before
    ).abs().max() > 1e-3


def test_neighbours_in_a_batch_change_nothing(folder: Path) -> None:
    assert torch.equal(sample(folder).batch["responses"], sample(folder, max_num_seqs=1).batch["responses"])


@pytest.mark.parametrize("sizes", [{"micro_batch_size": ROWS}, {"micro_batch_size": 2}, {"max_tokens": 60}])
def test_an_engine_computes_and_learns_as_transformers(folder: Path, sizes: dict[str, int]) -> None:
    batch = sample(folder)
    engine = build_engine(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    plain = plain_log_probs(model, batch)
    assert torch.allclose(engine.infer_batch(batch, temperature=TEMPERATURE, **sizes)["log_probs"], plain, atol=1e-5)
    loss_of({"log_probs": plain}, batch.batch)[0].backward()
    found = gradients(engine, batch, **sizes)
    for name, parameter in model.named_parameters():
        assert torch.allclose(found[name], parameter.grad, atol=1e-5), name
    assert float(found["model.visual.patch_embed.proj.weight"].abs().max()) > 0


def test_sequences_are_padded_and_the_log_says_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="paceline"):
        engine: Any = build_engine(folder, use_remove_padding=True)
    assert "sequences are padded: in Qwen2" in caplog.text
    assert not engine._packs


def test_a_critic_of_such_a_model_is_refused(folder: Path) -> None:
    model = TrainedModelConfig(path=str(folder))
    with pytest.raises(ConfigError, match="as a critic or a reward model is not supported yet"):
        build_model(model, "value", train=True)


def test_an_engine_without_images_says_so(folder: Path) -> None:
    prompts = read_prompts(folder)
    rollout = NativeRollout(AutoModelForImageTextToText.from_pretrained(folder), {1}, 0)
    with pytest.raises(PacelineError, match="NativeRollout does not read images"):
        rollout.generate(
            prompt_token_lists(prompts), SamplingParams(max_tokens=2), list(range(ROWS)), prompt_images(prompts)
        )


def test_weights_come_out_under_the_names_of_the_folder(folder: Path) -> None:
    own = AutoModelForImageTextToText.from_pretrained(folder).state_dict()
    out = dict(build_engine(folder).named_full_weights())
    assert out.keys() == own.keys()
    assert all(torch.equal(out[name], own[name]) for name in own)


def _rank(rank: int, port: int, folder: Path, batch: DataProto, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    engine = build_engine(folder, "fsdp2")
    rows = slice(0, 4) if rank == 0 else slice(4, ROWS)  # so one rank has four micro-batches, and the other one
    log_probs = engine.infer_batch(batch[rows], temperature=TEMPERATURE, micro_batch_size=1)["log_probs"]
    torch.save((log_probs, gradients(engine, batch[rows], micro_batch_size=1)), out / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_shares_on_two_ranks_learn_as_one(folder: Path, tmp_path: Path) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    batch = sample(folder)
    mp.spawn(_rank, args=(port, folder, batch, tmp_path), nprocs=2)
    local = build_engine(folder)
    log_probs, found = zip(*(torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)), strict=True)
    whole = local.infer_batch(batch, temperature=TEMPERATURE, micro_batch_size=2)["log_probs"]
    assert torch.allclose(torch.cat(log_probs), whole, atol=1e-5)
    own = gradients(local, batch, micro_batch_size=ROWS)
    assert found[0].keys() == own.keys()
    assert all(torch.allclose(found[0][name], own[name], atol=1e-5) for name in own)
