"""The maps: closed forms and networks, each a bank with one map for each site pair."""
