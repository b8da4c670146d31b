"""Adapters of each request: in force for it, and for nobody else."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline

import diffusion_backend
from diffusion_backend.config import ModelConfig
from diffusion_backend.engine import DiffusionEngine, EngineConfig
from diffusion_backend.engine.executor import Capabilities
from diffusion_backend.errors import DiffusionError, InvalidArgumentError, ModelLoadError, RequestCancelledError
from diffusion_backend.pipelines import adapters as module
from diffusion_backend.pipelines import loader
from diffusion_backend.pipelines.adapters import Adapters
from diffusion_backend.pipelines.arguments import Limits, validate
from diffusion_backend.pipelines.executor import PipelineExecutor
from diffusion_backend.pipelines.module_state import differs, snapshot
from diffusion_backend.pipelines.probe import prepare
from diffusion_backend.pipelines.reference import run_alone
from diffusion_backend.request import DiffusionRequest, EventKind
from diffusion_backend.telemetry import MemorySink, Telemetry
from tests.pipelines.conftest import DEADLINE_S, Running, assert_alike, assert_unlike
from tests.support import tiny

# diffusers' own way with several adapters, for the bare pipeline.
pytestmark = pytest.mark.filterwarnings("ignore:Already found a .peft_config. attribute:UserWarning")

ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
SEED = 31


def make_lora(folder: Path, seed: int, *, text: bool = False, unet: bool = True, **config: Any) -> Path:
    """Write an adapter with random weights; return its file."""
    from peft import LoraConfig, inject_adapter_in_model
    from peft.utils import get_peft_model_state_dict

    print("seed of the adapter:", seed)
    torch.manual_seed(seed)
    pipeline = tiny.stable_diffusion()
    options = {"r": 4, "init_lora_weights": False, **config}
    torch.manual_seed(seed)
    layers = {}
    for name, wanted, targets in (("unet", unet, ATTENTION), ("text_encoder", text, ["q_proj", "v_proj"])):
        if wanted:
            part = getattr(pipeline, name)
            inject_adapter_in_model(LoraConfig(target_modules=targets, **options), part)
            layers[f"{name}_lora_layers"] = {k: 2 * v for k, v in get_peft_model_state_dict(part).items()}
    StableDiffusionPipeline.save_lora_weights(folder, weight_name=f"{folder.name}.safetensors", **layers)
    return folder / f"{folder.name}.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of adapters: a and b, of which b changes the text encoder too, and `text` that alone."""
    root = tmp_path_factory.mktemp("loras")
    make_lora(root / "a", SEED)
    make_lora(root / "b", SEED + 1, text=True)
    make_lora(root / "text", SEED + 2, text=True, unet=False)
    return root


@pytest.fixture(scope="module")
def sources(folder: Path) -> dict[str, str]:
    return {name: str(folder / name / f"{name}.safetensors") for name in ("a", "b", "text")}


class Adapted:
    """A pipeline with adapters as it is served, and a bare one that `diffusers` itself sets them for."""

    def __init__(self, registered: dict[str, str], root: Path | None = None) -> None:
        self.pipeline = tiny.stable_diffusion()
        self.adapters = Adapters(self.pipeline, registered, root=None if root is None else str(root))
        self.adapters.load_registered()
        capabilities, _, self.output_type = prepare(self.pipeline)
        executor = PipelineExecutor(self.pipeline, capabilities, adapters=self.adapters)
        self.capabilities: Capabilities = executor.capabilities
        self._bare_capabilities = capabilities
        self.bare = tiny.stable_diffusion()
        for name, source in registered.items():
            self.bare.load_lora_weights(source, adapter_name=name)
        self.untouched = tiny.stable_diffusion()

    def alone(self, request: DiffusionRequest) -> np.ndarray:
        """What `diffusers` gives with nothing of ours."""
        if not request.lora:
            return pictures(self.untouched, request, self.output_type)
        self.bare.enable_lora()
        self.bare.set_adapters([name for name, _ in request.lora], [weight for _, weight in request.lora])
        return pictures(self.bare, request, self.output_type)

    def validate(self, request: DiffusionRequest) -> None:
        validate(request, self.capabilities, Limits(), 32)

    @contextmanager
    def running(self) -> Iterator[tuple[Running, list[Any]]]:
        """An engine, and the selections of the requests in each forward, as it ran."""
        executor = PipelineExecutor(
            self.pipeline, self._bare_capabilities, output_type=self.output_type, adapters=self.adapters
        )
        groups: list[Any] = []
        execute = executor.execute

        def recorded(kind: Any, request_ids: Sequence[str]) -> Any:
            if kind.value == "forward":
                groups.append([executor._active[i].request.lora for i in request_ids])
            return execute(kind, request_ids)

        executor.execute = recorded  # type: ignore[method-assign]
        sink = MemorySink()
        engine = DiffusionEngine(executor, EngineConfig(), Telemetry(sink))
        engine.start()
        try:
            yield Running(engine, executor, sink), groups
            assert engine.collective_rpc(lambda _: list(executor._active)) == []
        finally:
            engine.shutdown()


