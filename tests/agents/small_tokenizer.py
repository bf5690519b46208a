"""A byte-level tokenizer with Qwen3-VL's special tokens, and what an image processor says beside its bounds."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
#: as in Qwen's tokenizer, ordinary tokens that the model may say
UNMARKED = ("<tool_call>", "</tool_call>", "<think>", "</think>")
CORPUS = [
    '<tool_call>\n{"name": "mobile_use", "arguments": {"action": "click", "coordinate": [166, 100]}}\n</tool_call>',
    "open the settings and turn on the wifi",
    " click click home back type",
]

#: what an image processor says beside its bounds
PROCESSOR = {"patch_size": 16, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.25] * 3}


def train_tokenizer() -> Tokenizer:
    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[], show_progress=False
    )
    built.train_from_iterator(CORPUS * 4, trainer)
    built.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    built.add_tokens([AddedToken(text, special=False, normalized=False) for text in UNMARKED])
    return built
