"""docs/metrics.md and the code name the same metrics."""

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from online_sao.config import GuardConfig
from online_sao.learner.guards import GUARDS
from online_sao.service.metrics import SCRAPED, Metrics

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "metrics.md").read_text()
NAME = re.compile(r'"((?:policy|critic|advantage|rollout|seconds|pretraining|refused)/[a-z0-9_]+)"')


def named_in_code() -> set[str]:
    code = "\n".join(path.read_text() for path in (ROOT / "online_sao").rglob("*.py"))
    timed = {f"seconds/{part}" for part in re.findall(r'clock\("(\w+)"\)', code)}
    refused = {f"refused/{part}" for part in re.findall(r'_refused\(batch, "(\w+)"', code)}
    return set(NAME.findall(code)) | timed | refused


def first_cells(heading: str) -> list[str]:
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)


def test_metrics_of_updates():
    assert set(first_cells("Of an update")) == named_in_code()
    assert len(named_in_code()) > 30


def test_what_a_scrape_gives():
    metrics = Metrics()
    metrics.count_request("/v1/models", 200, 0.1)
    samples = [(d.name, dict.fromkeys(d.labels, "x"), 1.0) for d in SCRAPED]
    text = metrics.render(samples).decode()
    families = {family.name for family in text_string_to_metric_families(text)}
    ours = {name for name in families if not name.endswith("_created")}
    assert set(first_cells("`GET /metrics`")) == ours


def test_guards_and_their_settings():
    assert first_cells("Of the guards") == [guard.name for guard in GUARDS]
    named = set(re.findall(r"`guards\.(\w+)`", PAGE))
    assert {guard.setting for guard in GUARDS} <= named <= set(GuardConfig.model_fields)
