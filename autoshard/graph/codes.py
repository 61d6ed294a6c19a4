"""The numbers that stand for torch objects in model.json.

Source: `torch._export.serde.schema`, schema version 8: ScalarType, Layout, MemoryFormat.
"""

from autoshard.graph.ir import DType

SCHEMA_MAJOR = 8
"""The schema version that these codes belong to; minor versions only add optional members."""

DTYPES = {
    1: DType.UINT8,
    2: DType.INT8,
    3: DType.INT16,
    4: DType.INT32,
    5: DType.INT64,
    6: DType.FLOAT16,
    7: DType.FLOAT32,
    8: DType.FLOAT64,
    9: DType.COMPLEX32,
    10: DType.COMPLEX64,
    11: DType.COMPLEX128,
    12: DType.BOOL,
    13: DType.BFLOAT16,
    28: DType.UINT16,
    29: DType.FLOAT8_E4M3FN,
    30: DType.FLOAT8_E5M2,
    34: DType.UINT32,
    35: DType.UINT64,
}

LAYOUTS = {
    1: "sparse_coo",
    2: "sparse_csr",
    3: "sparse_csc",
    4: "sparse_bsr",
    5: "sparse_bsc",
    6: "_mkldnn",
    7: "strided",
}

MEMORY_FORMATS = {
    1: "contiguous_format",
    2: "channels_last",
    3: "channels_last_3d",
    4: "preserve_format",
}
