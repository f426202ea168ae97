"""Online coding: how many bits the labels take if a probe that is trained on those sent so far sends the next."""
