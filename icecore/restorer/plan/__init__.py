"""What a restore needs: which cells go where."""
