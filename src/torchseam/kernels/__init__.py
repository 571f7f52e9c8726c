"""Triton kernels. Importing a module of this folder needs Triton; nothing here is imported without it."""
