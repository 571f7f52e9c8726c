"""Where torchseam meets other libraries. Each is optional and imported when asked for."""
