import lightning as L
from lightning.pytorch.strategies import DeepSpeedStrategy
from transformers import AutoModelForCausalLM


class Tuner(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained("gpt2")


trainer = L.Trainer(devices=2, strategy=DeepSpeedStrategy(config="ds.json"), precision="bf16-mixed")
trainer.fit(Tuner(), loader)