def pictures(pipeline: Any, request: DiffusionRequest, output_type: str, **options: Any) -> np.ndarray:
    images = run_alone(pipeline, request, output_type=output_type, **options).images
    assert images is not None
    return images


@pytest.fixture(scope="module")
def adapted(sources: dict[str, str]) -> Adapted:
    return Adapted(sources)


@pytest.fixture
def rooted(sources: dict[str, str], folder: Path) -> Adapted:
    """New for each test: it loads files when they are first asked for."""
    return Adapted({"a": sources["a"]}, folder)


def make(seed: int, lora: Sequence[tuple[str, float]] = (), **params: Any) -> DiffusionRequest:
    return DiffusionRequest.make(
        "a red apple", seed=seed, lora=tuple(lora), **{"num_inference_steps": 4, "request_id": f"r{seed}", **params}
    )


# -- each request its own ---------------------------------------------------------------------------------------


def test_an_adapter_and_its_weight_change_the_pictures(adapted: Adapted) -> None:
    """Else the equalities below would prove nothing."""
    choices = [(), [("a", 1.0)], [("b", 1.0)], [("a", 0.5)], [("a", 1.0), ("b", 1.0)], [("text", 1.0)], [("a", -1.0)]]
    images = [adapted.alone(make(7, lora)) for lora in choices]
    for i, one in enumerate(images):
        for two in images[:i]:
            assert_unlike(one[0], two[0])
    assert adapted.capabilities.adapters == ("a", "b", "text")
    assert adapted.capabilities.joint == {"unet": None}, "with adapters the self-check failed"


def test_the_weights_are_those_of_the_file(adapted: Adapted, sources: dict[str, str]) -> None:
    """By hand, with neither peft nor transformers: W + weight * B A, in the UNet and the text encoder."""
    from safetensors.torch import load_file

    pipeline = tiny.stable_diffusion()
    weights = load_file(sources["b"])
    downs = [key for key in weights if ".lora_A." in key]
    assert {key.partition(".")[0] for key in downs} == {"unet", "text_encoder"}
    assert 2 * len(downs) == len(weights)
    for key in downs:
        component, _, path = key.partition(".")
        layer = getattr(pipeline, component).get_submodule(path.partition(".lora_A.")[0])
        layer.weight.data += 0.5 * weights[key.replace(".lora_A.", ".lora_B.")] @ weights[key]
    request = make(9, [("b", 0.5)])
    assert_alike(pictures(pipeline, replace(request, lora=()), adapted.output_type), adapted.alone(request))


