"""Element types of tensors."""

from enum import StrEnum


class DType(StrEnum):
    """Element type of a tensor, by PyTorch's name."""

    UINT8 = "uint8"
    INT8 = "int8"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"
    COMPLEX32 = "complex32"
    COMPLEX64 = "complex64"
    COMPLEX128 = "complex128"
    BOOL = "bool"
    BFLOAT16 = "bfloat16"
    UINT16 = "uint16"
    UINT32 = "uint32"
    UINT64 = "uint64"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"

    # Tensors are hashed often, and the hash of an enumeration is slow Python code.
    __hash__ = str.__hash__

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]

    @property
    def is_differentiable(self) -> bool:
        """True if tensors of this type can have a gradient."""
        return self.value.startswith(("float", "bfloat", "complex"))


_ITEMSIZE = {
    DType.UINT8: 1,
    DType.INT8: 1,
    DType.INT16: 2,
    DType.INT32: 4,
    DType.INT64: 8,
    DType.FLOAT16: 2,
    DType.FLOAT32: 4,
    DType.FLOAT64: 8,
    DType.COMPLEX32: 4,
    DType.COMPLEX64: 8,
    DType.COMPLEX128: 16,
    DType.BOOL: 1,
    DType.BFLOAT16: 2,
    DType.UINT16: 2,
    DType.UINT32: 4,
    DType.UINT64: 8,
    DType.FLOAT8_E4M3FN: 1,
    DType.FLOAT8_E5M2: 1,
}
