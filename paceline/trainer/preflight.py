"""What is looked at before Ray starts, beyond the configuration itself: models, tokenizer, prompts and their rewards.

Small data files are read as a whole, of large ones the first rows. All problems are reported together. Takes seconds,
most of them for importing transformers, which is why this comes after the checks of the configuration.
"""

from __future__ import annotations

import dataclasses
import logging
import netrc
import os
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlparse

from paceline.catalog import IMAGE_MODELS
from paceline.config import AnyRunConfig, PPOConfig
from paceline.config.keys import is_known_key, value_of
from paceline.config.path_checks import data_files
from paceline.config.tables import table_head
from paceline.errors import ConfigError, PacelineError
from paceline.machine import num_cores
from paceline.trainer.unloaded_models import config_of, hub_problems, max_positions, vocabulary_problems, whole_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from paceline.data.rl_dataset import RLHFDataset

SMALL = 5_000
"""Rows that are read as a whole."""
SAMPLED = 2_000
"""Rows that are read of larger data, shared by its files."""


def preflight(cfg: PPOConfig, *, reads_data: bool = True) -> None:
    """Raise all that would end the run later. `reads_data` is False if the run's data and rewards are a user's own."""
    from paceline.data.tokenizer import load_tokenizer

    problems: list[PacelineError] = list(map(ConfigError, login_problems(cfg)))
    unread = [*hub_problems(_named_models(cfg)), *_image_problems(cfg)]
    if unread:  # without the model there is no tokenizer
        raise together([*problems, *map(ConfigError, unread)])
    problems += map(ConfigError, _position_problems(cfg))
    model = cfg.actor_rollout_ref.model
    try:
        tokenizer = load_tokenizer(str(model.tokenizer_path or model.path), trust_remote_code=model.trust_remote_code)
    except PacelineError as error:
        raise together([*problems, error]) from error
    problems += _teacher_problems(cfg, tokenizer)
    largest = -1
    agents = list(_agent_problems(cfg, tokenizer, {}))
    problems += agents
    if reads_data and not agents:  # tools stand in the prompts
        with quiet_reading():
            datasets, found = _read_data(cfg, tokenizer)
            problems += found
            problems += _reward_problems(cfg, tokenizer, datasets)
            problems += _agent_problems(cfg, tokenizer, datasets)
            problems += _pupil_problems(cfg, datasets)
        largest = max((dataset.largest_token() for dataset in datasets.values()), default=-1)
    setting = "actor_rollout_ref.model.tokenizer_path"
    where = str(model.tokenizer_path or model.path)
    problems += map(ConfigError, vocabulary_problems(_models(cfg), tokenizer, largest, setting, where))
    if problems:
        raise together(problems)


def together(problems: list[PacelineError]) -> PacelineError:
    """One problem as itself, several as a list."""
    if len(problems) == 1:
        return problems[0]
    texts = [
        text for error in problems for text in (error.problems if isinstance(error, ConfigError) else [str(error)])
    ]
    return ConfigError(texts)


@contextmanager
def quiet_reading() -> Iterator[None]:
    """The run itself says what it reads."""
    data, rewards = logging.getLogger("paceline.data"), logging.getLogger("paceline.rewards")
    levels = data.level, rewards.level
    data.setLevel(logging.ERROR)
    rewards.setLevel(logging.ERROR)
    try:
        yield
    finally:
        data.setLevel(levels[0])
        rewards.setLevel(levels[1])


# ------------------------------------------------------------------------------------------------------- models


def _models(cfg: PPOConfig) -> dict[str, str]:
    """Key and path of the models that read the run's tokens."""
    from paceline.config.derived import teacher_models
    from paceline.trainer.ppo.placement import uses_critic

    found = {"actor_rollout_ref.model.path": str(cfg.actor_rollout_ref.model.path)}
    if uses_critic(cfg) and cfg.critic.model.path is not None:
        found["critic.model.path"] = cfg.critic.model.path
    found |= {_teacher_key(name): str(model.path) for name, model in teacher_models(cfg).items()}
    return found


def _teacher_key(name: str) -> str:
    return f"distillation.teacher_models.{name}.model_path"


def _named_models(cfg: PPOConfig) -> dict[str, str]:
    """Key and path of all models and tokenizers that the run reads."""
    asked = _models(cfg)
    if cfg.actor_rollout_ref.model.tokenizer_path is not None:
        asked["actor_rollout_ref.model.tokenizer_path"] = cfg.actor_rollout_ref.model.tokenizer_path
    if cfg.reward_model.enable:
        asked["reward_model.model.path"] = str(cfg.reward_model.model.path)
    return asked