def test_a_mix_of_adapters_gives_what_each_gives_alone(adapted: Adapted) -> None:
    lora: list[list[tuple[str, float]]] = [
        [],
        [("a", 1.0)],
        [("b", 1.0)],
        [("a", 0.5)],
        [("a", 1.0), ("b", 1.0)],
        [],
    ]
    requests = [make(seed, choice, num_inference_steps=3 + seed % 3) for seed, choice in enumerate(lora)]
    requests += [replace(r, request_id=f"again{i}", seeds=(100 + i,)) for i, r in enumerate(requests)]
    requests += [make(30, [("text", 1.0)]), make(31, [("b", 1.0), ("a", 1.0)])]  # the order is of no account
    expected = [adapted.alone(r) for r in requests]
    with adapted.running() as (running, groups):
        results = running.results(requests)
    for result, images in zip(results, expected, strict=True):
        assert_alike(result.output.images, images)
    assert {len({frozenset(lora) for lora in group}) for group in groups} == {1}, "different adapters in one forward"
    assert max(len(group) for group in groups) >= 3, "equal adapters did not share a forward"
    for choice in {r.lora for r in requests[:12]}:
        assert any(group.count(choice) >= 2 for group in groups), f"no joint forward with {choice}"
    assert running.solo_calls() == {}
    steps = sum(r.num_inference_steps or 0 for r in requests)
    assert sum(len(group) for group in groups) == steps
    assert sum(running.rows) == 2 * steps


def test_requests_without_adapters_get_the_bits_of_a_model_without(adapted: Adapted) -> None:
    with adapted.running() as (running, _):
        running.results([make(3, [("b", 2.0)])])
        result = running.results([make(3)])[0]
    assert np.array_equal(result.output.images, pictures(adapted.untouched, make(3), adapted.output_type))
    assert "lora" not in result.record.params


def test_the_reference_loop_takes_adapters_too(adapted: Adapted) -> None:
    request = make(5, [("a", 0.5), ("b", 1.0)])
    images = pictures(adapted.pipeline, request, adapted.output_type, adapters=adapted.adapters)
    assert_alike(images, adapted.alone(request))
    plain = make(5)
    images = pictures(adapted.pipeline, plain, adapted.output_type, adapters=adapted.adapters)
    assert np.array_equal(images, adapted.alone(plain))


def test_the_record_echoes_the_adapters(adapted: Adapted) -> None:
    with adapted.running() as (running, _):
        result = running.results([make(1, [("a", 0.5), ("b", 1.0)], num_inference_steps=1)])[0]
    assert result.record.params["lora"] == "a:0.5, b:1.0"


