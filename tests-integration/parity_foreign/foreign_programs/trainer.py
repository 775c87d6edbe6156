"""transformers' Trainer on a tiny Llama: labels of unequal counts, gradient accumulation, LoRA."""

import argparse
import os
import tempfile

import torch
from accelerate import DistributedType, FullyShardedDataParallelPlugin
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

VOCABULARY, LENGTH, ROWS, ACCUMULATED = 48, 8, 2, 3


class Texts(Dataset):
    """Rows of tokens; every second pair, which another rank gets, has few labels."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        labels = tokens.clone()
        labels[: 6 * (index // ROWS % 2)] = -100
        return {"input_ids": tokens, "labels": labels}


class InOrder(Trainer):
    """Takes the rows in the order of the data: the Trainer's own sampler may depend on the number of ranks."""

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

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self.fault == "mean":  # each microbatch's own mean, and their sum
            num_items_in_batch = None
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        if self.args.fsdp:  # Accelerate refuses FSDP on CPUs, though it works there
            state = self.accelerator.state
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            state.distributed_type = DistributedType.FSDP
            self.is_fsdp_enabled = True


def train(*, lora=False, fsdp=False, fault="", steps=2):
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_dropout=0.0,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "down_proj"], r=4, init_lora_weights=False))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            per_device_train_batch_size=2 * ROWS // ranks,
            gradient_accumulation_steps=ACCUMULATED,
            max_steps=steps,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            max_grad_norm=0.5,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            fsdp=fsdp,
            average_tokens_across_devices=fault != "own tokens",
        )
        InOrder.fault = fault
        trainer = InOrder(model, arguments, train_dataset=Texts())
        trainer.train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--fault", default="")
    options = parser.parse_args()
    train(lora=options.lora, fsdp=options.fsdp, fault=options.fault)
