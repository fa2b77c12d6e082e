"""DPO as scripts write it: a tiny Llama, a text data set of pairs; every DPOConfig flag is taken, --lora adds adapters."""

from dataclasses import dataclass

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, HfArgumentParser, LlamaConfig, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer


@dataclass
class Extra:
    lora: bool = False


arguments, extra = HfArgumentParser((DPOConfig, Extra)).parse_args_into_dataclasses()
config = LlamaConfig(
    hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, vocab_size=1024
)
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
reference = None if extra.lora else AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2, "b": 3}, unk_token="<pad>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>")
data = Dataset.from_list([{"prompt": "a b " * 30, "chosen": "b " * 30, "rejected": "a " * 30}] * 64)
peft = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM") if extra.lora else None
DPOTrainer(
    model, reference, args=arguments, train_dataset=data, eval_dataset=data.select(range(8)), processing_class=tokenizer, peft_config=peft
).train()