def _image_problems(cfg: PPOConfig) -> Iterator[str]:
    """Models that read images where prompts are text, if transformers has none of their kind that reads text alone; and
    models of text, or of a kind that was not tried, where prompts have images."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if cfg.data.image_key is not None:
        path = str(cfg.actor_rollout_ref.model.path)
        kind = whole_config(path).get("model_type")
        if kind is not None and kind not in IMAGE_MODELS:
            yield (
                f"data.image_key={cfg.data.image_key}: actor_rollout_ref.model.path={path} is a model of kind {kind}; "
                f"those that read images here are {' and '.join(IMAGE_MODELS)}. Set it to one, or leave image_key out."
            )
        return
    for key, path in _models(cfg).items():
        config = whole_config(path)
        kind = config.get("model_type")
        if "vision_config" in config and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            yield (
                f"{key}={path} is a model of images and text ({kind}), and prompts are text. Set it to a model of "
                "text, or data.image_key to the column of images."
            )


def _position_problems(cfg: PPOConfig) -> Iterator[str]:
    data = cfg.data
    longest = data.max_prompt_length + data.max_response_length
    for key, path in _models(cfg).items():
        setting = f"{key.removesuffix('.path')}.max_position_embeddings"
        can_be_set = is_known_key(setting)  # not of a teacher
        otherwise = f", or set {setting}" if can_be_set else ""
        limit = (value_of(cfg, setting) if can_be_set else None) or max_positions(config_of(path))
        if limit is not None and longest > limit:
            yield (
                f"data.max_prompt_length={data.max_prompt_length} and data.max_response_length="
                f"{data.max_response_length} make {longest} tokens, but the model of {key} has {limit} positions "
                f"(max_position_embeddings in its config.json). Lower them{otherwise}."
            )


def _teacher_problems(cfg: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[PacelineError]:
    """Teachers that have other tokens than the policy: what they say of a token would be of another one.

    Tokens that were added to a tokenizer for other uses may differ.
    """
    from paceline.config.derived import teacher_models
    from paceline.data.tokenizer import load_tokenizer

    def own(one: PreTrainedTokenizerBase) -> dict[str, int]:
        added = one.get_added_vocab()
        return {token: number for token, number in one.get_vocab().items() if token not in added}

    for name, model in teacher_models(cfg).items():
        try:
            teacher = load_tokenizer(str(model.path), trust_remote_code=model.trust_remote_code)
        except PacelineError as error:
            yield error
            continue
        theirs, ours = own(teacher), own(tokenizer)
        differing = sorted(token for token in theirs.keys() | ours.keys() if theirs.get(token) != ours.get(token))
        if differing:
            yield ConfigError(
                f"{_teacher_key(name)}={model.path}: its tokenizer is another than the policy's: {len(differing)} "
                f"tokens are not the same, such as {differing[0]!r} ({theirs.get(differing[0])} there, "
                f"{ours.get(differing[0])} here). A teacher scores the policy's tokens: set a model with the same "
                "vocabulary."
            )


def _pupil_problems(cfg: PPOConfig, datasets: Mapping[str, RLHFDataset]) -> Iterator[PacelineError]:
    """Training rows that no teacher has."""
    from paceline.trainer.ppo.teachers import teacher_names

    section = cfg.distillation
    for key, dataset in datasets.items() if section.enabled else ():
        if key.startswith("data.train_files"):
            try:
                teacher_names(section, dataset.column(section.teacher_key))
            except PacelineError as error:
                yield error


# --------------------------------------------------------------------------------------------- prompts and rewards


def _agent_problems(
    cfg: PPOConfig, tokenizer: PreTrainedTokenizerBase, datasets: dict[str, RLHFDataset]
) -> Iterator[PacelineError]:
    """Tools and agent loops that can't be made, those that rows name among them."""
    from paceline.config.derived import uses_agents

    if not uses_agents(cfg):
        return
    from paceline.workers.agent_worker import make_runner

    try:
        runner = make_runner(cfg.actor_rollout_ref.rollout, cfg.data, tokenizer)
        for dataset in datasets.values():
            runner.check(dataset.column("agent_name"))
    except PacelineError as error:
        yield error


def _read_data(
    cfg: PPOConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[str, RLHFDataset], list[PacelineError]]:
    """The datasets of training and validation, or of a sample of their rows; and what is wrong with them."""
    data = cfg.data
    datasets: dict[str, RLHFDataset] = {}
    problems: list[PacelineError] = []
    if data.custom_cls.path is not None:  # a class of the user's, which may do anything, reads them once: in the run
        return datasets, problems
    for key, files, most in (
        ("data.train_files", data.train_files, data.train_max_samples),
        ("data.val_files", data.val_files, data.val_max_samples),
    ):
        if not files:
            continue
        try:
            datasets |= _datasets(key, data_files(files), tokenizer, cfg, most)
        except PacelineError as error:
            problems.append(error)
    return datasets, problems


