"""The trace against arithmetic that can be done by hand, and against the real thing where PyTorch says what it saves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers.models.llama.modeling_llama  # noqa: F401  (trace workers are forked from here: they start warm)

from launchguard.errors import InputError, Unpredictable
from launchguard.events import StepTrace, TraceOp
from launchguard.job import ActivationCheckpointing, InputTensor, JobSpec, LoraSpec, ModelSpec, Precision, QuantizationSpec
from launchguard.profiles import device
from launchguard.trace import cache, request_of, trace_job

A100, V100 = device("a100-80-sxm"), device("v100-32")
MakeJob = Callable[..., JobSpec]


def factory_job(make_job: MakeJob, folder: Path, source: str, inputs: dict[str, InputTensor], **fields: Any) -> JobSpec:
    (folder / "mine.py").write_text("import torch\nfrom torch import nn\n" + source)
    model = ModelSpec("mine:build", inputs=inputs, python_path=str(folder), loss=fields.pop("loss", None), kwargs=fields.pop("kwargs", {}))
    return make_job(**fields).changed({"model": model})


def live_at(trace: StepTrace, op: TraceOp) -> int:
    """Bytes alive when the mark `op` comes first."""
    live: dict[int, int] = {}
    for event in trace.events:
        if event.op == TraceOp.ALLOC:
            live[event.a] = event.b
        elif event.op == TraceOp.FREE:
            del live[event.a]
        elif event.op == op:
            break
    return sum(live.values())


X = {"x": InputTensor(("batch", 16), "float32")}


def test_a_linear_layer_keeps_its_input_and_makes_its_gradients(make_job: MakeJob, tmp_path: Path) -> None:
    job = factory_job(make_job, tmp_path, "def build(): return nn.Linear(16, 8)\n", X, micro_batch_size=4)
    trace = trace_job(job, A100)
    assert live_at(trace, TraceOp.BACKWARD) == 4 * 16 * 4 + 4  # the input and the loss: sum keeps nothing
    grads = {e.a: e.b for e in trace.events if e.op == TraceOp.GRAD}
    sizes = {e.a: e.b for e in trace.events if e.op == TraceOp.ALLOC}
    assert {trace.params[p].name: sizes[s] for p, s in grads.items()} == {"weight": 16 * 8 * 4, "bias": 8 * 4}
    assert live_at(trace, TraceOp.END) == 4  # the loss


def test_every_storage_is_born_once_and_dies(make_job: MakeJob) -> None:
    trace = trace_job(make_job(), A100)
    alive: set[int] = set()
    for op, a, _ in trace.events:
        if op == TraceOp.ALLOC:
            assert a not in alive
            alive.add(a)
        elif op == TraceOp.FREE:
            alive.remove(a)
    assert not alive
    assert sum(e.op == TraceOp.GRAD for e in trace.events) == len(trace.params)


def test_dropout_masks_are_bytes_and_relu_keeps_its_output(make_job: MakeJob, tmp_path: Path) -> None:
    source = "def build(): return nn.Sequential(nn.Linear(16, 1024), nn.ReLU(), nn.Dropout(0.5))\n"
    trace = trace_job(factory_job(make_job, tmp_path, source, X, micro_batch_size=4), A100)
    outputs = 4 * 1024
    assert live_at(trace, TraceOp.BACKWARD) == 4 * 16 * 4 + outputs * 4 + outputs * 1 + 4


def test_dropout_makes_its_mask_first(make_job: MakeJob, tmp_path: Path) -> None:
    source = "def build(): return nn.Sequential(nn.Linear(16, 1024), nn.Dropout(0.5))\n"
    trace = trace_job(factory_job(make_job, tmp_path, source, X, micro_batch_size=4), A100)
    born = [e.b for e in trace.events if e.op == TraceOp.ALLOC]
    assert born[1:4] == [4 * 1024 * 4, 4 * 1024, 4 * 1024 * 4]  # product, mask, output


def test_autocast_keeps_half_precision_copies_of_weights(make_job: MakeJob, tmp_path: Path) -> None:
    source = "def build(): return nn.Sequential(nn.Linear(16, 1024, bias=False), nn.Linear(1024, 8, bias=False))\n"
    precision = Precision(autocast="bfloat16")
    trace = trace_job(factory_job(make_job, tmp_path, source, X, micro_batch_size=4, precision=precision), A100)
    weights, activations = 2 * (16 * 1024 + 1024 * 8), 2 * (4 * 16 + 4 * 1024)
    assert (
        live_at(trace, TraceOp.BACKWARD) == weights - 2 * 16 * 1024 + activations + 4
    )  # x needs no gradient: the first weight is not kept


@pytest.mark.parametrize(
    ("card", "dtype", "kernel"),
    [(A100, "bfloat16", "flash"), (V100, "bfloat16", "math"), (A100, "float32", "efficient"), (device("h100-80-sxm"), "bfloat16", "cudnn")],
)
def test_the_attention_kernel_is_the_cards(make_job: MakeJob, card: Any, dtype: str, kernel: str) -> None:
    config = {"num_key_value_heads": 4}
    trace = trace_job(make_job(config=config, precision=Precision(dtype, dtype, dtype)), card)
    assert trace.facts["attention_kernels"] == [kernel]


def test_checkpointing_keeps_layer_inputs_only(make_job: MakeJob) -> None:
    job = make_job(config={"num_hidden_layers": 6}, seq_len=128)
    whole = live_at(trace_job(job, A100), TraceOp.BACKWARD)
    less = trace_job(dataclasses.replace(job, activation_checkpointing=ActivationCheckpointing(True)), A100)
    assert live_at(less, TraceOp.BACKWARD) < 0.5 * whole
    entered = [less.modules[e.a].name for e in less.events if e.op == TraceOp.ENTER]
    assert entered.count("model.layers.3.mlp") == 2  # forward, and again inside backward


def test_checkpointing_of_every_second_layer_and_offloaded_inputs(make_job: MakeJob) -> None:
    job = make_job(config={"num_hidden_layers": 6}, seq_len=128)

    def alive(**how: Any) -> tuple[int, StepTrace]:
        trace = trace_job(dataclasses.replace(job, activation_checkpointing=ActivationCheckpointing(True, **how)), A100)
        return live_at(trace, TraceOp.BACKWARD), trace

    (every, _), (second, trace), (offloaded, moved) = alive(), alive(every_n_layers=2), alive(offload=True)
    entered = [trace.modules[e.a].name for e in trace.events if e.op == TraceOp.ENTER]
    assert sorted(entered.count(f"model.layers.{i}.mlp") for i in range(6)) == [1, 1, 1, 2, 2, 2]
    hidden = 4 * job.micro_batch_size * 128 * job.model.config["hidden_size"]
    assert offloaded == every - 6 * hidden < every < second
    assert moved.facts["saved_on_host"][:6] == [hidden] * 6


def test_an_older_transformers_copies_the_shifted_logits(make_job: MakeJob) -> None:
    def sizes(version: str) -> list[int]:
        return [e.b for e in trace_job(make_job(versions={"transformers": version}), A100).events if e.op == TraceOp.ALLOC]

    shifted = 2 * 63 * 515 * 4
    assert shifted in sizes("4.48.1") and shifted not in sizes("4.49.0")


def test_an_older_transformers_copies_keys_for_every_query_head(make_job: MakeJob) -> None:
    """4 query heads of 16 on 2 key heads, 2 x 64 tokens, two layers."""

    def made(version: str) -> int:
        job = make_job(precision=Precision("bfloat16", "bfloat16", "bfloat16"), versions={"transformers": version})
        return sum(e.b for e in trace_job(job, A100).events if e.op == TraceOp.ALLOC)

    assert made("4.53.3") - made("4.54.1") >= 2 * 2 * (2 * 64 * 4 * 16 * 2)  # layers, keys and values


def test_gptq_layers_can_be_traced(make_job: MakeJob) -> None:
    job = make_job(precision=Precision("float16", "float16", "float16"), lora=LoraSpec(r=4, target_modules=("q_proj",)),
                   quantization=QuantizationSpec("gptq4"))  # fmt: skip
    trace = trace_job(job, A100)
    assert all("lora_" in p.name for p in trace.params if p.requires_grad)
    assert sum(p.requires_grad for p in trace.params) == 2 * 2


def test_an_older_bitsandbytes_keeps_inputs_until_the_graph_goes(make_job: MakeJob) -> None:
    """MatMul4Bit of 0.43.1 puts its input on the context. nothing else keeps down_proj's."""

    def left_after_backward(version: str) -> list[int]:
        job = make_job(precision=Precision("bfloat16", "bfloat16", "bfloat16"), lora=LoraSpec(r=4, target_modules=("q_proj",)),
                       quantization=QuantizationSpec("nf4", prepare_kbit=False), versions={"bitsandbytes": version})  # fmt: skip
        traced = trace_job(job, A100)
        sizes = {e.a: e.b for e in traced.events if e.op == TraceOp.ALLOC}
        end = next(i for i, e in enumerate(traced.events) if e.op == TraceOp.END)
        return [sizes[e.a] for e in traced.events[end:] if e.op == TraceOp.FREE]

    down = 2 * 64 * 160 * 2
    assert left_after_backward("0.43.1").count(down) >= 1
    assert down not in left_after_backward("0.43.2")


