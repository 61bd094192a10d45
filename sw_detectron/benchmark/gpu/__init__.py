"""What SW costs on a GPU: all that is measured there, within a number of minutes, as one report."""
