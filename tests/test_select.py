"""Which layers are taken, why the others are not, and how a weight becomes the matrix of the rule."""

import pytest
import torch
from torch import nn

from twofour.errors import InputError
from twofour.select import SMALLEST_SIDE, Layer, require_layers, select


@pytest.fixture(scope="module")
def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16))


def reasons(selection):
    return {x.name: x.reason for x in selection.left}


def names(selection):
    return [layer.name for layer in selection.layers]


class Named(nn.Module):
    """A module with the given children and no forward."""

    def __init__(self, **children):
        super().__init__()
        for name, module in children.items():
            self.add_module(name, module)


# What is taken


def test_linear_and_conv2d_are_taken_in_the_order_of_the_model():
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Conv2d(16, 24, (3, 5)))
    assert select(model).layers == (Layer("0", "linear", (32, 64)), Layer("2", "conv2d", (24, 16, 3, 5)))


def test_a_bare_layer_is_a_model_too():
    assert select(nn.Linear(32, 16)).layers == (Layer("", "linear", (16, 32)),)


def test_gpt2_its_conv1d_are_taken_and_the_tied_head_is_not(gpt2):
    selection = select(gpt2)
    found = {layer.name: layer for layer in selection.layers}
    assert len(found) == 8  # four in each of two blocks
    # Conv1D stores [in, out]; a layer's shape is [out, in].
    assert gpt2.transformer.h[0].attn.c_attn.weight.shape == (32, 96)
    assert found["transformer.h.0.attn.c_attn"] == Layer("transformer.h.0.attn.c_attn", "conv1d", (96, 32))
    assert found["transformer.h.1.mlp.c_proj"].shape == (32, 128)
    left = reasons(selection)
    assert left["lm_head"] == "shares its weight with transformer.wte"
    assert "not a Linear" in left["transformer.wte"]
    assert "not a Linear" in left["transformer.wpe"]
    assert "not a Linear" in left["transformer.ln_f"]


def test_another_class_named_conv1d_is_not_taken():
    class Conv1D(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(32, 32))

    with pytest.raises(InputError, match="Conv1D: not a Linear"):
        require_layers(select(nn.Sequential(Conv1D())))


# What is left alone, and why


def test_embeddings_norms_and_other_types_are_left_alone():
    model = nn.Sequential(
        nn.Embedding(32, 32), nn.LayerNorm(32), nn.BatchNorm2d(32), nn.Conv1d(32, 32, 3), nn.Linear(32, 32)
    )
    selection = select(model)
    assert names(selection) == ["4"]
    assert set(reasons(selection)) == {"0", "1", "2", "3"}
    assert all(reason == "not a Linear, Conv1D or Conv2d" for reason in reasons(selection).values())
    assert [x.type for x in selection.left] == ["Embedding", "LayerNorm", "BatchNorm2d", "Conv1d"]


@pytest.mark.parametrize("head", ["lm_head", "embed_out", "classifier", "score", "fc"])
def test_heads_are_left_alone_by_name(head):
    model = Named(body=nn.Linear(32, 32), **{head: nn.Linear(32, 32)})
    selection = select(model)
    assert names(selection) == ["body"]
    assert reasons(selection) == {head: "an output head"}


def test_fc_inside_a_block_is_no_head():
    assert names(select(Named(block=Named(fc=nn.Linear(32, 32))))) == ["block.fc"]


def test_the_head_of_a_transformers_model_is_what_stands_beside_its_body():
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=50,
        num_labels=20,
    )
    selection = select(BertForSequenceClassification(config))
    assert all(name.startswith("bert.") for name in names(selection))
    assert "bert.encoder.layer.0.intermediate.dense" in names(selection)
    assert reasons(selection)["classifier"] == "an output head"


