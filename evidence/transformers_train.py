"""Trains a small language model with transformers.Trainer: python transformers_train.py FOLDER [CHECKPOINT]."""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

folder, *checkpoint = sys.argv[1:]
set_seed(3)
tokens = torch.randint(0, 50, (50, 12))
labels = torch.where(torch.rand(50, 12) < 0.3, -100, tokens)  # each batch counts another number of tokens
data = [{"input_ids": ids, "labels": wanted} for ids, wanted in zip(tokens, labels)]
arguments = TrainingArguments(
    output_dir=folder,
    per_device_train_batch_size=8,
    per_device_eval_batch_size=7,
    gradient_accumulation_steps=2,
    num_train_epochs=3,
    learning_rate=3e-3,
    logging_steps=1,
    eval_strategy="steps",
    eval_steps=2,
    save_strategy="steps",
    save_steps=2,
    load_best_model_at_end=True,
    report_to=[],
    use_cpu=True,
    seed=3,
    disable_tqdm=True,
)
model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=2))
if "NUDGED" in os.environ:  # the weights of the start, by their last bit
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 1e-7)
trainer = Trainer(model=model, args=arguments, train_dataset=data[:40], eval_dataset=data[40:])
trainer.train(resume_from_checkpoint=checkpoint[0] if checkpoint else None)
trainer.save_model(f"{folder}/best")
logged = [
    {k: v for k, v in line.items() if "runtime" not in k and "second" not in k} for line in trainer.state.log_history
]
Path(folder, "log.json").write_text(json.dumps(logged))