def test_adapters_are_set_only_when_they_change(adapted: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("set_adapters", "enable_lora", "disable_lora"):
        original = getattr(adapted.pipeline, name)

        def counted(*args: Any, name: str = name, original: Any = original) -> None:
            calls.append(name)
            original(*args)

        monkeypatch.setattr(adapted.pipeline, name, counted)
    adapted.adapters.use(())
    calls.clear()
    with adapted.running() as (running, _):
        running.results([make(1), make(2)])
        assert calls == []
        running.results([make(3, [("a", 1.0)]), make(4, [("a", 1.0)])])
        assert calls == ["set_adapters", "enable_lora"]
        running.results([make(5)])
        assert calls == ["set_adapters", "enable_lora", "disable_lora"]


def test_an_abort_in_the_middle_leaves_nothing_behind(adapted: Adapted) -> None:
    stepped = threading.Event()

    def on_event(event: Any) -> None:
        if event.kind is EventKind.STEP:
            stepped.set()

    with adapted.running() as (running, _):
        handle = running.together([make(1, [("b", 1.0)], num_inference_steps=900)], on_event)[0]
        assert stepped.wait(DEADLINE_S)
        handle.abort()
        with pytest.raises(RequestCancelledError):
            handle.result(DEADLINE_S)
        plain, other = running.results([make(2), make(3, [("a", 1.0)])])
    assert np.array_equal(plain.output.images, adapted.alone(make(2)))
    assert_alike(other.output.images, adapted.alone(make(3, [("a", 1.0)])))


def test_a_failure_in_the_middle_leaves_nothing_behind(adapted: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    """peft raises while it sets the adapters: they are half set, and must not be taken for set."""
    original, broken = adapted.pipeline.set_adapters, [True]

    def set_adapters(names: Any, weights: Any) -> None:
        original(names, weights)
        if broken:
            broken.clear()
            raise RuntimeError("half set")

    monkeypatch.setattr(adapted.pipeline, "set_adapters", set_adapters)
    adapted.adapters.use(())
    with adapted.running() as (running, _):
        with pytest.raises(DiffusionError, match="half set"):
            running.together([make(1, [("a", 1.0)])])[0].result(DEADLINE_S)
        again = running.results([make(3, [("a", 1.0)])])[0]
        plain = running.results([make(2)])[0]
    assert np.array_equal(plain.output.images, adapted.alone(make(2)))
    assert_alike(again.output.images, adapted.alone(make(3, [("a", 1.0)])))


# -- files under the root ---------------------------------------------------------------------------------------


def test_a_file_under_the_root_is_loaded_when_it_is_asked_for(rooted: Adapted, adapted: Adapted, folder: Path) -> None:
    """In the middle of others' runs; the layouts hold, and nothing looks like a pipeline changing its modules."""
    loads: list[str] = []
    load = rooted.pipeline.load_lora_weights
    rooted.pipeline.load_lora_weights = lambda source, **options: (loads.append(source), load(source, **options))
    by_path = [
        make(1),
        make(2, [("a", 1.0)]),
        make(3, [("b/b.safetensors", 1.0)]),
        make(4, [(str(folder / "b" / "b.safetensors"), 1.0)]),
        make(5, [("text/../b/b.safetensors", 1.0), ("a", 0.5)]),
        make(6),
    ]
    by_name = [make(1), make(2, [("a", 1.0)]), make(3, [("b", 1.0)]), make(4, [("b", 1.0)])]
    by_name += [make(5, [("b", 1.0), ("a", 0.5)]), make(6)]
    for request in by_path:
        rooted.validate(request)
    points = dict(vars(rooted.pipeline.unet))["forward"], dict(vars(rooted.pipeline.vae))["decode"]
    with rooted.running() as (running, groups):
        results = running.results(by_path)
    for result, request in zip(results, by_name, strict=True):
        assert_alike(result.output.images, adapted.alone(request))
    assert loads == [str(folder / "b" / "b.safetensors")], "one file, named in three ways, was loaded more than once"
    assert any(len(group) >= 2 and "b/b.safetensors" in str(group) for group in groups), "two names of a file, apart"
    assert running.solo_calls() == {}
    assert (rooted.pipeline.unet.forward, rooted.pipeline.vae.decode) == points
    # A call after it, watched as the probe watches: neither using nor leaving adapters looks like a change.
    before = snapshot(rooted.pipeline)
    rooted.adapters.use(rooted.adapters.select([("a", 1.0)]))
    assert not differs(before, snapshot(rooted.pipeline))
    rooted.adapters.use(())
    assert not differs(before, snapshot(rooted.pipeline))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("../outside.safetensors", "is not under the folder of adapters"),
        ("a/../../outside.safetensors", "is not under the folder of adapters"),
        ("/etc/passwd", "is not under the folder of adapters"),
        ("/etc/no such file", "is not under the folder of adapters"),
        ("{outside}", "is not under the folder of adapters"),
        ("link.safetensors", "is not under the folder of adapters"),
        ("linked", "is not under the folder of adapters"),
        ("linked/outside.safetensors", "is not under the folder of adapters"),
        ("within", "is not under the folder of adapters"),
        ("loop.safetensors", "is n"),
        ("missing.safetensors", "is neither the name of an adapter nor a .safetensors file in the folder of adapters"),
        ("notes.txt", "is neither the name of an adapter nor a .safetensors file"),
        ("empty", "is neither the name of an adapter nor a .safetensors file"),
        ("water", "is neither the name of an adapter nor a .safetensors file"),
        (".", "is neither the name of an adapter nor a .safetensors file"),
        ("nul\0.safetensors", "is no path that can be read"),
        ("x" * 5000, "is no path that can be read"),
    ],
)
def test_no_path_leads_out_of_the_root(tmp_path: Path, name: str, problem: str) -> None:
    root = tmp_path / "root"
    for made in ("root", "root/a", "root/empty", "root/within", "elsewhere"):
        (tmp_path / made).mkdir()
    outside = tmp_path / "outside.safetensors"
    for file in (outside, tmp_path / "elsewhere" / "outside.safetensors", root / "notes.txt"):
        file.write_bytes(b"")
    (root / "link.safetensors").symlink_to(outside)
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    (root / "within" / "pytorch_lora_weights.safetensors").symlink_to(outside)
    (root / "loop.safetensors").symlink_to(root / "loop.safetensors")
    capabilities = Capabilities(
        "Null", ("image",), frozenset({"prompt", "num_inference_steps"}), {}, adapters=("ink",), adapter_root=root
    )
    name = name.replace("{outside}", str(outside))
    with pytest.raises(InvalidArgumentError) as caught:
        validate(make(1, [(name, 1.0)]), capabilities, Limits(), 32)
    text = str(caught.value)
    assert text.startswith(f"lora: {name!r} {problem}")
    assert "allowed are ink, the path of a .safetensors file under the model's lora_root" in text
    assert str(tmp_path) not in text.replace(name, "")
    assert caught.value.request_id == "r1"


