"""GPUs of a restore: chosen, and given their memory back."""
