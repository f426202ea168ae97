"""Steps of an optimiser for banks of maps: at rates of each site's own, and averaged."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from aligners.maps.base import Aligner

# Keys of an optimiser's state, of a parameter and of a group. A checkpoint has both with the optimiser.
LAST = "last_weights"
COUNT = "averaged_steps"


class SiteSteps:
    """Takes the steps of an optimiser, and leaves in the parameters the average of the weights of all steps.

    A step of Adam has one size, however small the gradient is, so the weights move about what they have learned. Their
    average is nearer to it:

        m_t = (1 − 3 / (t + 2)) m_(t−1) + 3 / (t + 2) w_t,

    in which the weights of step t count about in proportion to t². Between steps the parameters hold this average, so
    whatever reads them, as validations and checkpoints do, reads that; the last weights are in the optimiser's state.

    Reference: Shamir and Zhang 2013, "Stochastic Gradient Descent for Non-smooth Optimization", arXiv 1212.1824,
    section 3 (polynomial-decay averaging, with η = 2).

    Args:
        optimizer: of all parameters.
        aligners: the banks, whose `rate_share` says at which share of the rate a site is trained.
        averaged: whether weights are averaged; else the parameters hold the last ones.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, aligners: Iterable[Aligner], *, averaged: bool) -> None:
        self.optimizer, self.averaged = optimizer, averaged
        self.shares: dict[nn.Parameter, Tensor] = {}
        for aligner in aligners:
            for name, parameter in aligner.named_parameters():
                share = aligner.rate_share(name)
                if share is not None and bool((share < 1).any()):
                    self.shares[parameter] = share.view(-1, *[1] * (parameter.ndim - 1))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Hold the last weights while a gradient is computed and a step of the optimiser is taken, inside."""
        means = self._hold_last()
        before = {parameter: parameter.detach().clone() for parameter in self.shares}
        try:
            yield
        except BaseException:
            for parameter, mean in means.items():
                parameter.data = mean
            raise
        with torch.no_grad():
            for parameter, start in before.items():
                parameter.copy_(start.lerp(parameter, self.shares[parameter]))
            if self.averaged:
                self._hold_mean(means)

    def _hold_last(self) -> dict[nn.Parameter, Tensor]:
        """Put the last weights into the parameters, and return the averages that they held."""
        means: dict[nn.Parameter, Tensor] = {}
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                last = self.optimizer.state[parameter].get(LAST) if parameter in self.optimizer.state else None
                if last is not None:
                    means[parameter] = parameter.data
                    parameter.data = last
        return means

    def _hold_mean(self, means: dict[nn.Parameter, Tensor]) -> None:
        """Move the averages towards the weights that the parameters have now, and put them into the parameters."""
        for group in self.optimizer.param_groups:
            group[COUNT] = group.get(COUNT, 0) + 1
            for parameter in group["params"]:
                last = parameter.data
                mean = means.get(parameter)
                if mean is None:  # after the first step
                    mean = last.clone()
                else:
                    mean.lerp_(last, 3 / (group[COUNT] + 2))
                self.optimizer.state[parameter][LAST] = last
                parameter.data = mean
