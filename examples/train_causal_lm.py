"""Fine-tune a causal language model with the HF Trainer, optionally with LoRA. Weights are random and the data is made up, so that the
example needs no download; replace `from_config` by `from_pretrained` and `RandomTokens` by a dataset."""

from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments


@dataclass
class Arguments:
    model_name_or_path: str
    block_size: int = 1024
    use_peft: bool = False
    lora_r: int = 16
    lora_alpha: int = 32


class RandomTokens(torch.utils.data.Dataset):
    def __init__(self, vocab_size: int, length: int, rows: int = 1000) -> None:
        self.vocab_size, self.length, self.rows = vocab_size, length, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(self.vocab_size, (self.length,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def main() -> None:
    args, training_args = HfArgumentParser((Arguments, TrainingArguments)).parse_args_into_dataclasses()
    config = AutoConfig.from_pretrained(args.model_name_or_path)
    model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    if args.use_peft:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=args.lora_r, lora_alpha=args.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM")
        )
    Trainer(model=model, args=training_args, train_dataset=RandomTokens(config.vocab_size, args.block_size)).train()


if __name__ == "__main__":
    main()
