"""The maps: banks of closed forms and of networks, one map for each site pair."""
