"""TRL's SFTTrainer on a tiny Llama: prompts and completions, batches that are padded, gradient accumulation, LoRA."""

import argparse
import os
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

WORDS, ROWS, ACCUMULATED = 50, 2, 2


def tokenizer_of_words() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(WORDS))]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def texts() -> Dataset:
    """Prompts and completions; every second pair of rows, which another rank gets, has short completions."""

    def words(count: int, seed: int) -> str:
        numbers = torch.randint(WORDS, (count,), generator=torch.Generator().manual_seed(seed))
        return " ".join(f"w{number}" for number in numbers.tolist())

    return Dataset.from_list(
        [
            {"prompt": words(3, number), "completion": " " + words(2 if number // ROWS % 2 else 7, 100 + number)}
            for number in range(32)
        ]
    )


class InOrder(SFTTrainer):
    """Takes the rows in the order of the data: the trainer's own sampler may depend on the number of ranks."""

    fault = ""

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self.fault == "past ddp":  # nobody averages the gradients
            model = self.accelerator.unwrap_model(model)
        return super().training_step(model, inputs, num_items_in_batch)

    def _get_train_sampler(self, *given):
        if self.fault == "shuffled":  # in an order that depends on the number of ranks
            generator = torch.Generator().manual_seed(self.args.world_size)
            return torch.utils.data.RandomSampler(self.train_dataset, generator=generator)
        return torch.utils.data.SequentialSampler(self.train_dataset)


def train(*, lora=False, fault="", steps=2):
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    config = LlamaConfig(
        vocab_size=WORDS + 3,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=0,
        eos_token_id=1,
        use_cache=False,
    )
    given = {}
    if lora:
        from peft import LoraConfig

        given["peft_config"] = LoraConfig(target_modules=["q_proj", "down_proj"], r=4, init_lora_weights=False)
    InOrder.fault = fault
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=2 * ROWS // ranks,
            gradient_accumulation_steps=ACCUMULATED,
            max_steps=steps,
            learning_rate=1e-2,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            average_tokens_across_devices=fault != "own tokens",
        )
        InOrder(
            LlamaForCausalLM(config),
            arguments,
            train_dataset=texts(),
            processing_class=tokenizer_of_words(),
            **given,
        ).train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--fault", default="")
    options = parser.parse_args()
    train(lora=options.lora, fault=options.fault)
