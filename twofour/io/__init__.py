"""Checkpoints: reading and writing safetensors directories, our format, transformers' part of it."""
