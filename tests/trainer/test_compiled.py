"""Compiled blocks against blocks as they are: the same numbers, and as few graphs as there are
parts and kinds of use.

Graphs are those of torch's AOT compiler, whose operations are torch's own: results and dropout
masks are equal bit for bit (with a dropout of 0.2, whose scale of 1.25 is not rounded), so that
whatever goes wrong in tracing shows. That the code which inductor makes of them computes the same
is shown for one block, within roundings: it adds and multiplies in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

from tests.trainer.cases import CPU, batches, tiny
from tests.trainer.inductor import QUICK
from tests.trainer.mask_words import give_words
from tests.trainer.spawn import run_ranks
from tests.trainer.t5_cases import tiny_t5
from trainer.config.card import CardError, TrainerConfig
from trainer.config.kernel_choice import Device, compiler_obstacle
from trainer.engine import Engine
from trainer.model import compiled, kernels, matmul
from trainer.model.attention import BlockSetup
from trainer.model.block import TransformerBlock
from trainer.model.compiled import Compiler, compiler_for
from trainer.model.documents import DocumentRules, Stream, document_numbers, hidden_of, joined
from trainer.model.families import family_of
from trainer.model.family import initialise_stage
from trainer.model.kernels import CausalKernel, FlexKernel, Kernel, build_kernel
from trainer.model.positions import Rotary, alibi_slopes, rotary_frequencies
from trainer.model.t5 import DecoderBlock, EncoderBlock
from trainer.parallel.mesh import Mesh

ALONE = Mesh.single(CPU)
PARTS_ALONE, PARTS_CUT = 1, 5
LENGTHS = (16, 8, 12)
# Kernels of inductor keep what torch's own round in between: in fp32 some units of 2^-24 of values
# near 1.
INDUCTOR_FP32 = 2e-6


@pytest.fixture(autouse=True)
def traced_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No code from an earlier test, and torch's own operations in place of inductor's."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def blocks(
    config: TrainerConfig, compiler: Compiler | None, rules: DocumentRules | None, part: Any
) -> list[nn.Module]:
    """A stage's blocks with the same weights each time."""
    model, rotary = config.model, None
    if model.position_embedding == "rotary":
        rotary = Rotary(rotary_frequencies(model, CPU), rules is not None)
    kernel = build_kernel(model, ALONE, rules, config.precision.dtype)
    setup = BlockSetup(model, ALONE, kernel, rotary, compiler)
    made = [TransformerBlock(setup, part) for _ in range(model.layers)]
    stage = [(f"blocks.{index}.", block) for index, block in enumerate(made)]
    initialise_stage(stage, 1, ALONE)
    give_words(stage, 2)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[
        config.precision.dtype
    ]
    return [block.to(dtype).train() for block in made]


def results(
    stage: list[nn.Module],
    rules: DocumentRules | None,
    recomputed: bool,
    lengths: tuple[int, ...] = LENGTHS,
    evaluates: bool = True,
) -> list[Tensor]:
    """Outputs in training, all gradients, at several lengths; and what an evaluation gives at the
    last of them.
    """
    found = []
    for length in lengths:
        torch.manual_seed(length)
        hidden = (
            torch.randn(2, length, stage[0].input_norm.weight.numel())
            .to(next(stage[0].parameters()).dtype)
            .requires_grad_()
        )
        documents = (
            None
            if rules is None
            else document_numbers(torch.randint(0, 4, (2, length)), rules.end_id)
        )
        stream: Stream = joined(hidden, documents)
        for block in stage:
            inputs = stream if isinstance(stream, tuple) else (stream,)

            def run(*parts: torch.Tensor, block: torch.nn.Module = block) -> Stream:
                return block(joined(parts[0], parts[1] if len(parts) > 1 else None))

            stream = checkpoint(run, *inputs, use_reentrant=False) if recomputed else run(*inputs)
        output, _ = hidden_of(stream)
        output.float().square().sum().backward()
        assert hidden.grad is not None
        found += [output.detach(), hidden.grad]
    found += [
        parameter.grad
        for block in stage
        for parameter in block.parameters()
        if parameter.grad is not None
    ]
    if not evaluates:
        return found
    with torch.no_grad():
        for block in stage:
            stream = block.eval()(joined(hidden_of(stream)[0].detach(), hidden_of(stream)[1]))
    return [*found, hidden_of(stream)[0]]


