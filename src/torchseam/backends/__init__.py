"""What runs a seam's collective (DESIGN section 5)."""
