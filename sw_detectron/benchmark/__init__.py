"""What SW costs: time and memory of layers and of training steps, and how operations grow."""
