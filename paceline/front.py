"""The short way from Python: a class for each kind of run, with the settings that most runs have as arguments.

    from paceline import GRPO
    run = GRPO(model="model", train="train.parquet", reward=my_function, n=8).train()
    print(run.metrics[-1], run.model)

Each is a thin front: it makes the configuration that the command would read, and hands it to the same entry, with the
same checks and errors. All other keys go into `config`, as `{"trainer.save_freq": 10}`.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypedDict, Unpack

from paceline.config import AnyRunConfig, DPOConfig, PPOConfig, RewardModelTrainingConfig, SFTConfig, SupervisedConfig
from paceline.config.load import read_config, read_config_of
from paceline.errors import ConfigError
from paceline.files import write_atomically
from paceline.run_folder import ACTOR, CHECKPOINTS_FOLDER, METRICS_FILE, MODEL_FOLDER, checkpoint_name, default_run_dir
from paceline.run_folder import latest_step as latest_saved_step

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from paceline.trainer.supervised_run import SupervisedRunner

Rows = Sequence[Mapping[str, object]]
Files = str | Path | Sequence[str | Path] | Rows
"""A data file, several, or the rows themselves."""
RewardFunction = Callable[..., Any]
"""As a function of custom_reward_function: it takes data_source, solution_str, ground_truth and extra_info."""
Settings = Mapping[str, object]
INPUTS_FOLDER = "inputs"
"""What was given as Python objects, as files in the run's folder."""


@dataclass(frozen=True)
class FinishedRun:
    """What a run left."""

    folder: Path

    @property
    def metrics(self) -> list[dict[str, float]]:
        """One dict for each step, from metrics.jsonl; step 0 is a validation before the first."""
        file = self.folder / METRICS_FILE
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def model(self) -> Path:
        """The trained model as a Hugging Face folder: for `model` of the next run. With LoRA a run of PPO or GRPO has
        its adapter there; `paceline export` merges it."""
        if (self.folder / MODEL_FOLDER).is_dir():
            return self.folder / MODEL_FOLDER
        step = latest_saved_step(self.folder / CHECKPOINTS_FOLDER)
        if step is None:
            raise ConfigError(f"{self.folder} has no checkpoint: set trainer.save_freq, or leave it null.")
        return self.folder / CHECKPOINTS_FOLDER / checkpoint_name(step) / ACTOR


class _Front:
    """Settings by their keys, checked when the run starts or `check` is called."""

    experiment: ClassVar[str]
    model_key: ClassVar[str] = "model"

    def __init__(
        self,
        model: str | Path,
        train: Files,
        val: Files | None,
        output: str | Path | None,
        settings: Mapping[str, object],
        config: Settings | None,
    ) -> None:
        self.folder = Path(output or default_run_dir("paceline", self.experiment)).expanduser().absolute()
        self.settings: dict[str, object] = {
            f"{self.model_key}.path": str(model),
            "data.train_files": self._file("train", train),
            "data.val_files": None if val is None else self._file("val", val),
            "trainer.experiment_name": self.experiment,
            "trainer.default_local_dir": str(self.folder),
            **{key: value for key, value in settings.items() if value is not None},
            **(config or {}),
        }

    def _file(self, name: str, data: Files) -> str | list[str]:
        if isinstance(data, str | Path):
            return str(data)
        items = list(data)
        if not all(isinstance(item, Mapping) for item in items):
            return [str(item) for item in items]
        file = self.folder / INPUTS_FOLDER / f"{name}.jsonl"
        lines = "".join(json.dumps(item) + "\n" for item in items)
        _write(file, lines.encode())
        return str(file)

    def as_tree(self) -> DictConfig:
        """The settings as Hydra would give them."""
        from omegaconf import OmegaConf

        tree = OmegaConf.create({})
        for key, value in self.settings.items():
            OmegaConf.update(tree, key, value, force_add=True)
        return tree


