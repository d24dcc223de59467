"""What refuses a dump before anything is stopped, and what predicts its window."""