def test_an_older_trl_leaves_norms_in_float32(make_job: MakeJob) -> None:
    job = make_job(precision=Precision("bfloat16", "bfloat16", "bfloat16"), lora=LoraSpec(r=4, target_modules=("q_proj",)),
                   quantization=QuantizationSpec("nf4", trl_casts=True))  # fmt: skip
    dtypes = {p.name.rsplit("model.", 1)[-1].rsplit(".", 1)[0]: p.dtype for p in trace_job(job, A100).params if not p.requires_grad}
    assert dtypes["norm"] == "float32" and dtypes["embed_tokens"] == "bfloat16"


def test_lora_freezes_the_base_and_keeps_adapters_in_float32(make_job: MakeJob) -> None:
    job = make_job(precision=Precision("bfloat16", "bfloat16", "bfloat16"), lora=LoraSpec(r=4, target_modules=("q_proj", "v_proj")))
    trace = trace_job(job, A100)
    trained = [p for p in trace.params if p.requires_grad]
    assert len(trained) == 2 * 2 * 2 and {p.dtype for p in trained} == {"float32"}
    assert {p.dtype for p in trace.params if not p.requires_grad} == {"bfloat16"}
    assert {e.a for e in trace.events if e.op == TraceOp.GRAD} == {i for i, p in enumerate(trace.params) if p.requires_grad}