class PPO(_Front):
    """Proximal policy optimisation, with a critic.

    Args:
        model: folder or hub id of the policy to start from, with its tokenizer.
        train: prompts (`prompt`, and what the reward reads): a file, files, or rows.
        reward: a function, or None where the rules of the data's sources, or a reward model, score.
        reward_model: folder or hub id of a model that scores, such as `RewardModel(...).train().model`.
        val: held-out prompts, as `train`.
        n: responses to each prompt.
        batch_size: prompts of a step; mini_batch_size: prompts of an optimizer step.
        steps, epochs: how long; steps wins.
        devices: GPUs, or processes on a CPU.
        output: the run's folder.
        config: any other keys, such as {"trainer.save_freq": 10}.
    """

    experiment = "ppo"
    model_key = "actor_rollout_ref.model"
    estimator: ClassVar[str] = "gae"

    def __init__(
        self,
        *,
        model: str | Path,
        train: Files,
        reward: RewardFunction | None = None,
        reward_model: str | Path | None = None,
        val: Files | None = None,
        n: int = 1,
        batch_size: int = 64,
        mini_batch_size: int | None = None,
        learning_rate: float = 1e-6,
        steps: int | None = None,
        epochs: int = 1,
        max_prompt_length: int = 512,
        max_response_length: int = 512,
        temperature: float = 1.0,
        kl_loss_coef: float | None = None,
        lora_rank: int = 0,
        devices: int = 1,
        seed: int = 1,
        output: str | Path | None = None,
        config: Settings | None = None,
    ) -> None:
        policy = "actor_rollout_ref"
        settings: dict[str, object] = {
            "algorithm.adv_estimator": self.estimator,
            f"{policy}.rollout.n": n,
            f"{policy}.rollout.temperature": temperature,
            f"{policy}.actor.ppo_mini_batch_size": mini_batch_size or batch_size,
            f"{policy}.actor.optim.lr": learning_rate,
            f"{policy}.actor.use_kl_loss": kl_loss_coef is not None,
            f"{policy}.actor.kl_loss_coef": kl_loss_coef,
            f"{policy}.model.lora_rank": lora_rank,
            "reward_model.enable": reward_model is not None,
            "reward_model.model.path": None if reward_model is None else str(reward_model),
            "data.train_batch_size": batch_size,
            "data.max_prompt_length": max_prompt_length,
            "data.max_response_length": max_response_length,
            "trainer.total_training_steps": steps,
            "trainer.total_epochs": epochs,
            "trainer.n_gpus_per_node": devices,
            "trainer.seed": seed,
        }
        super().__init__(model, train, val, output, settings, config)
        if reward is not None:
            path, name = _function_file(reward, self.folder)
            self.settings |= {"custom_reward_function.path": path, "custom_reward_function.name": name}

    def check(self) -> PPOConfig:
        """The complete configuration, or a ConfigError with all that is wrong with it; nothing is started."""
        from paceline.trainer.complete import complete_reading

        return complete_reading(read_config(self.as_tree()))

    def train(self) -> FinishedRun:
        """Train to the end, in the Ray that is running or in one of its own. A run that was stopped goes on."""
        from paceline.trainer.main_ppo import run_ppo

        run_ppo(self.as_tree())
        return FinishedRun(self.folder)


class GRPO(PPO):
    """Group relative policy optimisation: the responses to a prompt are compared with each other, without a critic.

    The arguments are those of PPO; `n` is 8 unless given, and at least 2.
    """

    experiment = "grpo"
    estimator = "grpo"

    if not TYPE_CHECKING:  # an editor shows the arguments of PPO

        def __init__(self, *, n: int = 8, **arguments: Any) -> None:
            super().__init__(n=n, **arguments)


DISTILL_KEYS: dict[str, object] = {
    "distillation.enabled": True,
    "distillation.distillation_loss.use_task_rewards": False,
    "distillation.distillation_loss.loss_mode": "k2",
    "trainer.experiment_name": "distill",
}
"""What makes distillation of `paceline train`. k2 has the gradient of the KL of the policy from the teacher."""


