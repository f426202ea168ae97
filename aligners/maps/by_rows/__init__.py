"""Closed forms that need rows of the fit and not only their moments: anchors, landmarks, neighbours."""
