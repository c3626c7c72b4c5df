"""Files that somebody may have changed are never unpickled: that would run what they hold."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
UNPICKLES = re.compile(
    r"^\s*(import|from) (c?pickle|dill|joblib|shelve)\b|\btorch\.load\(|allow_pickle=True|"
    r"pickle\.loads?\(|weights_only=False|use_safetensors=False|trust_remote_code=True",
    re.MULTILINE,
)


def test_nothing_of_ours_unpickles():
    sources = [
        p for part in ("online_sao", "judge", "dashboard") for p in (ROOT / part).rglob("*.py")
    ]
    assert len(sources) > 50
    assert [str(p) for p in sources if UNPICKLES.search(p.read_text())] == []


def test_the_pattern_finds_what_it_is_for():
    for line in ("import pickle", "  from dill import x", "x = torch.load(p)", "pickle.loads(b)"):
        assert UNPICKLES.search(line)
    assert not UNPICKLES.search("safetensors.torch.load_file(path)")