class PolicySettings(TypedDict, total=False):
    """Arguments of PPO that mean the same elsewhere."""

    reward: RewardFunction | None
    val: Files | None
    n: int
    batch_size: int
    mini_batch_size: int | None
    learning_rate: float
    steps: int | None
    epochs: int
    max_prompt_length: int
    max_response_length: int
    temperature: float
    kl_loss_coef: float | None
    lora_rank: int
    devices: int
    seed: int
    output: str | Path | None


class Distill(PPO):
    """On-policy distillation: the model samples, and learns from how likely a teacher finds each token. No rewards.

    Args:
        model: folder or hub id of the student to start from, with its tokenizer.
        teacher: folder or hub id of a model with the same vocabulary; or several, by the `data_source` of their rows.
        loss: distillation.distillation_loss.loss_mode; topk: of its forward_kl_topk.

    All others are those of PPO; a `reward` is a measure, and does not train.
    """

    experiment = "distill"

    def __init__(
        self,
        *,
        model: str | Path,
        teacher: str | Path | Mapping[str, str | Path],
        train: Files,
        loss: Literal["k2", "k3", "abs", "forward_kl_topk", "forward_kl_topk_tail"] = "k2",
        topk: int = 32,
        config: Settings | None = None,
        **settings: Unpack[PolicySettings],
    ) -> None:
        teachers: dict[str, dict[str, str]] = {"teacher": {"model_path": str(teacher)}}
        if isinstance(teacher, Mapping):
            paths = enumerate(teacher.items(), 1)
            teachers = {f"teacher_{number}": {"key": key, "model_path": str(path)} for number, (key, path) in paths}
        keys: dict[str, object] = {"distillation.teacher_models": teachers, **DISTILL_KEYS}
        keys |= {"distillation.distillation_loss.loss_mode": loss, "distillation.distillation_loss.topk": topk}
        super().__init__(model=model, train=train, config={**keys, **(config or {})}, **settings)


class _SupervisedFront(_Front):
    """What the classes for given texts have in common."""

    root: ClassVar[type[SupervisedConfig]]

    def check(self) -> AnyRunConfig:
        """The complete configuration, or a ConfigError with all that is wrong with it; nothing is started."""
        from paceline.trainer.complete import complete_supervised

        return complete_supervised(read_config_of(self.root, self.as_tree()))

    def _runner(self) -> type[SupervisedRunner]:
        raise NotImplementedError

    def train(self) -> FinishedRun:
        """Train to the end, in the Ray that is running or in one of its own. A run that was stopped goes on."""
        from paceline.trainer.supervised_run import run_supervised

        return FinishedRun(run_supervised(self.as_tree(), self._runner()))


def _supervised_settings(
    *,
    batch_size: int,
    learning_rate: float,
    steps: int | None,
    epochs: int,
    max_length: int,
    lora_rank: int,
    devices: int,
    seed: int,
) -> dict[str, object]:
    return {
        "data.train_batch_size": batch_size,
        "data.max_length": max_length,
        "optim.lr": learning_rate,
        "model.lora_rank": lora_rank,
        "trainer.total_training_steps": steps,
        "trainer.total_epochs": epochs,
        "trainer.n_gpus_per_node": devices,
        "trainer.seed": seed,
    }


class SFT(_SupervisedFront):
    """Supervised fine-tuning on conversations (`messages`), or on prompts with a `response` each."""

    experiment = "sft"
    root = SFTConfig

    def __init__(
        self,
        *,
        model: str | Path,
        train: Files,
        val: Files | None = None,
        batch_size: int = 64,
        learning_rate: float = 1e-5,
        steps: int | None = None,
        epochs: int = 1,
        max_length: int = 1024,
        lora_rank: int = 0,
        devices: int = 1,
        seed: int = 1,
        output: str | Path | None = None,
        config: Settings | None = None,
    ) -> None:
        settings = _supervised_settings(
            batch_size=batch_size,
            learning_rate=learning_rate,
            steps=steps,
            epochs=epochs,
            max_length=max_length,
            lora_rank=lora_rank,
            devices=devices,
            seed=seed,
        )
        super().__init__(model, train, val, output, settings, config)

    def _runner(self) -> type[SupervisedRunner]:
        from paceline.trainer.sft_trainer import SFTRunner

        return SFTRunner


