"""The contract of training backends: see engine_scenarios for what each of them runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from paceline.engine import get_engine
from tests.contract import engine_scenarios as scenarios
from tests.contract.engine_scenarios import (
    HEAD_SEED,
    MAX_GRAD_NORM,
    NUM_ROWS,
    PADDING_ROW,
    PROMPT_WIDTH,
    RESPONSE_WIDTH,
    STEPS,
    TEMPERATURE,
    Backend,
    Models,
)
from tests.device import DEVICE
from tests.tiny import make_tiny_model

pytestmark = pytest.mark.device

# Add a backend here to hold it to the contract. Those of optional packages are tried where these are installed.
BACKENDS = [
    Backend("local", 1),
    Backend("fsdp", 1),
    Backend("fsdp", 2),
    Backend("fsdp2", 1),
    Backend("fsdp2", 2),
    Backend("fsdp2", 2, ulysses=2),
    Backend("fsdp2", 4, ulysses=2, model_type="qwen3"),
    Backend("fsdp2", 4, ulysses=4),  # more ranks than key-value heads
]
OPTIONAL = {
    "veomni": [Backend("veomni", 1), Backend("veomni", 2), Backend("veomni", 2, model_type="qwen3")],
    "megatron": [
        Backend("megatron", num_ranks, tensor_parallel, model_type, stages, packs=False)
        for num_ranks, tensor_parallel, stages, model_type in [
            (2, 1, 1, "qwen2"),
            (2, 2, 1, "qwen2"),
            (2, 2, 1, "qwen3"),
            (2, 2, 1, "llama"),
            (2, 1, 2, "qwen2"),
            (2, 1, 2, "qwen3"),
            (4, 2, 2, "llama"),
        ]
    ],
    "torchtitan": [
        Backend("torchtitan", 2, tensor_parallel, model_type, packs=False)
        for tensor_parallel, model_type in [(1, "llama"), (2, "llama"), (1, "qwen3"), (2, "qwen3")]
    ],
}
if DEVICE in ("cpu", "cuda"):
    BACKENDS += [backend for package in OPTIONAL if find_spec(package) for backend in OPTIONAL[package]]
KINDS = ["causal_lm", "value", "sequence_classification"]


@dataclass
class Run:
    """What the ranks of a backend saw, and the folder that they saved in."""

    backend: Backend
    ranks: list[dict[str, Any]]
    folder: Path

    def __getitem__(self, name: str) -> Any:
        """What rank 0 saw; for rows, use `rows`."""
        return self.ranks[0][name]

    def rows(self, name: str) -> dict[str, Tensor]:
        return {column: torch.cat([seen[name][column] for seen in self.ranks]) for column in self.ranks[0][name]}


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    """Models and reference runs by type of model."""
    return {}


def as_param(backend: Backend) -> Any:
    """What shards a model over a single rank, FSDP1 and shared sequences are left to `make test-all`."""
    is_left = backend.strategy == "fsdp" or (backend.num_ranks == 1 and backend.strategy != "local")
    is_left = is_left or backend.ulysses > 1
    return pytest.param(backend, marks=pytest.mark.slow if is_left else (), id=str(backend))


@pytest.fixture(scope="module", params=map(as_param, BACKENDS))
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.param


@pytest.fixture(scope="module")
def models(backend: Backend, made: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Models:
    model_type = backend.model_type
    if model_type not in made:
        folder = tmp_path_factory.mktemp(model_type)
        settings = {"initializer_range": 0.2, "model_type": model_type}
        tied = make_tiny_model(folder / "tied", seed=0, **settings)
        untied = make_tiny_model(folder / "untied", seed=1, tie_word_embeddings=False, **settings)
        torch.manual_seed(2)
        AutoModelForSequenceClassification.from_pretrained(tied, num_labels=1).save_pretrained(folder / "classifier")
        made[model_type] = Models(tied, untied, folder / "classifier")
    return made[model_type]


@pytest.fixture(scope="module")
def reference(backend: Backend, models: Models, made: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """What the others are compared with: one process without collectives, on the same type of model."""
    local = Backend("local", 1, model_type=backend.model_type)
    if str(local) not in made:
        folder = tmp_path_factory.mktemp("reference") / "saved"
        made[str(local)] = Run(local, scenarios.run_backend(local, models, folder, reference=folder), folder)
    return made[str(local)]


@pytest.fixture(scope="module")
def run(backend: Backend, models: Models, reference: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    if backend == reference.backend:
        return reference
    folder = tmp_path_factory.mktemp("run") / "saved"
    return Run(backend, scenarios.run_backend(backend, models, folder, reference.folder), folder)


def skip_unless_packed(run: Run, name: str = "packed") -> None:
    if "packed" in name and not run.backend.packs:
        pytest.skip(f"{run.backend.strategy} refuses to pack")


def skip_if_refused(run: Run, what: str) -> None:
    if f"{what}/refused" in run.ranks[0]:
        pytest.skip(f"{run.backend.strategy} refuses {what}")


def close(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(
            one[name], other[name], atol=tolerance, rtol=0, msg=lambda text, n=name: f"{n}: {text}"
        )


def close_metrics(one: dict[str, float], other: dict[str, float]) -> None:
    assert one == pytest.approx(other, rel=1e-5, abs=1e-6)


def unpadded_rows() -> list[tuple[int, Tensor, int]]:
    """(row, its tokens without padding, how many of them are the response)."""
    batch = scenarios.make_mini_batch().batch
    return [
        (row, batch["input_ids"][row][batch["attention_mask"][row] == 1], num_response)
        for row, (_, num_response) in enumerate(scenarios.LENGTHS)
    ]


def load_value_model(folder: Path) -> PreTrainedModel:
    torch.manual_seed(HEAD_SEED)
    return AutoModelForTokenClassification.from_pretrained(folder, num_labels=1)


@torch.no_grad()
def test_log_probs_and_entropy_are_those_of_each_row_alone(run: Run, models: Models) -> None:
    model = AutoModelForCausalLM.from_pretrained(models.tied)
    log_probs = torch.zeros(NUM_ROWS, RESPONSE_WIDTH)
    entropy = torch.zeros(NUM_ROWS, RESPONSE_WIDTH)
    squares = torch.zeros(NUM_ROWS, RESPONSE_WIDTH)
    for row, tokens, num_response in unpadded_rows():
        if row == PADDING_ROW:
            continue
        logits = model(tokens[None]).logits[0, -num_response - 1 : -1]
        distribution = torch.distributions.Categorical(logits=logits / TEMPERATURE)
        log_probs[row, :num_response] = distribution.log_prob(tokens[-num_response:])
        entropy[row, :num_response] = distribution.entropy()
        squares[row, :num_response] = distribution.probs.square().sum(dim=-1)
    expected = {"log_probs": log_probs, "entropy": entropy}
    close(run.rows("infer/causal_lm/1"), expected, 1e-5)
    close(run.rows("infer/sum_pi_squared"), expected | {"sum_pi_squared": squares}, 1e-5)


@torch.no_grad()
def test_values_are_those_of_the_tokens_that_predict_the_response(run: Run, models: Models) -> None:
    model = load_value_model(models.tied)
    values = torch.zeros(NUM_ROWS, RESPONSE_WIDTH)
    for row, tokens, num_response in unpadded_rows():
        if row != PADDING_ROW:
            values[row, :num_response] = model(tokens[None]).logits[0, -num_response - 1 : -1, 0]
    close(run.rows("infer/value/1"), {"values": values}, 1e-5)


@torch.no_grad()
def test_scores_are_those_of_the_last_token_that_the_mask_covers(run: Run, models: Models) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(models.classifier)
    # One row at a time and no padding token: transformers then takes the last token.
    model.config.pad_token_id = None
    scores = torch.stack([model(tokens[None]).logits[0, 0] for _, tokens, _ in unpadded_rows()])
    close(run.rows("infer/sequence_classification/1"), {"scores": scores}, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_inference_depends_neither_on_micro_batches_nor_on_backends(run: Run, reference: Run, kind: str) -> None:
    outputs = run.rows(f"infer/{kind}/{NUM_ROWS}")
    close(outputs, run.rows(f"infer/{kind}/1"), 1e-5)
    close(outputs, reference.rows(f"infer/{kind}/1"), 1e-5)
    assert all(output.dtype == torch.float32 and not output.is_inference() for output in outputs.values())


def test_a_number_is_summed_over_ranks(run: Run) -> None:
    """Rank r passed r + 0.5, so n ranks have n^2 / 2 together."""
    assert [seen["infer/sum_over_ranks"] for seen in run.ranks] == [len(run.ranks) ** 2 / 2] * len(run.ranks)


def test_inputs_and_random_state_stay_as_they_are(run: Run) -> None:
    for seen in run.ranks:
        kept = {name: value for name, value in seen.items() if name.endswith("_kept")}
        assert len(kept) == 9
        assert all(kept.values()), kept


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_full_weights_have_the_names_and_values_of_the_hugging_face_model(run: Run, models: Models, name: str) -> None:
    expected = AutoModelForCausalLM.from_pretrained(getattr(models, name)).state_dict()
    for seen in run.ranks:
        assert scenarios.equal(seen[f"weights/{name}"], dict(expected))
        trained = seen[f"weights/{name}/trained"]
        assert not torch.equal(trained["lm_head.weight"], expected["lm_head.weight"])
        tied = torch.equal(trained["lm_head.weight"], trained["model.embed_tokens.weight"])
        assert tied == (name == "tied")


def bare_training(models: Models) -> tuple[list[dict[str, float]], dict[str, Tensor], dict[str, Tensor]]:
    """Five steps of the policy in plain PyTorch, on the rows one by one: metrics, first gradients, weights."""
    model = AutoModelForCausalLM.from_pretrained(models.tied)
    optim = scenarios.OPTIM
    optimizer = torch.optim.AdamW(model.parameters(), lr=optim.lr, weight_decay=optim.weight_decay)
    metrics, gradients = [], {}
    for step, lr in enumerate(expected_learning_rates()):
        batch = scenarios.make_mini_batch(step).batch
        loss = torch.zeros(())
        for row, (_, num_response) in enumerate(scenarios.LENGTHS):
            if row == PADDING_ROW:
                continue
            tokens = batch["input_ids"][row][batch["attention_mask"][row] == 1]
            logits = model(tokens[None]).logits[0, -num_response - 1 : -1]
            distribution = torch.distributions.Categorical(logits=logits / TEMPERATURE)
            gain = batch["advantages"][row, :num_response] * distribution.log_prob(tokens[-num_response:])
            loss = loss - (gain + 0.1 * distribution.entropy()).sum() / scenarios.num_tokens()
        optimizer.zero_grad()
        loss.backward()
        gradients = gradients or {name: p.grad.clone() for name, p in model.named_parameters()}
        grad_norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        metrics.append({"loss": loss.item(), "grad_norm": grad_norm, "lr": lr})
    return metrics, gradients, dict(model.state_dict())


def expected_learning_rates() -> list[float]:
    """Two steps of warm-up to 1e-3, then down a line that would reach 1e-4 at step 5."""
    return [5e-4, 1e-3, 1e-3, 7e-4, 4e-4]


def test_training_equals_plain_pytorch(run: Run, models: Models) -> None:
    metrics, gradients, weights = bare_training(models)
    seen = run["train/causal_lm/metrics"]
    for step in range(STEPS):
        close_metrics({name: seen[step][name] for name in metrics[step]}, metrics[step])
    close(run["train/causal_lm/gradients"], gradients, 1e-5)
    found = where_gradients_are_no_rounding(run["train/causal_lm/weights"], gradients)
    close(found, where_gradients_are_no_rounding(weights, gradients), 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_training_equals_the_reference(run: Run, reference: Run, kind: str) -> None:
    for seen in run.ranks:
        for metrics, expected in zip(seen[f"train/{kind}/metrics"], reference[f"train/{kind}/metrics"], strict=True):
            close_metrics(metrics, expected)
        gradients = reference[f"train/{kind}/gradients"]
        close(seen[f"train/{kind}/gradients"], gradients, 1e-5)
        close(
            where_gradients_are_no_rounding(seen[f"train/{kind}/weights"], gradients),
            where_gradients_are_no_rounding(reference[f"train/{kind}/weights"], gradients),
            1e-5,
        )


def where_gradients_are_no_rounding(weights: dict[str, Tensor], gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """AdamW divides by a gradient's size, so a tiny one's rounding is a share of the learning rate in the weight."""
    tiny = {name: (gradient != 0) & (gradient.abs() < 1e-6) for name, gradient in gradients.items()}
    assert sum(int(mask.sum()) for mask in tiny.values()) < 0.01 * sum(mask.numel() for mask in tiny.values())
    return {name: weight[~tiny[name]] if name in tiny else weight for name, weight in weights.items()}


def test_metrics_are_sums_over_the_mini_batch_without_padding_rows(run: Run) -> None:
    entropy = run.rows("infer/causal_lm/1")["entropy"].sum().item()
    for seen in run.ranks:
        metrics = seen["train/causal_lm/metrics"][0]
        assert metrics["tokens"] == scenarios.num_tokens()
        assert metrics["entropy"] == pytest.approx(entropy, rel=1e-5)
        assert set(metrics) == {"tokens", "entropy", "loss", "grad_norm", "lr"}


@pytest.mark.parametrize("name", scenarios.VARIANTS)
def test_neither_micro_batches_nor_packing_nor_chunks_change_the_update(run: Run, reference: Run, name: str) -> None:
    skip_unless_packed(run, name)
    for seen in run.ranks:
        # The second step's metrics are those of weights that the first one changed.
        metrics = seen[f"variant/{name}/metrics"]
        for one, other in zip(metrics, reference["train/causal_lm/metrics"][: len(metrics)], strict=True):
            close_metrics(one, other)
        close(seen[f"variant/{name}/gradients"], reference["train/causal_lm/gradients"], 1e-5)


@pytest.mark.parametrize("name", scenarios.VARIANTS)
def test_log_probs_and_their_order_are_the_same_in_all_micro_batches(run: Run, reference: Run, name: str) -> None:
    skip_unless_packed(run, name)
    close(run.rows(f"variant/{name}/infer"), reference.rows("infer/causal_lm/1"), 1e-5)


@pytest.mark.parametrize("kind", ["value", "sequence_classification"])
def test_packing_changes_neither_values_nor_scores_nor_their_gradients(run: Run, reference: Run, kind: str) -> None:
    skip_unless_packed(run)
    close(run.rows(f"packed/{kind}/infer"), reference.rows(f"train/{kind}/infer"), 1e-5)
    close(run[f"packed/{kind}/gradients"], reference[f"train/{kind}/gradients"], 1e-5)


@pytest.mark.parametrize("name", ["padded", "packed"])
def test_ranks_with_fewer_micro_batches_wait_without_weight(run: Run, reference: Run, name: str) -> None:
    skip_unless_packed(run, name)
    for seen in run.ranks:
        close_metrics(seen[f"uneven/{name}/metrics"], reference["train/causal_lm/metrics"][0])
        close(seen[f"uneven/{name}/gradients"], reference["train/causal_lm/gradients"], 1e-5)
    assert sum(seen[f"uneven/{name}/infer"][0] for seen in run.ranks) == NUM_ROWS


def test_what_a_backend_can_not_do_is_refused_with_what_to_set(run: Run) -> None:
    for seen in run.ranks:
        assert run.backend.packs or "set model.use_remove_padding=False" in seen["packed/refused"]
        engine = get_engine(run.backend.strategy)
        assert engine.takes_bfloat16 or "set model.compute_dtype=float32" in seen["bfloat16/refused"]
        assert engine.takes_offload or "set param_offload=False" in seen["offloaded/refused"]


def test_gradient_checkpointing_gives_the_same_gradients(run: Run, reference: Run) -> None:
    assert run["checkpointing/active"]
    close(run["checkpointing/gradients"], reference["train/causal_lm/gradients"], 1e-5)


def test_gradients_are_clipped_by_their_global_norm(run: Run, reference: Run) -> None:
    unclipped = reference["train/causal_lm/metrics"][0]["grad_norm"]
    assert unclipped > MAX_GRAD_NORM
    for seen in run.ranks:
        assert seen["clip/metrics"]["grad_norm"] == pytest.approx(unclipped, rel=1e-5)
    expected = reference["train/causal_lm/gradients"]
    close(run["clip/gradients"], {name: grad * MAX_GRAD_NORM / unclipped for name, grad in expected.items()}, 1e-8)


def test_a_loss_that_is_not_finite_on_one_rank_stops_all_before_the_step(run: Run) -> None:
    last = run.backend.num_ranks - 1
    for rank, seen in enumerate(run.ranks):
        assert f"loss is nan on rank {last}" in seen["nonfinite/loss"]
        assert "gradient norm is nan" in seen["nonfinite/gradient"]
        assert f"rank {rank}" in seen["nonfinite/gradient"]
        assert seen["nonfinite/metrics"] == seen["train/causal_lm/metrics"]


def test_resumed_training_equals_uninterrupted_training_bit_for_bit(run: Run) -> None:
    for seen in run.ranks:
        assert scenarios.equal(seen["saved/loaded"], seen["saved/at_save"])
        assert scenarios.equal(seen["saved/resumed"], seen["saved/uninterrupted"])
        assert scenarios.equal(seen["saved/resumed_from_fresh"], seen["saved/uninterrupted"])
        assert scenarios.equal(seen["saved/uninterrupted"], seen["train/causal_lm/weights"])


@pytest.mark.parametrize("name", ["written_beside_training", "written_after_training"])
def test_a_snapshot_that_is_written_later_equals_a_save_at_its_time(run: Run, name: str) -> None:
    saved, written = (
        {path.name: path.read_bytes() for path in (run.folder / folder).iterdir()} for folder in ("saved", name)
    )
    assert {"model.safetensors", "optimizer.pt", "config.json"} <= saved.keys()
    assert written == saved
    assert not scenarios.equal(run["saved/at_save"], run["saved/uninterrupted"])


def test_training_goes_on_from_the_reference_backends_state(run: Run, reference: Run) -> None:
    close(run["saved/resumed_from_reference"], reference["saved/uninterrupted"], 1e-5)


def test_the_reference_backend_goes_on_from_this_backends_state(run: Run, reference: Run, models: Models) -> None:
    rank = scenarios.Rank(reference.backend, models, rank=0)
    engine = rank.engine()
    engine.load(run.folder / "saved")
    assert scenarios.equal(scenarios.full_weights(engine), run["saved/at_save"])
    rank.train(engine, steps=STEPS - scenarios.STEPS_BEFORE_SAVE, first=scenarios.STEPS_BEFORE_SAVE)
    close(scenarios.full_weights(engine), run["saved/uninterrupted"], 1e-5)


def test_saved_weights_are_a_hugging_face_model(run: Run) -> None:
    folder = run.folder / "saved"
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    name = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
    assert type(model).__name__ == name[run.backend.model_type]
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert scenarios.equal(dict(model.state_dict()), run["saved/at_save"])
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 - a tied weight is written once
    assert model.config.architectures == [type(model).__name__]


def test_a_missing_checkpoint_is_an_error_on_every_rank(run: Run) -> None:
    for seen in run.ranks:
        assert "nowhere" in seen["saved/missing"]


def test_adapters_train_as_on_the_reference_backend(run: Run, reference: Run, models: Models) -> None:
    """What `local` does is held to an obvious implementation in the unit tests."""
    if not run["lora/supported"]:
        assert "set strategy=local or fsdp2" in run["lora/refused"]
        return
    base = dict(AutoModelForCausalLM.from_pretrained(models.tied).state_dict())
    for seen in run.ranks:
        assert scenarios.equal(seen["lora/start"], base)
        for metrics, expected in zip(seen["lora/metrics"], reference["lora/metrics"], strict=True):
            close_metrics(metrics, expected)
        for metrics, expected in zip(seen["lora/recomputed"], reference["lora/metrics"], strict=False):
            close_metrics(metrics, expected)
        close(seen["lora/gradients"], reference["lora/gradients"], 1e-5)
        close(seen["lora/weights"], reference["lora/weights"], 1e-5)
        kept = {name for name in base if torch.equal(seen["lora/weights"][name], base[name])}
        assert {name for name in base if "_proj.weight" in name} == base.keys() - kept
    assert set(run["lora/gradients"]) == set(reference["lora/gradients"])
    assert all(".lora_" in name for name in run["lora/gradients"])


def test_without_its_adapters_a_trained_model_is_the_one_it_started_from(run: Run, reference: Run) -> None:
    if run["lora/supported"]:
        close(run.rows("lora/reference"), reference.rows("infer/causal_lm/1"), 1e-5)
        assert (run.rows("lora/infer")["log_probs"] - run.rows("lora/reference")["log_probs"]).abs().max() > 0.1


def test_adapters_are_saved_alone_and_resumed_bit_for_bit(run: Run, reference: Run) -> None:
    if not run["lora/supported"]:
        return
    files = {"adapter_config.json", "adapter_model.safetensors", "optimizer.pt"}
    assert {path.name for path in (run.folder / "lora").iterdir()} == files
    for seen in run.ranks:
        assert scenarios.equal(seen["lora/resumed/loaded"], seen["lora/at_save"])
        assert scenarios.equal(seen["lora/resumed"], seen["lora/weights"])
        assert scenarios.equal(seen["lora/resumed_from_reference/loaded"], reference["lora/at_save"])
        close(seen["lora/resumed_from_reference"], reference["lora/weights"], 1e-5)


def test_the_reference_backend_goes_on_from_this_backends_adapters(run: Run, reference: Run, models: Models) -> None:
    if not run["lora/supported"]:
        return
    rank = scenarios.Rank(reference.backend, models, rank=0)
    engine = rank.engine(replace(scenarios.SPEC, lora=scenarios.LORA))
    engine.load(run.folder / "lora")
    assert scenarios.equal(scenarios.full_weights(engine), run["lora/at_save"])
    rank.train(engine, steps=STEPS - scenarios.STEPS_BEFORE_SAVE, first=scenarios.STEPS_BEFORE_SAVE)
    close(scenarios.full_weights(engine), run["lora/weights"], 1e-5)


@pytest.mark.parametrize("name", ["padded", "packed and recomputed"])
def test_bfloat16_passes_are_near_those_in_float32(run: Run, reference: Run, name: str) -> None:
    skip_if_refused(run, "bfloat16")
    exact = reference.rows("infer/causal_lm/1")
    for column, values in run.rows(f"bfloat16/{name}/infer").items():
        error = (values - exact[column]).abs().max()
        assert 1e-4 < error < 0.15, column
    gradients = reference["train/causal_lm/gradients"]
    for seen in run.ranks:
        assert seen[f"bfloat16/{name}/dtypes"] == {torch.float32}
        metrics = zip(seen[f"bfloat16/{name}/metrics"], reference["train/causal_lm/metrics"], strict=False)
        for one, other in metrics:
            assert one["loss"] == pytest.approx(other["loss"], abs=0.02)
            assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=0.03)
        for parameter, gradient in seen[f"bfloat16/{name}/gradients"].items():
            similarity = torch.cosine_similarity(gradient.flatten(), gradients[parameter].flatten(), dim=0)
            assert similarity > 0.98, parameter  # and so it is finite


def test_values_in_bfloat16_are_near_those_in_float32(run: Run, reference: Run) -> None:
    skip_if_refused(run, "bfloat16")
    for one, other in zip(run["bfloat16/value/metrics"], reference["train/value/metrics"], strict=False):
        assert one["loss"] == pytest.approx(other["loss"], rel=0.03)


def test_steps_that_bfloat16_could_not_hold_are_not_lost(run: Run) -> None:
    skip_if_refused(run, "bfloat16")
    before, after = run["bfloat16/before"], run["bfloat16/after"]
    matrices = [name for name in before if "_proj.weight" in name]
    for name in matrices:
        assert (before[name] != after[name]).float().mean() > 0.99
        assert (before[name].bfloat16() != after[name].bfloat16()).float().mean() < 0.05


def test_offloading_between_calls_changes_nothing(run: Run) -> None:
    skip_if_refused(run, "offloaded")
    assert scenarios.equal(run["offloaded/weights"], run["train/causal_lm/weights"])


def test_what_is_offloaded_is_not_on_the_device_between_calls(run: Run) -> None:
    skip_if_refused(run, "offloaded")
    for seen in run.ranks:
        # Tables of the rotary embeddings stay; parameters and two moments each would be three times the weights.
        assert seen["offloaded/bytes_left"] < 0.1 * seen["offloaded/bytes_of_weights"]


def test_moving_the_engine_does_not_change_training(run: Run) -> None:
    assert scenarios.equal(run["moved/weights"], run["train/causal_lm/weights"])
    assert run["moved/module_is_shared"] == (run.backend.strategy == "local")


def test_the_weights_were_on_the_device_of_this_session(run: Run, request: pytest.FixtureRequest) -> None:
    name = {"simulated": "npu"}.get(option := request.config.getoption("--device"), option)
    assert [seen["device"] for seen in run.ranks] == [name] * run.backend.num_ranks


def test_every_backend_is_registered_under_its_name() -> None:
    for backend in BACKENDS:
        assert get_engine(backend.strategy).__name__.lower().startswith(backend.strategy)


def test_the_scenarios_crop_padding(models: Models) -> None:
    """The comparisons with single rows mean little if no micro-batch has columns to cut."""
    attended = scenarios.make_mini_batch().batch["attention_mask"].any(dim=0)
    assert not attended[0]
    assert not attended[-1]
    assert attended[PROMPT_WIDTH]
