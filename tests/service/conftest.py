"""A served endpoint for the tests of this folder; see served.py, which is importable here."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from served import TINY_SETTINGS, ServedEndpoint


@pytest.fixture(scope="module")
def endpoint(tiny_model, tmp_path_factory):
    served = ServedEndpoint(tiny_model, tmp_path_factory.mktemp("run") / "e", *TINY_SETTINGS)
    try:
        yield served.start()
    finally:
        if served.process is not None:
            served.stop()
