"""Closed forms that the moments of the fitting rows decide, besides those of `aligners.maps.linear`."""
