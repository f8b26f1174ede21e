"""Builds the simulated device: a folder that gives it to every process which has that folder on its PYTHONPATH."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
NAME = "npu"
"""As torch and `trainer.device` know it."""
KERNELS = "simulated_device_kernels"
FLAGS = ["-std=c++20", "-shared", "-fPIC", "-O0", "-w", f"-DTORCH_EXTENSION_NAME={KERNELS}"]
LIBRARIES = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
METADATA = {
    "METADATA": "Metadata-Version: 2.1\nName: simulated-device\nVersion: 1.0\n",
    "entry_points.txt": "[torch.backends]\nsimulated_device = simulated_device:load\n",
}


def give_to_this_process_and_its_children() -> None:
    """Before torch is imported: it loads the device as it does that of any vendor."""
    assert "torch" not in sys.modules
    folder = str(build())
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))


def build() -> Path:
    """The folder of the device; built once for each version of its files, of torch and of Python."""
    sources = b"".join((HERE / name).read_bytes() for name in ("device.cpp", "collectives.h", "simulated_device.py"))
    key = hashlib.sha256(sources + f"{version('torch')} {sys.version} {FLAGS}".encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"paceline-simulated-device-{os.getuid()}" / key
    if not folder.is_dir():
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            _build(made)
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was quicker
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder


def _build(folder: Path) -> None:
    """One call of the compiler, without torch: once imported, it would have no more devices."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch = Path(spec.origin).parent
    includes = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    command = [os.environ.get("CXX", "c++"), *FLAGS, *(f"-isystem{path}" for path in includes)]
    command += [str(HERE / "device.cpp"), "-o", str(folder / f"{KERNELS}.so"), f"-L{torch / 'lib'}", *LIBRARIES]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    except FileNotFoundError as error:
        raise RuntimeError(f"the simulated device needs a C++ compiler: {error}") from error
    if done.returncode:
        raise RuntimeError(f"the simulated device can't be built:\n{done.stderr}")
    shutil.copy(HERE / "simulated_device.py", folder)
    metadata = folder / "simulated_device-1.0.dist-info"
    metadata.mkdir()
    for name, text in METADATA.items():
        (metadata / name).write_text(text)