class RewardModel(_SupervisedFront):
    """A reward model from pairs: `prompt`, `chosen`, `rejected`. `center` is loss.center_rewards_coefficient."""

    experiment = "reward_model"
    root = RewardModelTrainingConfig

    def __init__(
        self,
        *,
        model: str | Path,
        train: Files,
        val: Files | None = None,
        center: float = 0.0,
        batch_size: int = 64,
        learning_rate: float = 1e-5,
        steps: int | None = None,
        epochs: int = 1,
        max_length: int = 1024,
        devices: int = 1,
        seed: int = 1,
        output: str | Path | None = None,
        config: Settings | None = None,
    ) -> None:
        settings = _supervised_settings(
            batch_size=batch_size,
            learning_rate=learning_rate,
            steps=steps,
            epochs=epochs,
            max_length=max_length,
            lora_rank=0,
            devices=devices,
            seed=seed,
        )
        settings["loss.center_rewards_coefficient"] = center
        super().__init__(model, train, val, output, settings, config)

    def _runner(self) -> type[SupervisedRunner]:
        from paceline.trainer.reward_model_trainer import RewardModelRunner

        return RewardModelRunner


class DPO(_SupervisedFront):
    """Direct preference optimisation on pairs: `prompt`, `chosen`, `rejected`."""

    experiment = "dpo"
    root = DPOConfig

    def __init__(
        self,
        *,
        model: str | Path,
        train: Files,
        val: Files | None = None,
        beta: float = 0.1,
        form: Literal["sigmoid", "sigmoid_norm", "ipo"] = "sigmoid",
        batch_size: int = 64,
        learning_rate: float = 1e-6,
        steps: int | None = None,
        epochs: int = 1,
        max_length: int = 1024,
        lora_rank: int = 0,
        devices: int = 1,
        seed: int = 1,
        output: str | Path | None = None,
        config: Settings | None = None,
    ) -> None:
        settings = _supervised_settings(
            batch_size=batch_size,
            learning_rate=learning_rate,
            steps=steps,
            epochs=epochs,
            max_length=max_length,
            lora_rank=lora_rank,
            devices=devices,
            seed=seed,
        )
        settings |= {"loss.beta": beta, "loss.form": form}
        super().__init__(model, train, val, output, settings, config)

    def _runner(self) -> type[SupervisedRunner]:
        from paceline.trainer.dpo_trainer import DPORunner

        return DPORunner


def _function_file(function: RewardFunction, folder: Path) -> tuple[str, str]:
    """A file with the function, and its name there, for the processes that call it.

    A function of a module is in that module's file. One of a notebook, of the program itself, or inside another one is
    pickled, with what it refers to, beside a file that reads it.
    """
    if not callable(function):
        raise ConfigError(f"reward is {function!r}; give a function, or None.")
    name = getattr(function, "__name__", "compute_score")
    module = sys.modules.get(getattr(function, "__module__", "") or "")
    file = getattr(module, "__file__", None)
    is_of_a_module = module is not None and module.__name__ != "__main__" and getattr(module, name, None) is function
    if file and is_of_a_module and inspect.isfunction(function):
        return file, name
    import cloudpickle

    path = folder / INPUTS_FOLDER / "reward.py"
    _write(path.with_suffix(".pickle"), cloudpickle.dumps(function))
    text = (
        '"""The reward function that the run was given as a Python object."""\n\n'
        "from pathlib import Path\n\nimport cloudpickle\n\n"
        'compute_score = cloudpickle.loads(Path(__file__).with_suffix(".pickle").read_bytes())\n'
    )
    _write(path, text.encode())
    return str(path), "compute_score"


def _write(file: Path, content: bytes) -> None:
    """Only what is new: the file of a run that goes on stays as it is."""
    if not (file.exists() and file.read_bytes() == content):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, content)


__all__ = ["DISTILL_KEYS", "DPO", "GRPO", "PPO", "SFT", "Distill", "FinishedRun", "RewardModel"]
