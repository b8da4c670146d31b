"""The alerts and recording rules: checked and tried out by promtool, and evaluated on a real server's metrics."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from diffusion_backend.telemetry import ERROR_REASONS
from tests.observability.conftest import Scraped, needs_prometheus
from tests.observability.names import labels_of, metrics_of
from tests.support.client import eventually
from tools.dashboard.prometheus import FOLDER

ROOT = Path(__file__).parents[2]
RUNBOOK = (ROOT / "docs" / "monitoring.md").read_text()
CASES = sorted((FOLDER / "tests").glob("*.yml"))


def rules_of(path: Path) -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


ALERTS = {rule["alert"]: rule for rule in rules_of(FOLDER / "rules" / "alerts.yml")}
RECORDED = {
    rule["record"]: rule for name in ("recording", "targets") for rule in rules_of(FOLDER / "rules" / f"{name}.yml")
}
RULES = [pytest.param(rule, id=name) for name, rule in {**RECORDED, **ALERTS}.items()]


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=300, check=False)


@needs_prometheus
def test_the_configuration_is_valid() -> None:
    """With the rules that it names."""
    done = promtool("check", "config", FOLDER / "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 rule files found" in done.stdout


@needs_prometheus
def test_the_rules_are_valid() -> None:
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", *sorted((FOLDER / "rules").glob("*.yml")))
    assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in CASES])
def test_rules_do_as_their_cases_say(path: Path) -> None:
    done = promtool("test", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr


LOOSENED = {
    "DiffusionAllInstancesDown": ("for", "1m", "0s"),
    "DiffusionInstanceDown": ("for", "2m", "0s"),
    "DiffusionInstancesMissing": ("for", "5m", "0s"),
    "DiffusionModelMissing": ("expr", "and on (job, instance) (up == 1)", ""),
    "DiffusionNoModel": ("expr", "unless on (job, instance) diffusion_requests_running", ""),
    "DiffusionRestarting": ("expr", ">= 2", ">= 1"),
    "DiffusionStalled": ("expr", "== 0", ">= 0"),
    "DiffusionBalancerEmpty": ("for", "1m", "0s"),
    "DiffusionQueueGrowing": ("expr", "> 0", ">= 0"),
    "DiffusionQueueSlow": ("expr", "> on (model) group_left () diffusion:queue_target_seconds", "> 0"),
    "DiffusionLatencyHigh": ("expr", "> on (model) group_left () diffusion:latency_target_seconds", "> 0"),
    "DiffusionDeadlineMisses": ("expr", "> 0.05", "> 0.01"),
    "DiffusionCancelled": ("expr", "> 0.3", "> 0"),
    "DiffusionErrors": ("expr", ">= 3", ">= 1"),
    "DiffusionOutOfMemory": ("expr", "> 0", ">= 0"),
    "DiffusionRefused": ("expr", "0.2 *", "0.01 *"),
    "DiffusionTritonFailures": ("expr", "BACKEND|OTHER", "BACKEND|OTHER|REJECTED"),
    "DiffusionBatchingOff": ("expr", ',reason!~"disabled|deterministic"', ""),
    "DiffusionSoloCalls": ("expr", "> 0.1", "> 0.01"),
    "DiffusionBatchesSmall": ("expr", ">= 4 * max", ">= max"),
    "DiffusionStepsFalling": ("expr", "> 0", ">= 0"),
}
"""A change to each alert that makes it fire too easily."""


def silent_alerts(folder: Path, changes: dict[str, dict[str, str]]) -> set[str]:
    """Run all cases with some fields of the alerts changed; return the alerts that no case finds fault with."""
    shutil.copytree(FOLDER, folder, dirs_exist_ok=True)
    path = folder / "rules" / "alerts.yml"
    content = yaml.safe_load(path.read_text())
    for group in content["groups"]:
        for rule in group["rules"]:
            rule.update(changes[rule["alert"]])
    path.write_text(yaml.safe_dump(content))
    done = promtool("test", "rules", *sorted((folder / "tests").glob("*.yml")))
    return set(ALERTS) - set(re.findall(r"alertname: (\w+)", done.stdout + done.stderr))


@needs_prometheus
def test_the_cases_notice_an_alert_that_never_fires(tmp_path: Path) -> None:
    assert silent_alerts(tmp_path, {name: {"expr": "vector(0) > 1"} for name in ALERTS}) == set()


@needs_prometheus
def test_the_cases_notice_an_alert_that_fires_too_easily(tmp_path: Path) -> None:
    changes = {}
    for name, (field, old, new) in LOOSENED.items():
        assert ALERTS[name][field].count(old) == 1, name
        changes[name] = {field: ALERTS[name][field].replace(old, new)}
    assert silent_alerts(tmp_path, changes) == set()


@needs_prometheus
def test_the_cases_find_no_fault_with_the_alerts_as_they_are(tmp_path: Path) -> None:
    assert silent_alerts(tmp_path, {name: {} for name in ALERTS}) == set(ALERTS)


@needs_prometheus
def test_rules_are_evaluated_on_a_real_server(scraped: Scraped) -> None:
    """Without an error, and what is recorded has values."""

    def settled() -> bool:
        rules = [rule for group in scraped.prometheus.rule_groups() for rule in group["rules"]]
        return all(rule["health"] != "unknown" for rule in rules)

    eventually(settled, "every rule evaluated")
    groups = scraped.prometheus.rule_groups()
    assert {rule["name"] for group in groups for rule in group["rules"]} == {*RECORDED, *ALERTS}
    assert [rule for group in groups for rule in group["rules"] if rule["health"] != "ok"] == []
    without = [name for name in RECORDED if not scraped.prometheus.query(f"last_over_time({name}[10m])")]
    assert without == []


@needs_prometheus
def test_a_healthy_server_is_called_available(scraped: Scraped) -> None:
    states = {
        rule["name"]: rule["state"]
        for group in scraped.prometheus.rule_groups()
        for rule in group["rules"]
        if group["name"] == "diffusion-availability"
    }
    assert len(states) == 8
    assert set(states.values()) == {"inactive"}


@needs_prometheus
def test_the_model_that_is_not_batched_is_found_out(scraped: Scraped) -> None:
    (found,) = scraped.prometheus.query('ALERTS{alertname="DiffusionBatchingOff"}', scraped.end)
    assert found.labels["model"] == "pag"
    assert found.labels["reason"] == "module_state"


@needs_prometheus
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_names_metrics_and_records_that_there_are(scraped: Scraped, rule: dict[str, Any]) -> None:
    known = metrics_of(scraped.page)
    for name, labels in labels_of(rule["expr"]).items():
        assert name in known, name
        assert labels <= known[name] | {"job", "instance"}
    assert set(re.findall(r"\b(?:job|instance|model|diffusion):[\w:]+", rule["expr"])) <= set(RECORDED)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_names_reasons_that_there_are(rule: dict[str, Any]) -> None:
    for values in re.findall(r'errors(?:_total|:rate5m)\{reason(?:=|=~|!~)"([^"]+)"', rule["expr"]):
        assert set(values.split("|")) <= set(ERROR_REASONS)


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_is_in_the_runbook(name: str) -> None:
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert set(rule["annotations"]) == {"summary", "description", "runbook"}
    assert rule["annotations"]["runbook"] == f"docs/monitoring.md#{name.lower()}"
    assert f"\n### {name}\n" in RUNBOOK
    section = RUNBOOK.split(f"\n### {name}\n", 1)[1].split("\n#", 1)[0]
    assert f"({rule['labels']['severity']})" in section, "the severity is not the alert's"


def test_the_runbook_knows_no_other_alert() -> None:
    assert set(re.findall(r"^### (Diffusion\w+)$", RUNBOOK, flags=re.MULTILINE)) == set(ALERTS)
