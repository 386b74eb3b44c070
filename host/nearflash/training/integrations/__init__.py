"""Ways in: a transformers Trainer, accelerate, a DeepSpeed configuration, ranks of torch.distributed."""
