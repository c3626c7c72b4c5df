"""A served endpoint for the tests of this folder; see served.py, which is importable here."""

import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from served import TINY_SETTINGS, ServedEndpoint


@pytest.fixture(scope="module")
def dead_ray():
    """A folder for Ray's files where a Ray that is no more has left its address: what `ray.init`
    would connect to. Its path is short, as those of sockets must be."""
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        (Path(folder) / "ray").mkdir()
        (Path(folder) / "ray" / "ray_current_cluster").write_text("127.0.0.1:9")
        yield folder


@pytest.fixture(scope="module")
def endpoint(tiny_model, tmp_path_factory, dead_ray):
    run_dir = tmp_path_factory.mktemp("run") / "e"
    served = ServedEndpoint(tiny_model, run_dir, *TINY_SETTINGS, env={"RAY_TMPDIR": dead_ray})
    try:
        yield served.start()
    finally:
        if served.process is not None:
            served.stop()
