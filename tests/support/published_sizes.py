"""The number of parameters of published models, by preset, from their publishers.

GPT-2, Llama, Mistral, Mixtral, Qwen, DeepSeek-V2, GPT-OSS (in bfloat16), OLMo and SmolLM: the
tensors in the weights on the Hugging Face hub (`safetensors.total` of its API), without causal
masks and a second copy of tied embeddings. Gemma 1 and 2: the parameters beside the embedding in
table 2 of both reports (Mesnard et al. 2024; Riviere et al. 2024), and an embedding for the 256,000
tokens of the published weights. Gemma 3 from 4B up: the total on the hub without the vision tower
and the projector from its width to the model's. Qwen3-Next, Qwen3.5 and Olmo Hybrid: the parameters
of transformers' 5.23 language model with the published config, without a module for multi-token
prediction."""

VISION_TOWER, VISION_WIDTH = 416_866_032, 1152
"""Parameters and width of SigLIP (So400m, 896 × 896 pixels) in Gemma 3."""


def _gemma(beside_embedding: int, width: int) -> int:
    return beside_embedding + 256_000 * width


def _gemma3_text(total: int, width: int) -> int:
    return total - VISION_TOWER - VISION_WIDTH * (width + 1)


_V3_LATENTS = 7168 * (1536 + 512 + 64) + 1536 + 512 + 1536 * 128 * 192 + 512 * 128 * 256
_V3_ATTENTION = _V3_LATENTS + 128 * 128 * 7168 + 2 * 7168
_V3_EXPERTS = 257 * 3 * 7168 * 2048 + 256 * (7168 + 1)
DEEPSEEK_V3 = (
    61 * _V3_ATTENTION + 3 * 3 * 7168 * 18_432 + 58 * _V3_EXPERTS + 7168 * (2 * 129_280 + 1)
)
"""Of its report (arXiv 2412.19437, section 4.2), 671 billion; the tensors on the hub have scales of
8-bit weights and a module for multi-token prediction, too."""
PUBLISHED_SIZES = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "gemma-2b": _gemma(1_981_884_416, 2048),
    "gemma-7b": _gemma(7_751_248_896, 3072),
    "gemma-2-2b": _gemma(2_024_517_888, 2304),
    "gemma-2-9b": _gemma(8_324_201_984, 3584),
    "gemma-2-27b": _gemma(26_047_480_320, 4608),
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": _gemma3_text(4_300_079_472, 2560),
    "gemma-3-12b": _gemma3_text(12_187_325_040, 3840),
    "gemma-3-27b": _gemma3_text(27_432_406_640, 5376),
    "qwen3-0.6b": 751_632_384 - 151_936 * 1024,
    "qwen3-1.7b": 2_031_739_904 - 151_936 * 2048,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "qwen3.5-0.8b": 752_393_024,
    "qwen3.5-27b": 26_895_998_464,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": DEEPSEEK_V3,
    "gpt-oss-20b": 20_914_757_184,
    "olmo-2-1b": 1_484_916_736,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "olmo-2-32b": 32_234_279_936,
    "olmo-3-7b": 7_298_011_136,
    "olmo-3-32b": 32_233_522_176,
    "olmo-hybrid-7b": 7_430_870_688,
    "smollm3-3b": 3_075_098_624,
}
