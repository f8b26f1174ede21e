"""The environment of a run's processes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from paceline.errors import ConfigError

PPO_RAY_RUNTIME_ENV: dict[str, dict[str, str]] = {
    "env_vars": {
        # Left open, tokenizers warns in every process that forks.
        "TOKENIZERS_PARALLELISM": "true",
        # Problems of collectives are worth a line, their start-up is not.
        "NCCL_DEBUG": "WARN",
        "VLLM_LOGGING_LEVEL": "WARN",
        # glibc: what a step freed is kept for the next one. Given back, a model's activations would have to be got from
        # the system again at every update, page by page.
        "MALLOC_MMAP_THRESHOLD_": str(2**32),
        "MALLOC_TRIM_THRESHOLD_": str(2**34),
    },
}
"""What every process of a run gets, unless the user says otherwise."""


def get_ppo_ray_runtime_env() -> dict[str, dict[str, str]]:
    """PPO_RAY_RUNTIME_ENV without the variables that the user's shell sets: those are inherited, so the shell wins."""
    variables = PPO_RAY_RUNTIME_ENV["env_vars"]
    return {"env_vars": {name: value for name, value in variables.items() if name not in os.environ}}


def merged_runtime_env(
    user: Mapping[str, object] | None = None, *, run: Mapping[str, str] | None = None
) -> dict[str, object]:
    """The runtime environment for Ray: our variables under the shell's under those of the user's `runtime_env`.

    The shell's values are passed on by name, since the nodes of a running cluster did not inherit them. `run` has those
    of this run alone.
    """
    variables = dict(get_ppo_ray_runtime_env()["env_vars"])
    variables |= {name: os.environ[name] for name in PPO_RAY_RUNTIME_ENV["env_vars"] if name in os.environ}
    variables |= run or {}
    # Ray refuses a variable that both the job and its driver set, and the job's reaches all processes as well.
    variables = {name: value for name, value in variables.items() if name not in _variables(_of_job())}
    user = dict(user or {})
    variables |= _variables(user)
    return {**user, "env_vars": variables}


def without_those_of_the_job(user: Mapping[str, object]) -> dict[str, object]:
    """A user's runtime environment without what `ray job submit` was given just so: Ray would refuse it twice.

    Raises:
        ConfigError: the two differ. Ray's own words would be all variables of the run.
    """
    job, ours, of_job = _of_job(), _variables(user), _variables(_of_job())
    both = [name for name in user if name in job and name != "env_vars"]
    differ = [name for name in both if user[name] != job[name]]
    differ += [f"env_vars.{name}" for name, value in ours.items() if of_job.get(name, value) != value]
    if differ:
        raise ConfigError(
            [
                f"ray_kwargs.ray_init.runtime_env.{name} is another one in the submitted job's runtime environment: "
                "Ray takes only one. Set it in one place."
                for name in differ
            ]
        )
    left = {name: value for name, value in user.items() if name not in both and name != "env_vars"}
    return {**left, "env_vars": {name: value for name, value in ours.items() if name not in of_job}}


def _variables(runtime_env: Mapping[str, object]) -> dict[str, str]:
    variables = runtime_env.get("env_vars")
    return {name: str(value) for name, value in variables.items()} if isinstance(variables, Mapping) else {}


def _of_job() -> Mapping[str, object]:
    """The runtime environment that `ray job submit` was given, if this process is such a job."""
    job: dict[str, dict[str, object] | None] = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
    return job.get("runtime_env") or {}
