"""What latents of a dictionary do in the models that it was trained on: ablated, and moved from one to the other."""
