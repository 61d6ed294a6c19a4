"""Archives: what `torch.export.save` writes, read without torch."""
