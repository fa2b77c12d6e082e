from accelerate import Accelerator
from transformers import AutoModelForSeq2SeqLM

accelerator = Accelerator()
model = AutoModelForSeq2SeqLM.from_pretrained("t5")