@pytest.mark.parametrize(
    ("dtype", "part", "options", "has_documents"),
    [
        ("bf16", "block", {"hidden_dropout": 0.2, "attention_dropout": 0.1}, True),
        ("fp16", "attention", {"hidden_dropout": 0.2, "attention_dropout": 0.1}, False),
        ("fp32", "attention", {"position_embedding": "rotary", "activation": "gelu"}, True),
    ],
)
def test_one_graph_for_all_blocks_and_one_for_other_lengths(
    dtype: str, part: str, options: dict[str, Any], has_documents: bool
) -> None:
    config = tiny(dtype=dtype, layers=2, **options)
    rules = DocumentRules(0, True, True) if has_documents else None
    compiler = Compiler()
    plain = results(blocks(config, None, rules, part), rules, part == "block")
    found = results(blocks(config, compiler, rules, part), rules, part == "block")
    assert len(plain) == len(found) == 2 * len(LENGTHS) + 2 * 12 + 1
    assert all(torch.equal(one, other) for one, other in zip(plain, found, strict=True))
    assert compiler.graphs == 3 * PARTS_ALONE  # the first length, all others, evaluation


# ---------------------------------------------------------- attention inside the graph, as on a GPU
class Graphs:
    """Takes the place of inductor: names of the operations of each graph, forward and backward,
    which run as they are.
    """

    def __init__(self) -> None:
        self.forward: list[list[str]] = []
        self.backward: list[list[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        def noting(found: list[list[str]]) -> Any:
            def compile_(part: torch.fx.GraphModule, _: Any) -> Any:
                found.append(
                    [str(node.target) for node in part.graph.nodes if node.op == "call_function"]
                )
                return make_boxed_func(part)

            return compile_

        return aot_autograd(fw_compiler=noting(self.forward), bw_compiler=noting(self.backward))(
            graph, inputs
        )


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """On a CPU flex attention runs as plain arithmetic, which has gradients too, but torch does not
    offer them.
    """
    noted = Graphs()
    monkeypatch.setattr(compiled, "BACKEND", noted)
    monkeypatch.setattr("torch._dynamo.lookup_backend", lambda backend: backend)
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    return noted


LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "qk_norm": True, "linear_biases": False}


@pytest.mark.parametrize(
    ("options", "has_documents"),
    [
        ({}, False),
        ({"hidden_dropout": 0.2}, False),
        ({"position_embedding": "rotary", "key_value_heads": 1, **LLAMA}, True),
    ],
    ids=["alibi", "dropout", "llama-documents"],
)
def test_a_block_with_flex_attention_is_one_graph(
    options: dict[str, Any], has_documents: bool, graphs: Graphs
) -> None:
    """No break: what lies before and behind attention can be fused with all of a block. It computes
    what blocks with their mask in memory do.
    """
    config, compiler = tiny(layers=2, hidden_size=32, attention_heads=2, **options), Compiler()
    rules = DocumentRules(0, True, True) if has_documents else None
    plain = results(blocks(config, None, rules, "nothing"), rules, False, (16, 8), False)
    found = results(
        with_kernel(blocks(config, compiler, rules, "nothing"), flex(config, rules)),
        rules,
        False,
        (16, 8),
        False,
    )
    for one, other in zip(plain, found, strict=True):
        torch.testing.assert_close(
            other, one, rtol=1e-5, atol=INDUCTOR_FP32 * float(one.abs().max())
        )
    assert compiler.graphs == len(graphs.forward) == len(graphs.backward) == 2, (
        "the first length, and any other"
    )
    for forward, backward in zip(graphs.forward, graphs.backward, strict=True):
        assert (
            forward.count("flex_attention") == 1 and backward.count("flex_attention_backward") == 1
        )


def test_dropout_of_flex_attention_is_in_the_graph(graphs: Graphs) -> None:
    """Recomputed, it drops what it dropped, and what a mask in memory drops."""
    config = tiny(layers=2, hidden_size=32, attention_heads=2, attention_dropout=0.2)

    def found(part: Any) -> list[Tensor]:
        stage = with_kernel(blocks(config, Compiler(), None, part), flex(config, None))
        return results(stage, None, part == "block", (16,), False)

    kept, recomputed = found("nothing"), found("block")
    assert all(torch.equal(one, other) for one, other in zip(kept, recomputed, strict=True))
    plain = results(blocks(config, None, None, "nothing"), None, False, (16,), False)
    for one, other in zip(plain, kept, strict=True):
        torch.testing.assert_close(
            other, one, rtol=1e-5, atol=INDUCTOR_FP32 * float(one.abs().max())
        )
    for forward, backward in zip(graphs.forward, graphs.backward, strict=True):
        assert (
            forward.count("flex_attention") == 2 and backward.count("flex_attention_backward") == 2
        )


def flex(config: TrainerConfig, rules: DocumentRules | None) -> FlexKernel:
    slopes = torch.tensor(alibi_slopes(config.model.attention_heads))
    kernel = FlexKernel(
        slopes if config.model.position_embedding == "alibi" else None,
        rules is not None,
        compiled=True,
    )
    kernel._block_mask = create_block_mask  # which a GPU has compiled, outside of the blocks
    return kernel


def with_kernel(stage: list[nn.Module], kernel: Kernel) -> list[nn.Module]:
    for block in stage:
        assert isinstance(block, TransformerBlock)
        block.attention.kernel = kernel
    return stage


def test_a_block_with_chosen_kernels_of_torchs_is_one_graph(graphs: Graphs) -> None:
    """The choice holds inside."""
    config, compiler = tiny(position_embedding="rotary"), Compiler()
    plain = results(blocks(config, None, None, "nothing"), None, False, (16,), False)
    stage = with_kernel(blocks(config, compiler, None, "nothing"), CausalKernel((SDPBackend.MATH,)))
    found = results(stage, None, False, (16,), False)
    for one, other in zip(plain, found, strict=True):
        torch.testing.assert_close(
            other, one, rtol=1e-5, atol=INDUCTOR_FP32 * float(one.abs().max())
        )
    (forward,) = graphs.forward
    assert not any("flash" in name or "efficient" in name for name in forward)
    assert torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.parametrize("dropout", [0.0, 0.2], ids=["in memory", "flex, by place"])
def test_each_block_of_a_t5_is_one_graph(
    dropout: float, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoder's block, and a decoder's with its two attentions; with dropout by the kernels that
    a GPU takes, which compute what those of this processor do.
    """
    config = tiny_t5(model={"attention_heads": 2, "attention_dropout": dropout})
    plain = run_t5_blocks(config, None, dropout)
    if dropout:
        monkeypatch.setattr(kernels, "device_facts", lambda _: Device("cuda", (8, 0)))
        monkeypatch.setattr(
            "torch.nn.attention.flex_attention.create_block_mask", uncompiled_block_mask
        )
    compiler = Compiler()
    for one, other in zip(plain, run_t5_blocks(config, compiler, dropout), strict=True):
        torch.testing.assert_close(
            other, one, rtol=1e-5, atol=INDUCTOR_FP32 * float(one.abs().max())
        )
    assert compiler.graphs == len(graphs.forward) == len(graphs.backward) == 2
    passes = [forward.count("flex_attention") for forward in graphs.forward]
    assert passes == ([2, 4] if dropout else [0, 0])


@torch._dynamo.disable
def uncompiled_block_mask(*arguments: Any, **options: Any) -> Any:
    return create_block_mask(*arguments, **options)


def run_t5_blocks(config: TrainerConfig, compiler: Compiler | None, dropout: float) -> list[Tensor]:
    """Outputs of an encoder's and a decoder's block, and all gradients."""
    update = {"model": config.model.model_copy(update={"compile_blocks": compiler is not None})}
    mesh, family = ALONE, family_of(config.model)
    layers = family.layers(
        config.model_copy(update=update), mesh, family.head(config, mesh), compiler
    )
    encoder, decoder = (
        next(layer for layer in layers if layer.kind is kind)
        for kind in (EncoderBlock, DecoderBlock)
    )
    text, answer = config.model.sequence_length, config.model.decoder_sequence_length
    torch.manual_seed(1)
    stream = torch.randn(2, text + answer, config.model.hidden_size, requires_grad=True)
    marks = torch.ones(2, text + answer, dtype=torch.int32)
    marks[1, text - 3 : text] = 0
    made = [layer.kind(*layer.arguments) for layer in (encoder, decoder)]
    stage = [("encoder.", made[0]), ("decoder.", made[1])]
    initialise_stage(stage, 1, mesh)
    give_words(stage, 2)
    results = []
    for block in made:
        output, _ = hidden_of(block.train()((stream, marks)))
        output.square().sum().backward()
        results.append(output.detach())
    assert stream.grad is not None
    parameters = [parameter for block in made for parameter in block.parameters()]
    return [*results, stream.grad, *(each.grad for each in parameters if each.grad is not None)]


def test_products_widened_to_fp32_are_traced_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on processors without 16-bit products."""
    monkeypatch.setattr(matmul, "compute_dtype", lambda tensor: torch.float32)
    config, compiler = tiny(dtype="bf16"), Compiler()
    plain, found = (
        results(blocks(config, one, None, "nothing"), None, False, (16,))
        for one in (None, compiler)
    )
    assert all(torch.equal(one, other) for one, other in zip(plain, found, strict=True))
    assert compiler.graphs == 2 * PARTS_ALONE


def test_too_many_variants_end_the_training() -> None:
    """They do not go on uncompiled without a word."""
    config, compiler = tiny(), Compiler()
    stage = blocks(config, compiler, None, "nothing")
    with (
        torch._dynamo.config.patch(recompile_limit=1),
        pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit),
    ):
        results(stage, None, False)


def train(config: TrainerConfig) -> tuple[list[float], list[Tensor], int]:
    """Losses under a curriculum with an evaluation, all weights, and the graphs made."""
    compiled.BACKEND = "aot_eager"
    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    found = []
    for step, length in enumerate(LENGTHS):
        found.append(
            engine.train_step(batches(config, mesh, step, 16), 16, sequence_length=length).loss
        )
    found.append(engine.measure(batches(config, mesh, 1000, 16), 8 // mesh.data).loss)
    weights = [weight.tensor.clone() for weight in engine.sharded_state().weights]
    graphs = engine.compiler.graphs if engine.compiler else 0
    engine.close()
    return found, weights, graphs


@pytest.mark.parametrize(
    ("pipeline", "tensor", "sequence_parallel", "options", "graphs"),
    [
        (2, 2, True, {"activation_checkpointing": True, "recompute_blocks": 2}, 3 * PARTS_CUT),
        # What is kept in parts is computed without autograd first: a variant of its own.
        (
            1,
            2,
            False,
            {"activation_checkpointing": True, "partition_activations": True},
            5 * PARTS_CUT,
        ),
    ],
)
def test_every_cut_computes_the_same(
    pipeline: int, tensor: int, sequence_parallel: bool, options: dict[str, Any], graphs: int
) -> None:
    """Collectives lie between the parts; dropout masks are those of blocks as they are, on every
    rank.
    """
    card = tiny(pipeline, tensor, layers=4, hidden_dropout=0.2, attention_dropout=0.1, **options)
    card = card.model_copy(
        update={
            "parallel": card.parallel.model_copy(update={"sequence_parallel": sequence_parallel})
        }
    )
    compiled_card = card.model_copy(
        update={"model": card.model.model_copy(update={"compile_blocks": True})}
    )
    plain, found = (run_ranks(train, pipeline * tensor, one) for one in (card, compiled_card))
    for (losses, weights, _), (same_losses, same_weights, _) in zip(plain, found, strict=True):
        assert losses == same_losses
        assert all(
            torch.equal(one, other) for one, other in zip(weights, same_weights, strict=True)
        )
    assert {made for _, _, made in plain} == {0}
    assert all(0 < made <= graphs for _, _, made in found)


@torch._inductor.config.patch(QUICK)
def test_what_inductor_makes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same within roundings; with dropout, recomputation draws the masks again that were drawn
    first.
    """
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    config = tiny(layers=1)
    plain, found = (
        results(blocks(config, one, None, "nothing"), None, False, (16,), False)
        for one in (None, Compiler())
    )
    for one, other in zip(plain, found, strict=True):
        torch.testing.assert_close(
            other, one, rtol=1e-5, atol=INDUCTOR_FP32 * float(one.abs().max())
        )
    config, compiler = tiny(layers=1, hidden_dropout=0.2), Compiler()
    kept, recomputed = (results(blocks(config, compiler, None, part), None, again, (16,), False) for part, again in
                        (("nothing", False), ("block", True)))  # fmt: skip
    assert all(torch.equal(one, other) for one, other in zip(kept, recomputed, strict=True))
    assert not torch.equal(kept[0], found[0])


# ----------------------------------------------------------------------------- what a node lacks
def test_a_node_without_a_compiler_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(compile_blocks=True)
    assert isinstance(compiler_for(config, CPU), Compiler)
    assert compiler_for(tiny(), CPU) is None
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(
        CardError, match=r"compile_blocks = true: no C\+\+ compiler is on this node"
    ):
        compiler_for(config, CPU)


def test_what_a_gpu_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert compiler_obstacle("cuda") == "the triton package is not installed"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(
        "shutil.which", lambda name: f"/usr/bin/{name}" if name == "clang" else None
    )
    assert compiler_obstacle("cuda") is None
    monkeypatch.setenv("CC", "none-such -O2")
    assert "none is on this node" in str(compiler_obstacle("cuda"))
