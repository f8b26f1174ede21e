import inspect

import pytest
import ray

from paceline.config.load import load_config
from paceline.errors import ConfigError
from paceline.trainer import ray_session


@pytest.mark.parametrize(
    ("asked", "settings"),
    [
        ({}, ray_session.OWN_RAY),
        ({"num_cpus": 2}, ray_session.OWN_RAY),
        ({"_system_config": {"num_workers_soft_limit": 3}}, ray_session.OWN_RAY | {"num_workers_soft_limit": 3}),
        ({"include_dashboard": True}, None),
        ({"address": "auto"}, None),
    ],
)
def test_only_a_ray_of_the_runs_own_is_told_to_keep_nothing_idle(asked, settings, monkeypatch):
    given = {}
    init = lambda **arguments: given.update(arguments)  # noqa: E731
    init.__signature__ = inspect.signature(ray.init)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ray_session.start_ray(load_config({"ray_kwargs": {"ray_init": asked}}))
    assert given.get("_system_config") == settings
    assert asked.keys() <= given.keys()


def test_a_ray_that_does_not_start_shows_no_secrets(monkeypatch):
    def init(**arguments):
        raise ConnectionError(f"nobody at {arguments['address']}")

    init.__signature__ = inspect.signature(ray.init)
    monkeypatch.setattr(ray, "init", init)
    variables = {"HF_TOKEN": "first secret", "MY_LOGIN": "second secret"}
    asked = {
        "address": "ray://me:third@host:10001",
        "num_cpus": 2,
        "_redis_password": "fourth secret",
        "runtime_env": {"env_vars": variables},
    }
    with pytest.raises(ConfigError) as caught:
        ray_session.start_ray(load_config({"ray_kwargs": {"ray_init": asked}}))
    text = str(caught.value)
    assert "ray_init of address=ray://***@host:10001, num_cpus=2, _redis_password=***: nobody at ray://***@" in text
    assert "secret" not in text
    assert "third" not in text