def test_routers_are_left_alone_and_gate_projections_are_not():
    model = Named(mlp=Named(gate=nn.Linear(32, 32), gate_proj=nn.Linear(32, 32), router=nn.Linear(32, 32)))
    selection = select(model)
    assert names(selection) == ["mlp.gate_proj"]
    assert reasons(selection) == {"mlp.gate": "an expert router", "mlp.router": "an expert router"}


def test_small_layers_are_left_alone_with_their_side():
    small = SMALLEST_SIDE - 1
    model = nn.Sequential(
        nn.Linear(small, 64),
        nn.Linear(64, small),
        nn.Conv2d(3, 64, 7),
        nn.Linear(SMALLEST_SIDE, SMALLEST_SIDE),
    )
    selection = select(model)
    assert names(selection) == ["3"]
    left = reasons(selection)
    assert left["0"].startswith(f"too small: {small} channels")
    assert left["1"].startswith(f"too small: {small} channels")
    assert left["2"].startswith("too small: 3 channels")


def test_grouped_convolutions_are_left_alone_even_if_included():
    model = nn.Sequential(nn.Conv2d(32, 32, 3, groups=4), nn.Conv2d(32, 32, 3))
    assert names(select(model)) == ["1"]
    assert "4 groups" in reasons(select(model, include=["*"]))["0"]


