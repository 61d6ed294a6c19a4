"""Constants of prices that were fitted to published runs, and the rows that fitted them.

Other constants are from datasheets and measurements of single kernels and collectives. Errors are
shown on the rows that fitted nothing too.
"""

from collections.abc import Mapping

FITTED: Mapping[str, tuple[str, ...]] = {
    "`eager`, `contention` of `KernelRates`": (
        *("llmf-031", "llmf-032", "llmf-033", "llmf-039", "llmf-046", "llmf-047", "llmf-048"),
        *("llmf-049", "llmf-050", "llmf-052", "llmf-053", "llmf-055", "llmf-059", "llmf-061"),
        *("llmf-062", "llmf-064", "llmf-067", "llmf-069", "llmf-070"),
    ),
    "rates of `flash_attention_1`": ("llmf-035", "llmf-036"),
    "`clock` of B200 and GB200": (
        *("bridge-245", "bridge-263"),
        *("dgxc-161", "dgxc-162", "dgxc-164", "dgxc-165", "dgxc-166"),
    ),
}
"""Row ids by constant."""
