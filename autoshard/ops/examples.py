"""A call of every kind with named dims: what the table of operators is made from.

A call reads `input[b,s,k] weight[n,k] -> [b,s,n]`. A dim is a name, a product of names such as
`(g c)`, or a number. `ids:int64[b,s]` has another type than float32, `tensors*[b,s]` is one of
a list.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_lowercase

from autoshard.graph import Argument, Token, TokenKind

_PRIMES = "3 5 7 11 13 17 19 23 29 31 37 41 43 47 53 59 61 67 71 73 79 83 89 97 101 103"
_ROUTED = {"tokens": 512, "slots": 4, "experts": 16, "share": 128}
SIZES: Mapping[str, int] = _ROUTED | {
    name: 16 * int(prime) for name, prime in zip(ascii_lowercase, _PRIMES.split(), strict=True)
}
"""Size of each named dim: divisible by 16, as some kernels ask for, and otherwise coprime; of a
mixture of experts there are as many slots of tokens as rows of experts."""


@dataclass(frozen=True, slots=True)
class ExampleCall:
    """A call with named dims.

    Attributes:
        operator: packet and overload.
        tensors: inputs and outputs with their dims.
        arguments: the other arguments.
        namespace: of the operator.
    """

    operator: str
    tensors: str
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    namespace: str = "aten"

    @property
    def name(self) -> str:
        """The operator with its namespace, unless that is `aten`."""
        return self.operator if self.namespace == "aten" else f"{self.namespace}.{self.operator}"


_RECURRENT: Mapping[str, Argument] = {
    "has_biases": False,
    "num_layers": 1,
    "dropout": 0.0,
    "train": True,
    "bidirectional": False,
    "batch_first": True,
}
_NORM: Mapping[str, Argument] = {"momentum": 0.1, "eps": 1e-5, "cudnn_enabled": False}
_EXPERTS: Mapping[str, Argument] = {"num_experts": SIZES["experts"]}
_BAG: Mapping[str, Argument] = {
    "scale_grad_by_freq": False,
    "mode": 0,
    "sparse": False,
    "per_sample_weights": None,
    "include_last_offset": False,
    "padding_idx": -1,
}

EXAMPLES: Mapping[str, Sequence[ExampleCall]] = {
    "Products": [
        ExampleCall("linear.default", "input[b,s,k] weight[n,k] bias[n] -> [b,s,n]"),
        ExampleCall("matmul.default", "self[b,h,s,k] other[b,h,k,t] -> [b,h,s,t]"),
        ExampleCall("mm.default", "self[m,k] mat2[k,n] -> [m,n]"),
        ExampleCall("bmm.default", "self[b,m,k] mat2[b,k,n] -> [b,m,n]"),
        ExampleCall("addmm.default", "self[n] mat1[m,k] mat2[k,n] -> [m,n]"),
        ExampleCall("baddbmm.default", "self[b,m,n] batch1[b,m,k] batch2[b,k,n] -> [b,m,n]"),
        ExampleCall(
            "einsum.default",
            "tensors*[b,s,h,d] tensors*[b,t,h,d] -> [b,h,s,t]",
            {"equation": "bshd,bthd->bhst"},
        ),
        ExampleCall(
            "_grouped_mm.default",
            "self:bfloat16[t,k] mat2:bfloat16[e,k,n] offs:int32[e] -> :bfloat16[t,n]",
        ),
        ExampleCall(
            "lstm.input",
            "input[b,t,i] hx*[1,b,h] hx*[1,b,h] params*[(4 h),i] params*[(4 h),h]"
            " -> [b,t,h] [1,b,h] [1,b,h]",
            _RECURRENT,
        ),
        ExampleCall(
            "gru.input",
            "input[b,t,i] hx[1,b,h] params*[(3 h),i] params*[(3 h),h] -> [b,t,h] [1,b,h]",
            _RECURRENT,
        ),
    ],
    "Attention": [
        ExampleCall(
            "scaled_dot_product_attention.default",
            "query[b,h,s,d] key[b,h,t,d] value[b,h,t,d] attn_mask:bool[b,1,s,t] -> [b,h,s,d]",
        ),
        ExampleCall(
            "scaled_dot_product_attention.default",
            "query[b,(g m),s,d] key[b,g,s,d] value[b,g,s,d] -> [b,(g m),s,d]",
            {"is_causal": True, "enable_gqa": True},
        ),
    ],
    "Normalisations": [
        ExampleCall(
            "layer_norm.default",
            "input[b,s,h] weight[h] bias[h] -> [b,s,h]",
            {"normalized_shape": (SIZES["h"],)},
        ),
        ExampleCall(
            "rms_norm.default",
            "input[b,s,h] weight[h] -> [b,s,h]",
            {"normalized_shape": (SIZES["h"],)},
        ),
        ExampleCall(
            "group_norm.default",
            "input[b,(g c),x] weight[(g c)] bias[(g c)] -> [b,(g c),x]",
            {"num_groups": SIZES["g"]},
        ),
        ExampleCall(
            "batch_norm.default",
            "input[b,c,x] weight[c] bias[c] -> [b,c,x]",
            {**_NORM, "running_mean": None, "running_var": None, "training": True},
        ),
        ExampleCall(
            "batch_norm.default",
            "input[b,c,x] weight[c] bias[c] running_mean[c] running_var[c] -> [b,c,x]",
            {**_NORM, "training": False},
        ),
        ExampleCall("_weight_norm.default", "v[o,i,x] g[o,1,1] -> [o,i,x]", {"dim": 0}),
    ],
    "Tables of rows": [
        ExampleCall("embedding.default", "weight[v,h] indices:int64[b,s] -> [b,s,h]"),
        ExampleCall(
            "embedding_bag.padding_idx",
            "weight[v,h] indices:int64[n] offsets:int64[b] -> [b,h] :int64[n] :int64[b] :int64[0]",
            _BAG,
        ),
    ],
    "Losses": [
        ExampleCall(
            "cross_entropy_loss.default", "self[n,c] target:int64[n] -> []", {"reduction": 2}
        ),
        ExampleCall("cross_entropy_loss.default", "self[n,c] target[n,c] -> []", {"reduction": 1}),
        ExampleCall("nll_loss_nd.default", "self[n,c] target:int64[n] -> []", {"reduction": 2}),
        ExampleCall("mse_loss.default", "self[n,h] target[n,h] -> []"),
        ExampleCall("l1_loss.default", "self[n,h] target[n,h] -> []"),
        ExampleCall("smooth_l1_loss.default", "self[n,h] target[n,h] -> []"),
        ExampleCall("huber_loss.default", "self[n,h] target[n,h] -> []"),
        ExampleCall("kl_div.default", "self[n,h] target[n,h] -> []"),
        ExampleCall("binary_cross_entropy.default", "self[n,h] target[n,h] -> []"),
        ExampleCall("binary_cross_entropy_with_logits.default", "self[n,h] target[n,h] -> []"),
    ],
    "Images and sounds": [
        ExampleCall(
            "conv1d.default", "input[b,i,x] weight[o,i,3] bias[o] -> [b,o,x]", {"padding": (1,)}
        ),
        ExampleCall(
            "conv2d.default",
            "input[b,i,x,y] weight[o,i,3,3] bias[o] -> [b,o,x,y]",
            {"padding": (1, 1)},
        ),
        ExampleCall(
            "conv2d.default",
            "input[b,i,(x 2),(y 2)] weight[o,i,2,2] -> [b,o,x,y]",
            {"stride": (2, 2)},
        ),
        ExampleCall(
            "conv2d.default",
            "input[b,g,x,y] weight[(g m),1,3,3] -> [b,(g m),x,y]",
            {"padding": (1, 1), "groups": SIZES["g"]},
        ),
        ExampleCall(
            "conv2d.padding", "input[b,i,x,y] weight[o,i,3,3] -> [b,o,x,y]", {"padding": "same"}
        ),
        ExampleCall(
            "conv_transpose2d.input",
            "input[b,i,x,y] weight[i,o,2,2] -> [b,o,(x 2),(y 2)]",
            {"stride": (2, 2)},
        ),
        ExampleCall(
            "max_pool2d.default", "self[b,c,(x 2),(y 2)] -> [b,c,x,y]", {"kernel_size": (2, 2)}
        ),
        ExampleCall(
            "max_pool2d.default",
            "self[b,c,(x 2),(y 2)] -> [b,c,x,y]",
            {"kernel_size": (3, 3), "stride": (2, 2), "padding": (1, 1)},
        ),
        ExampleCall(
            "avg_pool2d.default", "self[b,c,(x 2),(y 2)] -> [b,c,x,y]", {"kernel_size": (2, 2)}
        ),
        ExampleCall("adaptive_avg_pool1d.default", "self[b,c,x] -> [b,c,1]", {"output_size": (1,)}),
        ExampleCall(
            "adaptive_avg_pool2d.default", "self[b,c,x,y] -> [b,c,7,7]", {"output_size": (7, 7)}
        ),
        ExampleCall(
            "upsample_nearest2d.vec",
            "input[b,c,x,y] -> [b,c,(x 2),(y 2)]",
            {"output_size": None, "scale_factors": (2.0, 2.0)},
        ),
        ExampleCall(
            "upsample_linear1d.vec",
            "input[b,c,x] -> [b,c,(x 2)]",
            {"output_size": None, "align_corners": False, "scale_factors": (2.0,)},
        ),
        ExampleCall(
            "upsample_bilinear2d.vec",
            "input[b,c,x,y] -> [b,c,(x 2),(y 2)]",
            {"output_size": None, "align_corners": False, "scale_factors": (2.0, 2.0)},
        ),
        ExampleCall(
            "grid_sampler.default",
            "input[b,c,x,y] grid[b,u,v,2] -> [b,c,u,v]",
            {"interpolation_mode": 0, "padding_mode": 0, "align_corners": False},
        ),
    ],
    "Element by element": [
        ExampleCall("add.Tensor", "self[b,s,h] other[h] -> [b,s,h]"),
        ExampleCall("mul.Tensor", "self[b,s,h] other[h] -> [b,s,h]"),
        ExampleCall("div.Tensor", "self[b,s,h] other[b,1,1] -> [b,s,h]"),
        ExampleCall("neg.default", "self[b,s,h] -> [b,s,h]"),
        ExampleCall(
            "to.dtype",
            "self[b,s,h] -> :bfloat16[b,s,h]",
            {"dtype": Token(TokenKind.DTYPE, "bfloat16")},
        ),
        ExampleCall("gelu.default", "self[b,s,h] -> [b,s,h]"),
        ExampleCall("silu.default", "self[b,s,h] -> [b,s,h]"),
        ExampleCall("pow.Tensor_Scalar", "self[b,s,h] -> [b,s,h]", {"exponent": 2}),
        ExampleCall("rsqrt.default", "self[b,s,1] -> [b,s,1]"),
        ExampleCall("where.self", "condition:bool[s,t] self[b,s,t] other[b,s,t] -> [b,s,t]"),
        ExampleCall("masked_fill.Scalar", "self[b,s,t] mask:bool[s,t] -> [b,s,t]", {"value": 0}),
        ExampleCall("dropout.default", "input[b,s,h] -> [b,s,h]", {"p": 0.1, "train": True}),
    ],
    "Reductions and scans": [
        ExampleCall("sum.dim_IntList", "self[b,s,h] -> [b,h]", {"dim": (1,)}),
        ExampleCall("mean.dim", "self[b,s,h] -> [b,s,1]", {"dim": (2,), "keepdim": True}),
        ExampleCall("prod.dim_int", "self[b,s] -> [b]", {"dim": 1}),
        ExampleCall("max.dim", "self[b,s] -> [b] :int64[b]", {"dim": 1}),
        ExampleCall("argmax.default", "self[b,s] -> :int64[b]", {"dim": 1}),
        ExampleCall("any.dim", "self:bool[b,s] -> :bool[b]", {"dim": 1}),
        ExampleCall("var.correction", "self[b,s] -> [b]", {"dim": (1,)}),
        ExampleCall("logsumexp.default", "self[b,s] -> [b]", {"dim": (1,)}),
        ExampleCall("softmax.int", "self[b,h,s,t] -> [b,h,s,t]", {"dim": 3}),
        ExampleCall("log_softmax.int", "self[n,c] -> [n,c]", {"dim": 1}),
        ExampleCall("cumsum.default", "self[b,s] -> [b,s]", {"dim": 1}),
        ExampleCall("sort.default", "self[b,s] -> [b,s] :int64[b,s]"),
        ExampleCall("argsort.default", "self[b,s] -> :int64[b,s]"),
        ExampleCall("topk.default", "self[b,e] -> [b,2] :int64[b,2]", {"k": 2}),
        ExampleCall(
            "fft_fftn.default", "self:complex64[b,s,h] -> :complex64[b,s,h]", {"dim": (1, 2)}
        ),
        ExampleCall(
            "histc.default", "self[n] -> [e]", {"bins": SIZES["e"], "min": 0, "max": SIZES["e"]}
        ),
    ],
    "Reading and writing at positions": [
        ExampleCall("index.Tensor", "self[v,h] indices*:int64[b,s] -> [b,s,h]"),
        ExampleCall("index_put.default", "self[n,h] indices*:int64[m] values[m,h] -> [n,h]"),
        ExampleCall("index_select.default", "self[n,h] index:int64[m] -> [m,h]", {"dim": 0}),
        ExampleCall(
            "index_add.default", "self[n,h] index:int64[m] source[m,h] -> [n,h]", {"dim": 0}
        ),
        ExampleCall("gather.default", "self[n,c] index:int64[n,k] -> [n,k]", {"dim": 1}),
        ExampleCall("scatter.src", "self[n,c] index:int64[n,k] src[n,k] -> [n,c]", {"dim": 1}),
        ExampleCall(
            "scatter_add.default", "self[n,h] index:int64[m,h] src[m,h] -> [n,h]", {"dim": 0}
        ),
    ],
    "Moving elements": [
        ExampleCall(
            "reshape.default",
            "self[b,s,(h d)] -> [b,s,h,d]",
            {"shape": (SIZES["b"], SIZES["s"], SIZES["h"], SIZES["d"])},
        ),
        ExampleCall(
            "reshape.default",
            "self[b,s,h] -> [(b s),h]",
            {"shape": (SIZES["b"] * SIZES["s"], SIZES["h"])},
        ),
        ExampleCall("transpose.int", "self[b,s,h,d] -> [b,h,s,d]", {"dim0": 1, "dim1": 2}),
        ExampleCall("permute.default", "self[b,c,x] -> [x,b,c]", {"dims": (2, 0, 1)}),
        ExampleCall("unsqueeze.default", "self[b,h] -> [b,1,h]", {"dim": 1}),
        ExampleCall("squeeze.dim", "self[b,1,h] -> [b,h]", {"dim": 1}),
        ExampleCall(
            "expand.default",
            "self[b,g,1,s,d] -> [b,g,m,s,d]",
            {"size": tuple(SIZES[name] for name in "bgmsd")},
        ),
        ExampleCall("slice.Tensor", "self[b,s,h] -> [b,1,h]", {"dim": 1, "start": 0, "end": 1}),
        ExampleCall(
            "slice.Tensor", "self[b,(x 2),h] -> [b,x,h]", {"dim": 1, "start": 1, "step": 2}
        ),
        ExampleCall("select.int", "self[b,s,h] -> [b,h]", {"dim": 1, "index": 0}),
        ExampleCall(
            "split.Tensor", "self[b,(2 h)] -> [b,h] [b,h]", {"split_size": SIZES["h"], "dim": 1}
        ),
        ExampleCall(
            "split_with_sizes.default",
            "self[b,(2 h)] -> [b,h] [b,h]",
            {"split_sizes": (SIZES["h"], SIZES["h"]), "dim": 1},
        ),
        ExampleCall("chunk.default", "self[b,(2 h)] -> [b,h] [b,h]", {"chunks": 2, "dim": 1}),
        ExampleCall("unbind.int", "self[2,b,h] -> [b,h] [b,h]"),
        ExampleCall("cat.default", "tensors*[b,s,h] tensors*[b,s,h] -> [b,s,(2 h)]", {"dim": 2}),
        ExampleCall("stack.default", "tensors*[b,h] tensors*[b,h] -> [b,2,h]", {"dim": 1}),
        ExampleCall("pad.default", "self[b,s] -> [b,1137]", {"pad": (0, 1)}),
        ExampleCall("flip.default", "self[b,s] -> [b,s]", {"dims": (1,)}),
        ExampleCall("roll.default", "self[b,x,h] -> [b,x,h]", {"shifts": (1,), "dims": (1,)}),
        ExampleCall("diff.default", "self[b,s] -> [b,1135]"),
        ExampleCall("tril.default", "self[b,s,t] -> [b,s,t]"),
        ExampleCall("repeat.default", "self[1,q,h] -> [b,q,h]", {"repeats": (SIZES["b"], 1, 1)}),
        ExampleCall(
            "repeat_interleave.self_int",
            "self[b,g,s] -> [b,(g m),s]",
            {"repeats": SIZES["m"], "dim": 1},
        ),
        ExampleCall(
            "meshgrid.indexing", "tensors*[x] tensors*[y] -> [x,y] [x,y]", {"indexing": "ij"}
        ),
        ExampleCall("view_as_complex.default", "self[b,s,d,2] -> :complex64[b,s,d]"),
        ExampleCall("view_as_real.default", "self:complex64[b,s,d] -> [b,s,d,2]"),
        ExampleCall("real.default", "self:complex64[b,s,d] -> [b,s,d]"),
        ExampleCall(
            "unfold.default",
            "self[b,16,h] -> [b,7,h,4]",
            {"dimension": 1, "size": 4, "step": 2},
        ),
    ],
    "Mixtures of experts": [
        ExampleCall(
            "dispatch.default",
            "tokens[tokens,d] ids:int64[tokens,slots] -> [experts,share,d]",
            _EXPERTS,
            "autoshard",
        ),
        ExampleCall(
            "grouped_mm.default",
            "rows[experts,share,k] matrices[experts,k,n] ids:int64[tokens,slots]"
            " -> [experts,share,n]",
            {},
            "autoshard",
        ),
        ExampleCall(
            "expert_bias.default",
            "bias[experts,n] ids:int64[tokens,slots] -> [experts,share,n]",
            {},
            "autoshard",
        ),
        ExampleCall(
            "combine.default",
            "rows[experts,share,d] ids:int64[tokens,slots] weights[tokens,slots] -> [tokens,d]",
            _EXPERTS,
            "autoshard",
        ),
    ],
    "Made of arguments": [
        ExampleCall("zeros.default", "-> [b,s]", {"size": (SIZES["b"], SIZES["s"])}),
        ExampleCall("new_ones.default", "self[b,s] -> [b,s]", {"size": (SIZES["b"], SIZES["s"])}),
        ExampleCall("full_like.default", "self[b,s] -> [b,s]", {"fill_value": 1.0}),
        ExampleCall("rand.default", "-> [b,s]", {"size": (SIZES["b"], SIZES["s"])}),
        ExampleCall("bernoulli.p", "self[b,s] -> [b,s]", {"p": 0.5}),
        ExampleCall("multinomial.default", "self[b,v] -> :int64[b,1]", {"num_samples": 1}),
    ],
}
"""Calls by family."""