def test_a_folder_and_a_link_within_the_root_are_taken(tmp_path: Path) -> None:
    (tmp_path / "ink").mkdir()
    file = tmp_path / "ink" / "pytorch_lora_weights.safetensors"
    file.write_bytes(b"")
    (tmp_path / "link.safetensors").symlink_to(file)
    one, two = (module.select([(name, 1.0)], (), tmp_path) for name in ("ink", "link.safetensors"))
    assert one == two
    with pytest.raises(InvalidArgumentError, match=r"'link.safetensors' is there twice"):
        module.select([("ink", 1.0), ("link.safetensors", 1.0)], (), tmp_path)


@pytest.mark.parametrize("kind", ["garbage", "other sizes", "no lora", "nothing for it", "changes the model", "lokr"])
def test_a_file_that_does_not_fit_fails_its_request_only(
    rooted: Adapted, adapted: Adapted, folder: Path, kind: str
) -> None:
    from safetensors.torch import load_file, save_file

    bad = folder / "bad.safetensors"
    weights = load_file(folder / "b" / "b.safetensors")
    last = [key for key in weights if (key.startswith("text_encoder") and "lora_A" in key) or "down.weight" in key][-1]
    if kind == "garbage":
        bad.write_bytes(b"not an adapter")
    elif kind == "other sizes":  # of the second module that is loaded: the first is in then
        save_file({**weights, last: torch.zeros(4, 3)}, bad)
    elif kind == "no lora":
        save_file({"unet.conv_in.weight": torch.zeros(2, 2)}, bad)
    elif kind == "nothing for it":
        save_file({f"transformer.{key.partition('.')[2]}": value for key, value in weights.items()}, bad)
    elif kind == "changes the model":
        save_file({**weights, "unet.conv_norm_out.weight": torch.zeros(8)}, bad)
    else:
        save_file({"unet.mid_block.lokr_w1": torch.zeros(2, 2)}, bad)
    weights_before = {name: p.clone() for name, p in adapted.untouched.unet.named_parameters()}
    request = make(1, [("bad.safetensors", 1.0)])
    try:
        with rooted.running() as (running, _):
            handles = running.together([request, make(2), make(3, [("a", 1.0)])])
            with pytest.raises(InvalidArgumentError) as caught:
                handles[0].result(DEADLINE_S)
            plain, other = (handle.result(DEADLINE_S) for handle in handles[1:])
            assert rooted.pipeline.get_list_adapters() == {"unet": ["adapter000000"]}
            after = running.results([make(4, [("b/b.safetensors", 1.0)])])[0]
    finally:
        bad.unlink()
    assert str(caught.value).startswith("lora: 'bad.safetensors' does not work with StableDiffusionPipeline: ")
    assert str(folder) not in str(caught.value)
    assert np.array_equal(plain.output.images, adapted.alone(make(2)))
    assert_alike(other.output.images, adapted.alone(make(3, [("a", 1.0)])))
    assert_alike(after.output.images, adapted.alone(make(4, [("b", 1.0)])))
    served = {name.replace("base_layer.", ""): p for name, p in rooted.pipeline.unet.named_parameters()}
    for name, parameter in weights_before.items():
        assert torch.equal(served[name], parameter), name