def _datasets(
    key: str, files: list[str], tokenizer: PreTrainedTokenizerBase, cfg: PPOConfig, most: int
) -> dict[str, RLHFDataset]:
    from paceline.data.rl_dataset import RLHFDataset
    from paceline.trainer.ppo.loaders import image_reader, prompt_config

    images = image_reader(cfg)
    # A dry run leaves no file; of a run, what is tokenised here is tokenised.
    data = prompt_config(cfg)
    data = dataclasses.replace(data, cache_dir="") if cfg.trainer.dry_run else data
    rows = {file: table_head(file)[0] for file in files}
    total = sum(rows.values()) if most < 0 else min(most, sum(rows.values()))
    if total <= SMALL:
        return {key: RLHFDataset(files, tokenizer, data, max_samples=most, images=images)}
    share = max(1, SAMPLED // len(files))
    # Only all rows show whether a filter leaves anything: the run checks that.
    sampled = dataclasses.replace(
        data, cache_dir="", truncation="left" if data.filter_overlong_prompts else data.truncation,
        filter_overlong_prompts=False,
    )  # fmt: skip
    found = {f"{key} {file}": RLHFDataset([file], tokenizer, sampled, share, images) for file in files if rows[file]}
    if data.filter_overlong_prompts and all(dataset.num_cut == len(dataset) for dataset in found.values()):
        return {key: RLHFDataset(files, tokenizer, data, max_samples=most, images=images)}
    return found


def _reward_problems(
    cfg: PPOConfig, tokenizer: PreTrainedTokenizerBase, datasets: dict[str, RLHFDataset]
) -> Iterator[PacelineError]:
    """Rows that nothing scores. A function of the user's scores all of them."""
    from paceline.config.derived import learns_from_rewards
    from paceline.trainer.ppo.loaders import reads_rewards

    if cfg.custom_reward_function.path is not None or not reads_rewards(cfg):
        return
    from paceline.rewards import make_reward_manager
    from paceline.trainer.ppo.scoring import check_scorable

    seen: set[str] = set()
    for key, dataset in datasets.items():
        validation = key.startswith("data.val_files")
        if not (validation or learns_from_rewards(cfg)):
            continue
        has_model = cfg.reward_model.enable and (cfg.reward_model.validate or not validation)
        # Only training as a whole must use the model: a sample need not, and validation need not.
        may_lack_model = key != "data.train_files"
        try:
            manager = make_reward_manager(cfg, tokenizer, num_examine=0, validation=validation)
            check_scorable(manager, dataset, cfg.data.reward_fn_key, has_model=has_model, validation=may_lack_model)
        except PacelineError as error:
            if str(error) not in seen:
                seen.add(str(error))
                yield error


# --------------------------------------------------------------------------------------------------- the machine


def login_problems(cfg: AnyRunConfig) -> Iterator[str]:
    """wandb and swanlab without a login ask for one in a process that has no terminal."""
    runtime_env = cfg.ray_kwargs.ray_init.get("runtime_env") or {}
    given = runtime_env.get("env_vars") if isinstance(runtime_env, Mapping) else None
    variables = {**os.environ, **(given if isinstance(given, Mapping) else {})}
    if cfg.ray_kwargs.ray_init.get("address") or os.environ.get("RAY_ADDRESS"):
        return  # the run's process may be on another machine
    if "wandb" in cfg.trainer.logger and not _is_local(variables, "WANDB", ("offline", "disabled", "dryrun")):
        host = urlparse(str(variables.get("WANDB_BASE_URL") or "https://api.wandb.ai")).hostname
        if not _has_login([variables.get("NETRC"), "~/.netrc", "~/_netrc"], host):
            yield (
                f"trainer.logger=wandb has no login for {host}. Run `wandb login`, set WANDB_API_KEY, or set "
                "WANDB_MODE=offline to keep the records here."
            )
    if "swanlab" in cfg.trainer.logger and not _is_local(variables, "SWANLAB", ("offline", "local", "disabled")):
        folders = [".swanlab", variables.get("SWANLAB_ROOT") or variables.get("SWANLAB_SAVE_DIR") or "~/.swanlab"]
        if not _has_login([f"{folder}/.netrc" for folder in folders]):
            yield (
                "trainer.logger=swanlab has no login. Run `swanlab login`, set SWANLAB_API_KEY, or set "
                "SWANLAB_MODE=offline to keep the records here."
            )


def _is_local(variables: Mapping[str, object], tracker: str, modes: Container[str]) -> bool:
    """Whether a tracker's variables have a key for its server, or say that it needs none."""
    return bool(variables.get(f"{tracker}_API_KEY")) or str(variables.get(f"{tracker}_MODE", "")).lower() in modes


def _has_login(files: Iterable[object], host: str | None = None) -> bool:
    """Whether a netrc file has a login for a host, or for any."""
    for file in filter(None, files):
        try:
            known = netrc.netrc(os.path.expanduser(str(file)))
        except (OSError, netrc.NetrcParseError):
            continue
        if known.hosts if host is None else known.authenticators(host):
            return True
    return False


def crowded_cores(cfg: AnyRunConfig) -> str | None:
    """What to say of more devices on a CPU than this machine has cores."""
    cores = num_cores()
    devices, joins = (
        cfg.trainer.n_gpus_per_node,
        cfg.ray_kwargs.ray_init.get("address") or os.environ.get("RAY_ADDRESS"),
    )
    if cfg.trainer.device != "cpu" or joins or devices <= cores:
        return None
    return (
        f"trainer.n_gpus_per_node={devices} on a CPU are {devices} processes, and this machine has {cores} cores: they "
        f"take turns, and Ray grants them only with ray_kwargs.ray_init.num_cpus={devices}. Use at most "
        f"{cores}."
    )
