"""Train a small Llama on English text in plain transformers, and save it in the place of a downloaded model."""

from pydoc_data.topics import topics

import torch
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = "runs/lora/base"
NUM_STEPS = 100
BATCH_SIZE = 16
CONTEXT = 64

CONFIG = LlamaConfig(
    vocab_size=256,  # one entry per byte
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=CONTEXT,
    bos_token_id=None,
    eos_token_id=None,
)


def main() -> None:
    """Train on the help texts of Python, and write ``config.json`` and ``model.safetensors``."""
    torch.manual_seed(0)
    tokens = torch.frombuffer(bytearray("".join(topics.values()), "utf-8"), dtype=torch.uint8)
    model = LlamaForCausalLM(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(NUM_STEPS):
        starts = torch.randint(len(tokens) - CONTEXT, (BATCH_SIZE,)).tolist()
        batch = torch.stack([tokens[start : start + CONTEXT] for start in starts]).long()
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(FOLDER)
    print(f"The base model in {FOLDER} has a loss of {loss.item():.2f} nats per byte of English text.")


if __name__ == "__main__":
    main()