def test_a_file_written_anew_is_another_adapter(rooted: Adapted, folder: Path) -> None:
    file = folder / "changing.safetensors"
    try:
        made = [make_lora(folder / f"changing{i}", SEED + 10 + i) for i in range(2)]
        images = []
        with rooted.running() as (running, _):
            for i, source in enumerate(made):
                file.write_bytes(source.read_bytes())
                os.utime(file, ns=(i, i))
                images.append(running.results([make(1, [("changing.safetensors", 1.0)])])[0].output.images)
    finally:
        file.unlink()
    assert images[0] is not None
    assert images[1] is not None
    assert_unlike(images[0][0], images[1][0])


def test_only_so_many_files_are_kept(
    rooted: Adapted, adapted: Adapted, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request whose adapter was dropped between two of its steps gets it again."""
    monkeypatch.setattr(module, "MAX_FILES", 1)
    requests = [make(1, [("b/b.safetensors", 1.0)]), make(2, [("text/text.safetensors", 1.0)]), make(3), make(4)]
    with rooted.running() as (running, _):
        results = running.results(requests)
    assert len(rooted.adapters._loaded) == 2, "the registered one and one file"
    assert len(rooted.pipeline.unet.peft_config) == 1 + ("b" in str(list(rooted.adapters._loaded)[-1]))
    for result, request in zip(
        results, [make(1, [("b", 1.0)]), make(2, [("text", 1.0)]), make(3), make(4)], strict=True
    ):
        assert_alike(result.output.images, adapted.alone(request))


def test_hooks_of_offloading_do_not_cost_the_meeting_points(rooted: Adapted, adapted: Adapted) -> None:
    """To load an adapter, diffusers takes the hooks out, and `forward` with them, and puts new ones in."""
    from accelerate import cpu_offload_with_hook

    unet = rooted.pipeline.unet
    meet, original = unet.forward, vars(unet).pop("forward")
    cpu_offload_with_hook(unet, "cpu")
    hooked = unet.forward
    unet.forward = meet
    point = next(cell.cell_contents for cell in original.__closure__ if hasattr(cell.cell_contents, "original"))
    point.original = hooked
    added: list[Any] = []
    rooted.pipeline.enable_model_cpu_offload = lambda: added.append(cpu_offload_with_hook(unet, "cpu"))
    with rooted.running() as (running, groups):
        results = running.results([make(1), make(2, [("b/b.safetensors", 1.0)]), make(3)])
    assert added, "diffusers did not take the hooks out"
    assert any(len(group) == 2 for group in groups)
    for result, request in zip(results, [make(1), make(2, [("b", 1.0)]), make(3)], strict=True):
        assert_alike(result.output.images, adapted.alone(request))


# -- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lora", "problem"),
    [
        ([("watercolour", 1.0)], "there is no adapter 'watercolour'; did you mean 'watercolor'? (allowed are "),
        ([("ink", 1.0), ("zzz", 1.0)], "there is no adapter 'zzz' (allowed are watercolor, ink)"),
        ([("ink/ink.safetensors", 1.0)], "there is no adapter 'ink/ink.safetensors' (allowed are watercolor, ink)"),
        ([("/etc/passwd", 1.0)], "there is no adapter '/etc/passwd' (allowed are watercolor, ink)"),
        ([("ink", float("nan"))], "the weight nan of 'ink' is not allowed; it must be from -10 to 10"),
        ([("ink", float("-inf"))], "the weight -inf of 'ink' is not allowed"),
        ([("ink", 10.5)], "the weight 10.5 of 'ink' is not allowed"),
        ([("ink", -10.5)], "the weight -10.5 of 'ink' is not allowed"),
        ([("ink", 1.0), ("ink", 0.5)], "'ink' is there twice"),
    ],
)
def test_what_is_wrong_is_told_with_what_is_allowed(lora: list[tuple[str, float]], problem: str) -> None:
    known = Capabilities("Null", ("image",), frozenset({"num_inference_steps"}), {}, adapters=("watercolor", "ink"))
    with pytest.raises(InvalidArgumentError) as caught:
        validate(make(1, lora), known, Limits(), 32)
    assert str(caught.value).startswith(f"lora: {problem}")
    assert caught.value.field == "lora"


def test_the_largest_weights_are_allowed() -> None:
    assert module.select([("b", 10.0), ("a", -10.0)], ("a", "b"), None) == (("a", -10.0), ("b", 10.0))


def test_a_model_without_adapters_refuses_all_and_calls_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = tiny.stable_diffusion()
    capabilities, _, output_type = prepare(pipeline)
    problem = "lora: 'ink' is not allowed: this model has no adapters; leave it out"
    with pytest.raises(InvalidArgumentError, match=problem):
        validate(make(1, [("ink", 1.0)]), capabilities, Limits(), 32)
    for name in ("set_adapters", "enable_lora", "disable_lora", "load_lora_weights"):
        monkeypatch.setattr(type(pipeline), name, lambda *_: pytest.fail("peft is called"))
    engine = DiffusionEngine(PipelineExecutor(pipeline, capabilities, output_type=output_type))
    engine.start()
    try:
        engine.submit(make(1)).result(DEADLINE_S)
        with pytest.raises(InvalidArgumentError, match=problem):  # of one who did not ask `validate`
            engine.submit(make(2, [("ink", 1.0)])).result(DEADLINE_S)
    finally:
        engine.shutdown()


def test_the_pipelines_own_scale_is_refused(adapted: Adapted) -> None:
    """After a scale of 0, diffusers gives the shared layers the weight 1, whatever it was."""
    for scale in (0.0, 0.5):
        request = make(1, [("a", 0.5)], extra_args={"cross_attention_kwargs": {"scale": scale}})
        with pytest.raises(
            InvalidArgumentError, match=r"extra_args: 'scale' in 'cross_attention_kwargs' is not allowed"
        ):
            adapted.validate(request)
    adapted.validate(make(1, extra_args={"cross_attention_kwargs": {}}))


# -- the input --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs() -> Any:
    """The module `triton/inputs.py`, which does not need the server that its package does."""
    package = types.ModuleType("diffusion_backend.triton_alone")
    package.__path__ = [str(Path(diffusion_backend.__file__).parent / "triton")]
    sys.modules[package.__name__] = package
    yield importlib.import_module(f"{package.__name__}.inputs")
    for name in [name for name in sys.modules if name.startswith(package.__name__)]:
        del sys.modules[name]


def lora_of(inputs: Any, text: str | bytes) -> tuple[tuple[str, float], ...]:
    tensors = {name: np.array([[value]], dtype=np.object_) for name, value in (("prompt", b"a dog"), ("lora", text))}
    limits = {"max_outputs": 4, "max_side": 4, "max_picture_bytes": 1, "max_extra_args_bytes": 1}
    return inputs.parse("r", tensors, defaults={}, timeout_s=None, arguments=(), **limits).request.lora


@pytest.mark.parametrize(
    ("text", "lora"),
    [
        ("", ()),
        ("  ", ()),
        ("watercolor", (("watercolor", 1.0),)),
        ("watercolor:0.8", (("watercolor", 0.8),)),
        (b"a:0.5, b:1", (("a", 0.5), ("b", 1.0))),
        (" a : -2e-1 ,b", (("a", -0.2), ("b", 1.0))),
        ("styles/ink.safetensors:1.5", (("styles/ink.safetensors", 1.5),)),
        ("größe:3", (("größe", 3.0),)),
    ],
)
def test_the_input_is_read(inputs: Any, text: str | bytes, lora: tuple[tuple[str, float], ...]) -> None:
    assert lora_of(inputs, text) == lora


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a:", "the weight '' of 'a' is not a number"),
        ("a:much", "the weight 'much' of 'a' is not a number"),
        ("a,,b", "'a,,b' has an empty name"),
        ("a,", "'a,' has an empty name"),
        (":0.5", "':0.5' has an empty name"),
        (b"\xff", "it is not UTF-8 (byte 0)"),
    ],
)
def test_an_input_that_cannot_be_read_is_refused(inputs: Any, text: str | bytes, problem: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        lora_of(inputs, text)
    assert str(caught.value).startswith(f"lora: {problem}")


# -- loading ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    """A tiny pipeline on disk, with adapters beside it."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny.stable_diffusion().save_pretrained(path)
    (path.parent / "loras").symlink_to(folder)
    (path.parent / "broken.safetensors").write_bytes(b"not an adapter")
    return path


@pytest.mark.filterwarnings("ignore:.torch_dtype. is deprecated:FutureWarning")
class TestLoading:
    """From the parameters of config.pbtxt."""

    def load(self, model: Path, **parameters: str) -> PipelineExecutor:
        config = ModelConfig.from_parameters({"model": "tiny", **parameters})
        return loader.load(config, device="cpu", base=model.parent)

    def test_the_parameters_are_carried_out(self, model: Path, folder: Path, adapted: Adapted) -> None:
        executor = self.load(model, loras="ink=loras/a/a.safetensors, wash=loras/b", lora_root="loras")
        assert executor.capabilities.adapters == ("ink", "wash")
        assert executor.capabilities.adapter_root == folder.resolve()
        assert executor.capabilities.joint == {"unet": None}
        engine = DiffusionEngine(executor)
        engine.start()
        try:
            ink, both = (
                engine.submit(make(seed, lora)).result(DEADLINE_S).output.images
                for seed, lora in ((1, [("ink", 0.5)]), (2, [("wash", 1.0), ("a/a.safetensors", 1.0)]))
            )
        finally:
            engine.shutdown()
        assert_alike(ink, adapted.alone(make(1, [("a", 0.5)])))
        assert_alike(both, adapted.alone(make(2, [("a", 1.0), ("b", 1.0)])))

    @pytest.mark.parametrize(
        ("parameters", "problem"),
        [
            (
                {"loras": "ink=nowhere.safetensors"},
                "loras: the adapter 'ink' has the source 'nowhere.safetensors', which",
            ),
            ({"loras": "ink=./nowhere/at"}, "loras: the adapter 'ink' has the source './nowhere/at', which is neither"),
            ({"loras": "ink=a/b/c"}, "loras: the adapter 'ink' has the source 'a/b/c', which is neither"),
            ({"loras": "ink=broken.safetensors"}, "loras: cannot load the adapter 'ink' from 'broken.safetensors': "),
            ({"lora_root": "nowhere"}, "lora_root: there is no folder 'nowhere'; a relative one starts at the model's"),
        ],
    )
    def test_what_cannot_be_loaded_is_told_in_one_line(
        self, model: Path, parameters: dict[str, str], problem: str
    ) -> None:
        with pytest.raises(ModelLoadError) as caught:
            self.load(model, **parameters)
        assert str(caught.value).startswith(problem)
        assert "\n" not in str(caught.value)


def test_a_pipeline_that_takes_no_adapters_is_told() -> None:
    from diffusers import DDIMPipeline

    pipeline = DDIMPipeline(unet=tiny.unet(), scheduler=tiny.ddim())
    with pytest.raises(ModelLoadError, match="DDIMPipeline takes no LoRA adapters; remove the parameters loras and"):
        Adapters(pipeline, {"ink": "a/b"})


def test_an_adapter_that_changes_the_model_is_not_kept(
    sources: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever `diffusers` may do for a kind of file that is not known here."""
    pipeline = tiny.stable_diffusion()
    load = pipeline.load_lora_weights

    def load_and_change(source: str, **options: Any) -> None:
        load(source, **options)
        with torch.no_grad():
            pipeline.unet.conv_norm_out.weight.add_(1.0)

    monkeypatch.setattr(pipeline, "load_lora_weights", load_and_change)
    adapters = Adapters(pipeline, {"a": sources["a"]})
    with pytest.raises(ModelLoadError, match="an adapter has changed the model's or others' weights"):
        adapters.load_registered()
    with pytest.raises(DiffusionError, match="load the model again without it"):
        adapters.use(())
