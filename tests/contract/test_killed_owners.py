"""No process of ours outlives the one that it works for, however that one ends. `test_sandbox.py` has that of jails."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

# A script without a __main__ guard, as users write them.
SCRIPT = r"""
import sys, time
from paceline.rewards.score import math
from paceline.rewards.score.math import shared_grader
print(math.compute_score(r"\boxed{x+1}", "1+x"), shared_grader()._process.pid, flush=True)
if sys.argv[1] == "hang":
    math.compute_score(r"\boxed{9^{9^{9^9}}}", "1+x")
"""


@pytest.mark.parametrize("end", ["exits", pytest.param("hang", marks=pytest.mark.slow)])
def test_no_process_is_left_behind_even_after_a_kill_in_the_middle(end):
    script = subprocess.Popen([sys.executable, "-c", SCRIPT, end], stdout=subprocess.PIPE, text=True)
    score, pid = script.stdout.readline().split()
    assert score == "1.0"
    server = psutil.Process(int(pid)) if psutil.pid_exists(int(pid)) else None
    workers = server.children() if server and end == "hang" else []
    if end == "hang":
        assert workers
        time.sleep(0.5)
        workers = server.children()
        script.send_signal(signal.SIGKILL)
    script.wait(30)
    script.stdout.close()
    _, alive = psutil.wait_procs([*workers, *([server] if server else [])], timeout=20)
    assert alive == []


LOOP = """
import os

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    while solution_str == "loop":
        pass
    return {"score": 1.0, "pid": os.getpid()}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")
def test_a_hanging_function_does_not_outlive_a_killed_reward_process(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(LOOP)
    program = (
        "import sys\nfrom paceline.rewards.killable import FunctionProcess\n"
        "from paceline.rewards import load_custom_reward\n"
        f"process = FunctionProcess(load_custom_reward({str(file)!r}).source())\n"
        "calls = [((None, text, None, None), {}) for text in ('a', 'loop')]\n"
        "print(process.call_all(calls[:1], 60)[0]['pid'], flush=True)\nprocess.call_all(calls[1:], 60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    psutil.wait_procs([child], timeout=20)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
