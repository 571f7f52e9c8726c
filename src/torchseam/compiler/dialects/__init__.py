"""Dialects: how one producer of graphs spells a part of a seam. Each names nodes, none decides."""
