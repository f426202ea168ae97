"""What being a bijection costs: invertible networks beside free ones of equal size and training, and beside a floor."""