def test_subclasses_are_left_alone():
    class MyLinear(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    selection = select(nn.Sequential(MyLinear(32, 32), nn.MultiheadAttention(32, 2)))
    assert names(selection) == []
    assert "MyLinear is a subclass" in reasons(selection)["0"]
    assert "subclass" in reasons(selection)["1.out_proj"]
    assert "1" in reasons(selection)  # its in_proj_weight belongs to no Linear


def test_tied_weights_are_left_alone_even_if_included():
    model = Named(embed=nn.Embedding(32, 32), a=nn.Linear(32, 32), b=nn.Linear(32, 32), c=nn.Linear(32, 32))
    model.a.weight = model.embed.weight
    model.b.weight = model.c.weight
    for selection in (select(model), select(model, include=["a", "b", "c"])):
        assert selection.layers == ()
        left = reasons(selection)
        assert left["a"] == "shares its weight with embed"
        assert left["b"] == "shares its weight with c"
        assert left["c"] == "shares its weight with b"


def test_a_weight_that_is_no_parameter_is_left_alone():
    """torch.nn.utils.prune computes the weight before each forward: writing to it would be lost."""
    from torch.nn.utils import prune

    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    prune.random_unstructured(model[0], "weight", 0.5)
    selection = select(model)
    assert names(selection) == ["1"]
    assert "0" in reasons(selection)


def test_an_uninitialized_lazy_layer_is_left_alone():
    assert "not there yet" in reasons(select(nn.Sequential(nn.LazyLinear(32))))["0"]


# include and exclude


def test_exclude_says_which_pattern():
    model = Named(a=nn.Linear(32, 32), b=nn.Linear(32, 32), c=nn.Linear(32, 32))
    selection = select(model, exclude=["b*", "c"])
    assert names(selection) == ["a"]
    assert reasons(selection) == {"b": "excluded by b*", "c": "excluded by c"}


def test_include_takes_heads_routers_and_small_layers_and_nothing_else():
    model = Named(
        body=nn.Linear(32, 32), lm_head=nn.Linear(32, 32), router=nn.Linear(32, 32), tiny=nn.Linear(8, 4)
    )
    selection = select(model, include=["lm_head", "r*", "tiny"])
    assert names(selection) == ["lm_head", "router", "tiny"]
    assert reasons(selection) == {"body": "not named by --include"}


def test_exclude_beats_include(gpt2):
    selection = select(gpt2, include=["*.mlp.*"], exclude=["transformer.h.0.*"])
    assert names(selection) == ["transformer.h.1.mlp.c_fc", "transformer.h.1.mlp.c_proj"]


def test_patterns_are_case_sensitive_and_match_the_whole_name():
    model = Named(Body=nn.Linear(32, 32), other=nn.Linear(32, 32))
    assert names(select(model, include=["B?dy"])) == ["Body"]
    for pattern in ("body", "Bod"):
        with pytest.raises(InputError, match=f"no layer of the model matches '{pattern}'"):
            select(model, include=[pattern])


def test_patterns_without_a_match_are_all_named_with_examples():
    model = Named(body=nn.Linear(32, 32))
    with pytest.raises(InputError, match=r"matches 'nothing\.\*', 'nowhere'\. .*'body'") as caught:
        select(model, include=["body", "nothing.*"], exclude=["nowhere"])
    assert caught.value.exit_status == 2


def test_a_model_without_an_eligible_layer_is_an_error_with_reasons():
    selection = select(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
    with pytest.raises(InputError, match=r"no layer .* can be made 2:4") as caught:
        require_layers(selection)
    assert "Linear: too small: 4 channels" in str(caught.value)
    assert "LayerNorm: not a Linear" in str(caught.value)
    fine = select(nn.Linear(32, 32))
    assert require_layers(fine) is fine


# The matrix


def test_linear_and_conv1d_matrices():
    weight = torch.randn(24, 20)
    linear, conv1d = Layer("a", "linear", (24, 20)), Layer("b", "conv1d", (20, 24))
    assert (linear.rows, linear.columns) == (24, 20)
    assert torch.equal(linear.to_matrix(weight), weight)
    assert torch.equal(linear.from_matrix(weight), weight)
    assert (conv1d.rows, conv1d.columns) == (20, 24)
    assert torch.equal(conv1d.to_matrix(weight), weight.t())
    back = conv1d.from_matrix(conv1d.to_matrix(weight))
    assert torch.equal(back, weight)
    assert back.is_contiguous()


@pytest.mark.parametrize("shape", [(5, 8, 3, 3), (4, 6, 3, 2), (3, 3, 7, 7), (2, 1, 1, 1), (2, 16, 1, 1)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_conv2d_matrix_has_channels_innermost(shape, layout):
    out, channels, height, width = shape
    weight = torch.randn(shape).to(memory_format=layout)
    layer = Layer("conv", "conv2d", shape)
    matrix = layer.to_matrix(weight)
    padded = (channels + 3) // 4 * 4
    assert matrix.shape == (layer.rows, layer.columns) == (out, height * width * padded)
    for o in range(out):
        for r in range(height):
            for s in range(width):
                for c in range(padded):
                    expected = float(weight[o, c, r, s]) if c < channels else 0.0
                    assert float(matrix[o, (r * width + s) * padded + c]) == expected
    back = layer.from_matrix(matrix)
    assert torch.equal(back, weight)
    assert back.is_contiguous()


def test_groups_of_a_convolution_run_along_its_channels():
    """Two of every four neighbouring channels, at each place of the kernel, are legal; a third is not."""
    from twofour.pattern import check_pattern

    layer = Layer("conv", "conv2d", (1, 6, 2, 2))
    weight = torch.zeros(1, 6, 2, 2)
    weight[0, 1] = weight[0, 3] = weight[0, 4] = weight[0, 5] = 1  # channels 0-3: two, channels 4-5: two
    assert check_pattern(layer.to_matrix(weight)).legal
    weight[0, 0, 1, 0] = 1
    first = check_pattern(layer.to_matrix(weight)).first
    assert (first.row, first.group) == (0, 4)  # place (1, 0) is the third of four places, two groups each


def test_padding():
    assert Layer("a", "linear", (30, 100)).padding(32, 64) == (2, 28)
    assert Layer("a", "linear", (64, 128)).padding(32, 64) == (0, 0)
    assert Layer("a", "conv1d", (1, 4)).padding(16, 16) == (15, 12)
    assert Layer("a", "conv2d", (20, 3, 3, 3)).padding(16, 32) == (12, 28)  # 9 places of 4 channels are 36
