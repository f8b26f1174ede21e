"""`paceline serve` as a user has it: a process of its own, OpenAI's client, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli import main
from tests.runs import heed_ctrl_c
from tests.tiny import make_tiny_model

openai = pytest.importorskip("openai")
COMMAND = "import sys; from paceline.cli import main; sys.exit(main())"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_model_is_served_until_it_is_told_to_end(tmp_path: Path, number: signal.Signals) -> None:
    model = make_tiny_model(tmp_path / "model")
    command = [sys.executable, "-c", COMMAND, "serve", "--model", str(model), "--max-tokens", "40"]
    server = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PACELINE_SERVE_KEY": "a-key-of-the-test"},
        preexec_fn=heed_ctrl_c,
    )
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line.startswith("export OPENAI_BASE_URL=http://127.0.0.1:"), line
        assert line.endswith("OPENAI_API_KEY=$PACELINE_SERVE_KEY\n")
        url = line.split()[1].partition("=")[2]
        asked = {"model": "m", "messages": [{"role": "user", "content": "1+1="}], "seed": 1, "max_tokens": 9}
        with openai.OpenAI(base_url=url, api_key="a-key-of-the-test", max_retries=0, timeout=60) as client:
            text = client.chat.completions.create(**asked).choices[0].message.content
            stream = client.chat.completions.create(**asked, stream=True)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text
            many = client.chat.completions.create(**asked, n=3)
            assert many.choices[0].message.content == text
            with pytest.raises(openai.AuthenticationError):
                client.with_options(api_key="another-key").models.list()
            server.send_signal(number)
            out, err = server.communicate(timeout=30)
            assert (server.returncode, out.splitlines()[-1], err) == (0, "ended", "")
            with pytest.raises(openai.APIConnectionError):
                client.models.list()
    finally:
        server.kill()


def test_a_key_that_can_be_guessed_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_SERVE_KEY", "short")
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--model", "any"])
    assert ended.value.code == 2
    assert "PACELINE_SERVE_KEY has 5 characters. Give at least 16" in capsys.readouterr().err
