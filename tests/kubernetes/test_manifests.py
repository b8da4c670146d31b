"""What the overlays render to is valid for Kubernetes, and its parts fit each other, the image and the server."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from diffusion_backend.config import ModelConfig
from diffusion_backend.serve.drain import OVERTIME_S
from tests.kubernetes.rendered import (
    FOLDER,
    OVERLAYS,
    Manifest,
    argument,
    container,
    environment,
    one,
    pod,
    quantity,
    render,
)

ROOT = Path(__file__).parents[2]
KUBERNETES = ("1.30", kubernetes_validate.latest_version())
"""The oldest that the files are written for, and the newest that there is a schema of."""

UNVALIDATED = {"PodMonitor"}
"""Kinds of the Prometheus operator, whose schemas are not among Kubernetes': their fields are checked one by one."""

every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


@every_overlay
@pytest.mark.parametrize("version", KUBERNETES)
def test_every_object_is_valid(overlay: str, version: str) -> None:
    kinds = set()
    for item in render(overlay):
        kinds.add(item["kind"])
        if item["kind"] not in UNVALIDATED:
            kubernetes_validate.validate(item, version, strict=True)
    wanted = {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor", "ServiceAccount"}
    extra = {"cpu": set(), "gpu": {"PersistentVolumeClaim"}, "autoscaling": {"PersistentVolumeClaim"}}[overlay]
    assert kinds == wanted | extra | ({"HorizontalPodAutoscaler"} if overlay == "autoscaling" else set())


def test_a_wrong_object_is_not_valid() -> None:
    deployment: Manifest = yaml.safe_load(yaml.safe_dump(one("cpu", "Deployment")))
    deployment["spec"]["template"]["spec"]["terminationGracePeriod"] = 1
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriod"):
        kubernetes_validate.validate(deployment, KUBERNETES[-1], strict=True)


@every_overlay
def test_the_pod_monitor_has_the_fields_of_its_kind(overlay: str) -> None:
    monitor = one(overlay, "PodMonitor", "diffusion-triton")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert set(monitor["spec"]) <= {"selector", "podMetricsEndpoints", "sampleLimit"}
    assert isinstance(monitor["spec"]["sampleLimit"], int)
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert set(endpoint) == {"port", "path", "interval", "scrapeTimeout"}
    assert endpoint["port"] in {port["name"] for port in container(overlay)["ports"]}
    assert seconds(endpoint["scrapeTimeout"]) < seconds(endpoint["interval"])


def test_the_rules_of_prometheus_find_the_pods() -> None:
    """The operator's label `job` is the namespace and the PodMonitor's name."""
    job = f"pictures/{one('cpu', 'PodMonitor', 'diffusion-triton')['metadata']['name']}"
    rules = "".join(path.read_text() for path in (ROOT / "deploy" / "prometheus" / "rules").glob("*.y*ml"))
    patterns = set(re.findall(r'job=~"([^"]*)"', rules))
    assert patterns
    assert all(re.fullmatch(pattern, job) for pattern in patterns), patterns


def seconds(text: str) -> int:
    match = re.fullmatch(r"(\d+)s", text)
    assert match is not None, text
    return int(match[1])


# -- what selects what ------------------------------------------------------------------------------------------


def selectors(overlay: str) -> Iterator[tuple[str, dict[str, str]]]:
    for item in render(overlay):
        spec = item.get("spec", {})
        if item["kind"] == "Service":
            yield f"{item['kind']} {item['metadata']['name']}", spec["selector"]
        elif item["kind"] == "NetworkPolicy":
            yield item["kind"], spec["podSelector"]["matchLabels"]
        elif item["kind"] in ("Deployment", "PodDisruptionBudget", "PodMonitor"):
            yield item["kind"], spec["selector"]["matchLabels"]
    for constraint in pod(overlay)["spec"]["topologySpreadConstraints"]:
        yield "topologySpreadConstraints", constraint["labelSelector"]["matchLabels"]


@every_overlay
def test_every_selector_matches_the_pods(overlay: str) -> None:
    labels = pod(overlay)["metadata"]["labels"].items()
    found = dict(selectors(overlay))
    assert len(found) == 7
    for what, selector in found.items():
        assert selector, f"{what} would select everything"
        assert selector.items() <= labels, what


@every_overlay
def test_every_port_is_the_containers(overlay: str) -> None:
    ports = {port["name"]: port["containerPort"] for port in container(overlay)["ports"]}
    env = environment(overlay)
    assert ports == {name: int(env[f"{name.upper()}_PORT"]) for name in ("http", "grpc", "metrics")}
    for name in ("diffusion", "diffusion-grpc"):
        for port in one(overlay, "Service", name)["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]
            assert port["name"] != "metrics", "metrics are for Prometheus, not for clients"
    for rule in one(overlay, "NetworkPolicy")["spec"]["ingress"]:
        assert {port["port"] for port in rule["ports"]} <= set(ports)
    assert env["HOST"] == env["METRICS_ADDRESS"] == "0.0.0.0", "probes and Prometheus come from outside the container"


@every_overlay
def test_the_service_for_grpc_is_headless(overlay: str) -> None:
    assert one(overlay, "Service", "diffusion-grpc")["spec"]["clusterIP"] == "None"
    assert "clusterIP" not in one(overlay, "Service")["spec"]


@every_overlay
def test_metrics_are_for_the_namespace_of_prometheus_only(overlay: str) -> None:
    requests, metrics = one(overlay, "NetworkPolicy")["spec"]["ingress"]
    assert one(overlay, "NetworkPolicy")["spec"]["policyTypes"] == ["Ingress"]
    assert [port["port"] for port in metrics["ports"]] == ["metrics"]
    assert metrics["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    assert {port["port"] for port in requests["ports"]} == {"http", "grpc"}


# -- coming up and going down -----------------------------------------------------------------------------------


@every_overlay
def test_a_pod_is_ended_only_after_its_requests_had_their_time(overlay: str) -> None:
    (command, pause) = container(overlay)["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    needed = float(pause) + argument(overlay, "exit-timeout") + OVERTIME_S
    assert pod(overlay)["spec"]["terminationGracePeriodSeconds"] > needed


@every_overlay
def test_a_pod_leaves_the_services_before_it_stops(overlay: str) -> None:
    """The pause before the signal is longer than the readiness probe and a name server's cache of five seconds take."""
    (_, pause) = container(overlay)["lifecycle"]["preStop"]["exec"]["command"]
    probe = container(overlay)["readinessProbe"]
    assert float(pause) >= probe["periodSeconds"] + 5


@every_overlay
def test_the_start_may_take_as_long_as_the_launcher_allows(overlay: str) -> None:
    probe = container(overlay)["startupProbe"]
    longest = argument(overlay, "ready-timeout")
    assert longest >= 3600, "big weights from a cold store"
    assert probe["periodSeconds"] * probe["failureThreshold"] > longest, "the launcher, who knows why, speaks first"
    assert one(overlay, "Deployment")["spec"]["progressDeadlineSeconds"] > longest


@every_overlay
def test_a_busy_server_is_not_ended_for_answering_late(overlay: str) -> None:
    liveness, readiness = container(overlay)["livenessProbe"], container(overlay)["readinessProbe"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 60
    assert liveness["timeoutSeconds"] >= 10
    assert readiness["periodSeconds"] * readiness["failureThreshold"] <= 15
    assert liveness["httpGet"]["path"] != readiness["httpGet"]["path"], "one that is not ready is not dead"


# -- locked down ------------------------------------------------------------------------------------------------


@every_overlay
def test_the_pod_meets_the_restricted_standard(overlay: str) -> None:
    spec = pod(overlay)["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert one(overlay, "ServiceAccount", spec["serviceAccountName"])["automountServiceAccountToken"] is False
    assert container(overlay)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    assert not any("hostPath" in volume for volume in spec["volumes"])


@every_overlay
def test_the_pod_is_what_the_image_expects(overlay: str) -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    (user,) = re.findall(r"^USER (\d+):(\d+)$", dockerfile, re.MULTILINE)
    context = pod(overlay)["spec"]["securityContext"]
    assert (str(context["runAsUser"]), str(context["runAsGroup"])) == user
    assert context["fsGroup"] == context["runAsGroup"], "volumes are writable for the user"
    mounts = {mount["mountPath"]: mount["name"] for mount in container(overlay)["volumeMounts"]}
    # Where the image's environment says that files are written to; the root file system is read-only.
    for name in ("HOME", "HF_HOME"):
        (folder,) = re.findall(rf"\b{name}=(\S+)", dockerfile)
        assert folder in mounts, name
    assert 'ENTRYPOINT ["python3", "-m", "diffusion_backend.serve"]' in dockerfile, "the arguments are the launcher's"
    assert "command" not in container(overlay)


@every_overlay
def test_every_mount_has_its_volume_and_every_volume_its_limit(overlay: str) -> None:
    volumes = {volume["name"]: volume for volume in pod(overlay)["spec"]["volumes"]}
    mounts = [mount["name"] for mount in container(overlay)["volumeMounts"]]
    assert sorted(mounts) == sorted(volumes)
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    memory = quantity(container(overlay)["resources"]["limits"]["memory"])
    assert quantity(volumes["shm"]["emptyDir"]["sizeLimit"]) <= memory / 2, "it is counted as the container's memory"
    for claim in (volume["persistentVolumeClaim"] for volume in volumes.values() if "persistentVolumeClaim" in volume):
        one(overlay, "PersistentVolumeClaim", claim["claimName"])


@every_overlay
def test_resources_are_asked_for_and_limited(overlay: str) -> None:
    resources = container(overlay)["resources"]
    assert {"cpu", "memory"} <= set(resources["requests"])
    assert "memory" in resources["limits"]
    for name, amount in resources["requests"].items():
        assert quantity(amount) <= quantity(resources["limits"].get(name, amount))
    gpus = resources["limits"].get("nvidia.com/gpu")
    assert gpus == (None if overlay == "cpu" else "1")
    assert resources["requests"].get("nvidia.com/gpu") == gpus, "Kubernetes wants them equal"


@every_overlay
def test_there_are_replicas_to_lose_one_of(overlay: str) -> None:
    if overlay == "autoscaling":
        assert "replicas" not in one(overlay, "Deployment")["spec"], "the autoscaler owns the number"
        replicas = one(overlay, "HorizontalPodAutoscaler")["spec"]["minReplicas"]
    else:
        replicas = one(overlay, "Deployment")["spec"]["replicas"]
    assert replicas > one(overlay, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    rolling = one(overlay, "Deployment")["spec"]["strategy"]["rollingUpdate"]
    assert (rolling["maxUnavailable"], rolling["maxSurge"]) == ((0, 1) if overlay == "cpu" else (1, 0))


# -- the autoscaler ---------------------------------------------------------------------------------------------


def adapter_rule() -> dict[str, Any]:
    values = yaml.safe_load((FOLDER / "overlays" / "autoscaling" / "prometheus-adapter-values.yaml").read_text())
    (rule,) = values["rules"]["custom"]
    return rule


def test_the_autoscaler_reads_the_metric_that_the_adapter_makes() -> None:
    scaler = one("autoscaling", "HorizontalPodAutoscaler")["spec"]
    target = scaler["scaleTargetRef"]
    deployment = one("autoscaling", "Deployment")
    assert (target["apiVersion"], target["kind"]) == (deployment["apiVersion"], deployment["kind"])
    assert target["name"] == deployment["metadata"]["name"]
    (metric,) = scaler["metrics"]
    assert metric["pods"]["metric"]["name"] == adapter_rule()["name"]["as"]
    assert scaler["minReplicas"] < scaler["maxReplicas"]


def test_the_adapter_asks_for_metrics_that_are_documented() -> None:
    rule = adapter_rule()
    documented = (ROOT / "docs" / "metrics.md").read_text()
    series = set(re.findall(r"\b((?:nv|diffusion)_\w+)\{", rule["metricsQuery"]))
    assert series == {"nv_inference_pending_request_count", "diffusion_requests_waiting"}
    assert all(name in documented for name in series)
    assert rule["seriesQuery"].partition("{")[0] in series
    assert rule["metricsQuery"].count("<<.LabelMatchers>>") == len(series)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_the_adapters_query_counts_what_waits_in_both_queues(tmp_path: Path) -> None:
    """With the adapter's own values filled in, on series as two pods have them; the twin's requests count once."""
    filled = {"<<.LabelMatchers>>": 'namespace="pictures",pod=~"a|b"', "<<.GroupBy>>": "pod"}
    query = adapter_rule()["metricsQuery"]
    for name, value in filled.items():
        query = query.replace(name, value)
    waiting = {"a": (3, 2, 1), "b": (0, 5, 4)}  # Triton's queue of the twin, of the model, and the engine's
    series = []
    for name, (twin, stream, engine) in waiting.items():
        labels = f'namespace="pictures",pod="{name}"'
        series += [
            {"series": f'nv_inference_pending_request_count{{{labels},model="m_unary"}}', "values": str(twin)},
            {"series": f'nv_inference_pending_request_count{{{labels},model="m"}}', "values": str(stream)},
            {"series": f'diffusion_requests_waiting{{{labels},model="m"}}', "values": str(engine)},
        ]
    samples = [{"labels": f'{{pod="{name}"}}', "value": m + e} for name, (_, m, e) in waiting.items()]
    case = {"expr": query, "eval_time": "0m", "exp_samples": samples}
    cases = tmp_path / "cases.yaml"
    cases.write_text(
        yaml.safe_dump({"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": [case]}]})
    )
    result = subprocess.run(["promtool", "test", "rules", cases], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_target_is_half_of_what_a_replica_runs_at_once() -> None:
    (metric,) = one("autoscaling", "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert int(metric["pods"]["target"]["averageValue"]) == ModelConfig(model="m").max_num_seqs / 2


def test_the_autoscaler_waits_longer_than_a_replica_takes_to_leave() -> None:
    down = one("autoscaling", "HorizontalPodAutoscaler")["spec"]["behavior"]["scaleDown"]
    grace = pod("autoscaling")["spec"]["terminationGracePeriodSeconds"]
    assert down["stabilizationWindowSeconds"] > grace
    assert all(policy["periodSeconds"] >= grace for policy in down["policies"])