def test_tied_weights_are_one_parameter(make_job: MakeJob) -> None:
    trace = trace_job(make_job(config={"tie_word_embeddings": True}), A100)
    embedding = next(p for p in trace.params if "embed_tokens" in p.name)
    assert len(embedding.owners) == 2 and trace.facts["tied"]


def test_a_cached_trace_is_the_same_trace(make_job: MakeJob) -> None:
    job = make_job(seq_len=48)
    first = trace_job(job, A100)
    key = request_of(job, A100).key()
    again = cache.load(key)
    assert again is not None
    assert (again.params, again.modules, again.events, again.inputs) == (first.params, first.modules, first.events, first.inputs)
    (cache.cache_dir() / f"{key}.trace").write_bytes(b"damaged")
    assert cache.load(key) is None


def test_what_changes_the_trace_changes_its_key(make_job: MakeJob) -> None:
    job = make_job()
    keys = {
        request_of(j, c).key()
        for j in (job, job.changed({"seq_len": 65}), job.changed({"precision.autocast": "bfloat16"}))
        for c in (A100, V100)
    }
    assert len(keys) == 6
    sharded = job.changed({"strategy": "ddp"})
    assert request_of(sharded, A100).key() == request_of(job, A100).key()


def test_a_forward_that_fails_names_its_line(make_job: MakeJob, tmp_path: Path) -> None:
    source = "class M(nn.Linear):\n    def forward(self, x):\n        return x.no_such_method()\ndef build(): return M(16, 8)\n"
    with pytest.raises(Unpredictable, match="no_such_method") as caught:
        trace_job(factory_job(make_job, tmp_path, source, X), A100)
    assert "mine.py:5" in caught.value.where


def test_a_value_that_is_read_is_reported(make_job: MakeJob, tmp_path: Path) -> None:
    forward = "        y = super().forward(x)\n        return y * 2 if y.sum() > 0 else y\n"
    source = f"class M(nn.Linear):\n    def forward(self, x):\n{forward}def build(): return M(16, 8)\n"
    trace = trace_job(factory_job(make_job, tmp_path, source, X), A100)
    assert trace.facts["value_reads"] == ["mine.py:6"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "no-such-model"}, "no-such-model"),
        ({"architectures": ["NoSuchHead"], "model_type": "llama"}, ""),
        ({"hidden_size": 63}, ""),
    ],
)
def test_a_config_that_cannot_be_built_is_bad_input(make_job: MakeJob, config: dict[str, Any], expected: str) -> None:
    job = make_job(config=config)
    if config.get("architectures"):
        job = job.changed({"model.task": None})
        assert trace_job(job, A100).facts["model_class"] == "LlamaForCausalLM"  # falls back to the causal head
        return
    with pytest.raises((InputError, Unpredictable)) as caught:
        trace_job(job, A100)
    assert expected in caught.value.message


def test_missing_inputs_are_asked_for(make_job: MakeJob, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="inputs"):
        trace_job(factory_job(make_job, tmp_path, "def build(): return nn.Linear(16, 8)\n", {}), A100)


def test_float16_experts_are_traced_as_bfloat16_ones(make_job: MakeJob) -> None:
    config = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 2, "num_experts_per_tok": 1}
    made = [make_job(config=config, precision=Precision(dtype, dtype, dtype), seq_len=32) for dtype in ("float16", "bfloat16")]
    float16, bfloat16 = ([e for e in trace_job(job, A100).events if e.op == TraceOp.ALLOC] for job in made)
    assert float16 and sum(e.b for e in float16) == sum(e.b for e in bfloat16)


def test_trl_makes_no_logits(make_job: MakeJob) -> None:
    """SFTTrainer's fused head works on tiles of the vocabulary; the plain loss makes float32 logits of all tokens."""
    logits = 2 * 64 * 50_000 * 4
    job = make_job(config={"vocab_size": 50_000}, loop="sft")
    sizes = {
        loop: {e.b for e in trace_job(job.changed({"loop": loop}), A100).events if e.op == TraceOp.ALLOC} for loop in ("sft", "trainer")
    }
    assert logits in sizes["trainer"]
    assert logits not in sizes["sft"]
